"""Tables of several runs: a page of the runs that match, in the order that a person chooses; runs side by side, with
their figures, their curves and what differs in their plans; both as CSV too.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from thinwire.core.errors import UsageError
from thinwire.core.events import ENDED
from thinwire.core.run_events import FIGURES_OF_SAMPLE, is_sampled
from thinwire.reports.comparison import MAX_RUNS, compare_runs, run_curves
from thinwire.store import RunRow, Store
from thinwire.store.run_list import MAX_SEARCH, RunFilter, SortKey
from thinwire.web.access import API, StoreDep, from_state
from thinwire.web.problems import PROBLEMS
from thinwire.web.rows import First, as_csv, text_of
from thinwire.web.run_queries import Reader
from thinwire.web.schemas import Answer

ListKey = Literal[SortKey, "disk"]
MAX_ROWS: Final = 10_000  # of a CSV


class RunSummary(Answer):
    """Holds a row of the table of runs; `best` is the best value of the plan's `metric`; without one, the latest.

    `version` of `rounds_total` rounds made a step. `rounds_closed` also counts the rounds that closed without one.
    Bytes are null in a run with Poisson sampling.
    """

    run_id: str
    name: str = ""
    tags: tuple[str, ...] = ()
    status: str
    sentence: str
    task: str
    source: str
    rounds_closed: int
    rounds_total: int
    version: int
    metric: str
    best: float | None
    payload_up: int | None
    payload_down: int | None
    dense_up: int | None
    seconds: float | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    disk_bytes: int | None


class RunList(Answer):
    """Holds a page of runs: those from the place `first` on, of `total` that match; `statuses` counts all runs."""

    total: int
    first: int
    statuses: dict[str, int]
    runs: list[RunSummary]


class DiskSizes:
    """Counts the bytes of runs on disk; an ended run is counted again only if its folder has changed."""

    def __init__(self, runs: Path | None) -> None:
        self._runs = runs
        self._known: dict[str, tuple[int, int]] = {}  # run -> modification time of its folder, bytes
        self._counting = threading.Lock()

    def of(self, run_id: str, is_over: bool) -> int | None:
        """Return the bytes of a run's folder; None if the dashboard has no state directory to look at."""
        if self._runs is None:
            return None
        folder = self._runs / run_id
        try:
            changed = folder.stat().st_mtime_ns
        except OSError:
            return 0
        with self._counting:
            known = self._known.get(run_id)
            if is_over and known is not None and known[0] == changed:
                return known[1]
            size = sum(_sizes(folder))
            self._known[run_id] = changed, size
        return size


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes of the files of a folder and of those in it; one that is removed meanwhile has none."""
    left = [folder]
    while left:
        try:
            entries = list(left.pop().iterdir())
        except OSError:
            continue
        for entry in entries:
            try:
                found = entry.lstat()
            except OSError:
                continue
            if stat.S_ISDIR(found.st_mode):
                left.append(entry)
            elif stat.S_ISREG(found.st_mode):
                yield found.st_size


class RunListReader:
    """Makes pages of the table of runs."""

    def __init__(self, store: Store, reader: Reader, runs: Path | None) -> None:
        self._store, self._reader, self._disk = store, reader, DiskSizes(runs)

    def page(self, found: RunFilter, sort: ListKey, descending: bool, first: int, count: int) -> RunList:
        """Return a page of the runs that match, in this order."""
        total, statuses = self._store.run_counts(found)
        if sort == "disk":
            rows = self._store.runs_of(self._by_disk(found, descending)[first : first + count])
        else:
            rows = self._store.some_runs(found, sort, descending, first, count)
        return RunList(total=total, first=first, statuses=statuses, runs=self._summaries(rows))

    def _by_disk(self, found: RunFilter, descending: bool) -> list[str]:
        ids = self._store.run_ids(found)  # newest first, and sorting keeps that among equal ones
        # True: by the sizes that are known, or the folders of all running runs would be counted for each page.
        return sorted(ids, key=lambda run_id: self._disk.of(run_id, True) or 0, reverse=descending)

    def _summaries(self, rows: Sequence[RunRow]) -> list[RunSummary]:
        return [self._summary(row, said) for row, said in zip(rows, self._reader.sentences(rows), strict=True)]

    def _summary(self, row: RunRow, sentence: str) -> RunSummary:
        own = {name: getattr(row, name) for name in RunSummary.model_fields if hasattr(row, name)}
        own |= {name: None for name in FIGURES_OF_SAMPLE if name in own and is_sampled(row.plan)}
        metric = str(row.plan["run"]["metric"])
        best = row.decisive.get(metric) if row.best_value is None else row.best_value
        took = None if row.started_at is None or row.finished_at is None else row.finished_at - row.started_at
        disk = self._disk.of(row.run_id, row.status in ENDED)
        return RunSummary(**own, sentence=sentence, metric=metric, best=best, seconds=took, disk_bytes=disk)


Search = Annotated[str, Query(max_length=MAX_SEARCH)]
Statuses = Annotated[list[str] | None, Query(max_length=10)]
Count = Annotated[int, Query(ge=1, le=200)]
RunListDep = Annotated[RunListReader, from_state("run_list")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/run-list.csv", response_class=Response, include_in_schema=False)
def run_list_csv(
    reader: RunListDep, q: Search = "", status: Statuses = None, archived: bool = False, sort: ListKey = "number",
    descending: bool = True,
) -> Response:  # fmt: skip
    """Return the runs that match, at most `MAX_ROWS` of them."""
    found = reader.page(RunFilter(q, tuple(status or ()), archived), sort, descending, 0, MAX_ROWS)
    return as_csv(found.runs, RunSummary, "runs")


@router.get("/run-list")
def run_list(
    reader: RunListDep, q: Search = "", status: Statuses = None, archived: bool = False, sort: ListKey = "number",
    descending: bool = True, first: First = 0, count: Count = 50,
) -> RunList:  # fmt: skip
    """Return a page of the runs whose id, name, tags or task have all words of `q`, or of those in the archive."""
    return reader.page(RunFilter(q, tuple(status or ()), archived), sort, descending, first, count)


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


@router.get("/compare.csv", response_class=Response, include_in_schema=False)
def compare_csv(store: StoreDep, runs: RunIds, metric: Metric = "") -> Response:
    """Return the figures of up to eight runs side by side."""
    document = compare_runs(store, _ids(runs), metric).document()
    return text_of([*document["rows"], *document["apart"]], [], "comparison")


@router.get("/compare")
def compare(store: StoreDep, runs: RunIds, metric: Metric = "", target: float | None = None) -> RunComparison:
    """Return up to eight runs side by side, with their curves."""
    ids = _ids(runs)
    found: dict[str, Any] = compare_runs(store, ids, metric, target).document()
    return RunComparison(**found, curves=[RunCurve(**one) for one in run_curves(store, ids)])


def _ids(runs: str) -> list[str]:
    """Return the ids of the runs to compare; `UsageError` unless they are one to `MAX_RUNS`."""
    ids = list(dict.fromkeys(filter(None, runs.split(","))))
    if not 1 <= len(ids) <= MAX_RUNS:
        raise UsageError(
            f"{len(ids)} runs to compare", why=f"one to {MAX_RUNS} stand side by side", hint="?runs=A,B with their ids"
        )
    return ids
