"""Runs side by side: their figures, their curves and what differs in their plans, and the figures as CSV."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from thinwire.core.errors import NotFound
from thinwire.reports.comparison import MOST_RUNS, compare_runs, run_curves
from thinwire.web.dependencies import API, StoreDep
from thinwire.web.problems import PROBLEMS
from thinwire.web.routes import text_of
from thinwire.web.schemas import Answer


class ComparedPoint(Answer):
    """Holds a measured round of a compared run: seconds and payload bytes until its end, and its metrics."""

    round: int
    seconds: float | None
    bytes: int | None
    metrics: dict[str, float]


class RunCurve(Answer):
    """Holds the measured rounds of a compared run, at most 400 of them."""

    run_id: str
    points: list[ComparedPoint]


class RunComparison(Answer):
    """Holds runs side by side, as `thinwire runs compare --json` prints them, and their curves.

    `apart` are stopped and failed runs. `differs` has the values of each key in which the plans differ, by run.
    """

    metric: str
    target: float | None
    metrics: list[str]
    rows: list[dict[str, Any]]
    apart: list[dict[str, Any]]
    differs: dict[str, dict[str, str]]
    curves: list[RunCurve]


RunIds = Annotated[str, Query(pattern=r"^[A-Za-z0-9_,-]{1,700}$", description="ids, separated by commas")]
Metric = Annotated[str, Query(max_length=80)]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/compare.csv", response_class=Response, include_in_schema=False)
def compared_csv(store: StoreDep, runs: RunIds, metric: Metric = "") -> Response:
    """Return the figures of up to eight runs side by side."""
    document = compare_runs(store, _ids(runs), metric).document()
    return text_of([*document["rows"], *document["apart"]], [], "comparison")


@router.get("/compare")
def compared(store: StoreDep, runs: RunIds, metric: Metric = "", target: float | None = None) -> RunComparison:
    """Return up to eight runs side by side, with their curves."""
    ids = _ids(runs)
    found: dict[str, Any] = compare_runs(store, ids, metric, target).document()
    return RunComparison(**found, curves=[RunCurve(**one) for one in run_curves(store, ids)])


def _ids(runs: str) -> list[str]:
    """Return the names of the runs to compare; `NotFound` unless they are one to `MOST_RUNS`."""
    ids = list(dict.fromkeys(filter(None, runs.split(","))))
    if not 1 <= len(ids) <= MOST_RUNS:
        raise NotFound(
            f"{len(ids)} runs to compare", why=f"one to {MOST_RUNS} stand side by side", hint="?runs=A,B with their ids"
        )
    return ids
