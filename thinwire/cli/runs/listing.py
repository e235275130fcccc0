"""`thinwire runs list`, a table of runs, narrowed by tags, the archive and deletion; and `thinwire runs metrics`, what
each client measured, as a table, JSON or CSV.
"""

from __future__ import annotations

import csv as csv_file
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId
from thinwire.core import formatting
from thinwire.core.events import ENDED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thinwire.reports.sweep_results import Group
    from thinwire.store import RunRow


def list_(
    tag: Annotated[list[str] | None, typer.Option("--tag", help="only runs with this tag; repeatable")] = None,
    archived: Annotated[bool, typer.Option("--archived", help="only archived runs")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="only what is left of deleted runs")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """List all runs, the newest first, and the groups of simulated runs; archived and deleted runs are left out."""
    from thinwire.cli.local_state import again, aggregator_home, end_abandoned, has_database, opened
    from thinwire.cli.runs.render import run_summary
    from thinwire.reports.sweep_results import groups
    from thinwire.store.read_models import MEMORY_TEXT

    end_abandoned(home)
    if not has_database(aggregator_home(home)):
        rows: list[RunRow] = []
    else:
        with opened(home) as store:
            rows = [row for row in store.runs(with_deleted=deleted) if (row.deleted_at is not None) == deleted]
    if not deleted:
        rows = [row for row in rows if (row.archived_at is not None) == archived and set(tag or ()) <= {*row.tags}]
    narrowed = bool(tag or archived or deleted)
    swept = [] if narrowed else groups(aggregator_home(home).sweeps)
    if json:
        document = [{k: v for k, v in run_summary(row).items() if k != "plan"} for row in rows]
        console.document([*document, *({"run_id": None, **_group(group)} for group in swept)])
        return
    if rows and deleted:
        console.table(("run", "rounds", "deleted"), [_deleted_row(row) for row in rows], right=("rounds",))
    elif rows:
        _table(rows)
    elif narrowed:
        console.note(f"no such runs; all others: {again('runs list', home)}")
    elif not swept:
        console.note(f"no runs yet; to make one: {again('run PLAN', home)}")
    note_halted([] if deleted else rows, home)
    for row in rows:
        if row.status == "queued" and row.status_text.startswith(MEMORY_TEXT):
            console.note(f"{row.run_id} is {row.status_text}")
    if rows and swept:
        console.line()
    if swept:
        lines = [(g.name, g.task or formatting.NOTHING, f"{g.done}/{g.runs}", console.ago(g.at)) for g in swept]
        console.table(("group", "task", "runs", "last"), lines, right=("runs",))


def _group(group: Group) -> dict[str, Any]:
    """Return a group of simulated runs as JSON types."""
    status = "done" if group.done == group.runs else "partial"
    return {"group": group.name, "task": group.task, "status": status, "done": group.done, "runs": group.runs}


def _table(rows: Sequence[RunRow]) -> None:
    """Print the list of runs; it has the columns for names and tags only if a run has some."""
    header = ["run", "status", "rounds", "accuracy", "loss", "payload up", "made"]
    cells = [list(_row(row)) for row in rows]
    for title, words in (("name", [row.name for row in rows]), ("tags", [" ".join(row.tags) for row in rows])):
        if any(words):
            header.append(title)
            cells = [[*known, word] for known, word in zip(cells, words, strict=True)]
    console.table(header, cells, right=header[2:6])


def _deleted_row(row: RunRow) -> tuple[str, ...]:
    """Return the cells of what is left of a deleted run."""
    from thinwire.store.queries import deleted_text

    return row.run_id, f"{row.rounds_closed}/{row.rounds_total}", deleted_text(row)


def _row(row: RunRow) -> tuple[str, ...]:
    """Return the cells of a run in the list."""
    done = f"{row.rounds_closed}/{row.rounds_total}"
    accuracy, loss = formatting.figure(row.decisive.get("accuracy")), formatting.figure(row.decisive.get("loss"))
    return row.run_id, row.status, done, accuracy, loss, formatting.size(row.payload_up), console.ago(row.created_at)


def note_halted(rows: Sequence[RunRow], home: Path | None) -> None:
    """Note the runs that make no progress because no aggregator is running, or its disk is full."""
    from thinwire.cli.local_state import aggregator_home, alive, way_back
    from thinwire.core.disk_reserve import disk_full_text

    if (said := disk_full_text(aggregator_home(home).root)) and alive(home) is not None:
        console.note(said)
    halted = [row.run_id for row in rows if row.source == "devices" and row.status not in ENDED]
    if halted and alive(home) is None:
        console.note(f"no aggregator is running; to go on with {', '.join(halted)}: {way_back(home)}")


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
