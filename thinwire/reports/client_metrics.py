"""Metrics by client: what each client of a run measured of the model that it got, and of its training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.core.errors import NotFound
from thinwire.core.events import Evaluated
from thinwire.core.plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thinwire.store import RunRow, Store

EVAL = "eval/"
FIRST = ("round", "version", "client", "examples", "clipped")  # columns of every run


def client_metrics(store: Store, run: RunRow, number: int | None = None) -> list[dict[str, Any]]:
    """Return one row for each reply with metrics, in the order of rounds and clients; of one round if it is given.

    A row has round, model version, client, number of examples, and the metrics: of the version by their names, of
    training with the prefix "train/". `clipped` names those that were clipped for `best` and `target`. The rows of the
    last model, which no round evaluates, have the round None.

    Raise `NotFound` for a secure or private run: no metric of a single client is known there.
    """
    if RunPlan.from_json(run.plan).is_protected:
        raise NotFound(
            f"{run.run_id} has no metrics of single clients",
            why="in a secure or private run no client tells them",
            hint=f"thinwire runs show {run.run_id}",
        )
    base = {one.round: one.base_version for one in store.rounds(run.run_id)}
    rows = [
        {
            "round": one.round, "version": base.get(one.round), "client": one.device, "examples": one.examples,
            "clipped": " ".join(one.clipped), **{n.removeprefix(EVAL): value for n, value in one.metrics.items()},
        }
        for one in store.updates(run.run_id)
        if one.metrics and number in (None, one.round)
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["round"], row["client"]))
    return rows if number is not None else [*rows, *_last(store, run)]


def _last(store: Store, run: RunRow) -> Iterator[dict[str, Any]]:
    """Yield the rows of models that assignments of their own evaluated: the last one, also before an extension."""
    for _, event in store.events(run.run_id):
        if isinstance(event, Evaluated) and event.by_client:
            for client, metrics in sorted(event.by_client.items()):
                yield {"round": None, "version": event.version, "client": client, "examples": None, "clipped": "",
                       **metrics}  # fmt: skip


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns: the same first ones for all runs, then the metrics by name."""
    names = sorted({name for row in rows for name in row} - {*FIRST})
    return [*FIRST, *names]
