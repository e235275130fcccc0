"""`thinwire runs metrics`: what each client measured, as a table, JSON or CSV."""

from __future__ import annotations

import csv as csv_file
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def metrics(
    run_id: RunId = "latest",
    number: Annotated[int | None, typer.Option("--round", metavar="N", min=1, help="only this round")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show the metrics of each client: of the model that it got, and of its training."""
    from thinwire.cli.local_state import opened
    from thinwire.core.errors import NotFound, UsageError
    from thinwire.reports.client_metrics import client_metrics, columns

    if csv and json:
        raise UsageError("--csv and --json are both given", why="each is a form of the same rows", hint="one of them")
    with opened(home) as store:
        run = store.run(run_id)
        try:
            rows, why = client_metrics(store, run, number), ""
        except NotFound as error:
            rows, why = list[dict[str, Any]](), str(error.why)
    if json:
        console.document({"run_id": run.run_id, "clients": rows, "why": why})
    elif csv:
        _print_csv(rows)
    elif rows:
        header = columns(rows)
        told = [[_cell(row.get(name)) for name in header] for row in rows]
        console.table(header, told, right=[name for name in header if name not in ("client", "clipped")])
    if not rows and not json:
        console.note(f"{run.run_id} has no metrics of single clients" + (f": {why}" if why else " yet"))


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    from thinwire.core.formatting import csv_cell
    from thinwire.reports.client_metrics import columns

    writer = csv_file.DictWriter(sys.stdout, columns(rows), restval="")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
