"""Compare runs: bytes and seconds, also until a target is reached, what differs in their plans, and their curves.

Simulated runs of a sweep are compared by settings, with mean and spread over seeds (`compare`). Stored runs have a row
each (`compare_runs`): the command line, the API and the dashboard show what that function returns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from thinwire.core.errors import UsageError
from thinwire.core.plan_values import Target
from thinwire.core.run_events import FIGURES_OF_SAMPLE, is_sampled
from thinwire.reports.sweep_results import Trial, TrialSpec
from thinwire.store.explaining import totals_of

if TYPE_CHECKING:
    from thinwire.store import RunRow, Store

SEED, RUN = "run.seed", "run"
NONE = "none"
UNFINISHED_STATUSES = ("stopped", "failed")
POINTS = 400  # most points of a curve: a screen's width has 1 000 to 2 000 pixels for two curves
FACTS = (
    "task", "source", "status", "version", "rounds_closed", "rounds_total", "best_value", "wire_up", "wire_down",
    "dense_up", "dense_down", "started_at", "finished_at",
)  # fmt: skip
MAX_RUNS = 8  # of a comparison on the page: more colours are not told apart


@dataclass(frozen=True)
class Link:
    """Describes a link to add to a simulation, which has none: `mbps` in both directions, and a round trip for each
    direction.

    The value 0 leaves the simulation as it is.
    """

    mbps: float = 0.0
    rtt_ms: float = 0.0

    def seconds(self, sent_bytes: float) -> float:
        """Return the seconds that one client spends on the link in one round.

        >>> Link(mbps=8, rtt_ms=100).seconds(1_000_000)
        1.2
        """
        return (8e-6 * sent_bytes / self.mbps if self.mbps else 0.0) + 2e-3 * self.rtt_ms


@dataclass(frozen=True)
class Reached:
    """Holds the first round whose model reached the target, and all clients' bytes until then."""

    round: int
    payload_up: int
    payload_down: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Holds a mean and the sample standard deviation, which is None for a single value."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the mean and deviation of values; None if there are no values."""
        found = list(values)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None) if found else None


@dataclass(frozen=True)
class Row:
    """Holds the figures of runs that differ only in the seed.

    `settings` has the keys in which the rows differ, with their values. `value` is the target's metric at the end. The
    figures until the target (`rounds_to` and others) are means over the runs that `reached` it. With Poisson sampling
    bytes are None, and so are seconds to which a link adds the time of these bytes.
    """

    settings: dict[str, str]
    runs: int
    failed: int
    stopped: int
    value: Spread | None
    payload_up: Spread | None
    payload_down: Spread | None
    ratio_up: float | None  # against dense float32
    seconds: Spread | None
    reached: int
    rounds_to: Spread | None
    up_to: Spread | None
    down_to: Spread | None
    seconds_to: Spread | None
    cells: tuple[Trial, ...]  # the runs with these figures

    @property
    def label(self) -> str:
        """Return the settings in one line."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all"


def compare(cells: Sequence[Trial], metric: str, target: float | None, link: Link = Link()) -> list[Row]:
    """Return one row for each setting, sorted by the settings' values; its figures are those of the runs that are done.

    A run that failed or was stopped counts in `runs` and its status, and in what `reached` the target.
    """
    told = [(cell, dict(_flat(cell))) for cell in cells]
    differ = [key for key in _differing([flat for _, flat in told]) if key != SEED]
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for cell, flat in told:
        groups.setdefault(tuple(flat.get(key, NONE) for key in differ), []).append(cell)
    settings = {values: dict(zip(differ, values, strict=True)) for values in sorted(groups)}
    done = {values: [cell for cell in cells if cell.status == "done"] for values, cells in groups.items()}
    return [_row(settings[values], groups[values], done[values], metric, target, link) for values in settings]


def _differing(told: Sequence[dict[str, str]]) -> list[str]:
    """Return the keys whose values are not the same everywhere."""
    keys = dict.fromkeys(key for flat in told for key in flat)
    return [key for key in keys if len({flat.get(key, NONE) for flat in told}) > 1]


@dataclass(frozen=True)
class RunsCompared:
    """Stored runs side by side: a row each in the order in which they were named.

    `apart` are those that were stopped or failed: what they sent bought no whole run. `differs` has the value of each
    key in which the plans differ, by run.
    """

    metric: str
    target: float | None
    metrics: list[str]
    runs: list[RunRow]
    rows: list[Row]
    apart: list[Row]
    differs: dict[str, dict[str, str]]

    def document(self) -> dict[str, Any]:
        """Return everything as JSON values, as the command line and the API print it."""
        by_id = {row.run_id: row for row in self.runs}

        def told(rows: Sequence[Row]) -> list[dict[str, Any]]:
            return [figures(row) | _facts(by_id[row.settings[RUN]]) for row in rows]

        return {
            "metric": self.metric, "target": self.target, "metrics": self.metrics, "rows": told(self.rows),
            "apart": told(self.apart), "differs": self.differs,
        }  # fmt: skip


def compare_runs(
    store: Store, names: Sequence[str], metric: str = "", target: float | None = None, link: Link = Link(),
    with_rounds: bool = False,
) -> RunsCompared:  # fmt: skip
    """Compare stored runs, named by id, unique prefix or `latest`; raise `NotFound` for one that is not there.

    Bytes are those of `runs show`, seconds those of the rounds. Without `metric` it is what the first run is judged by.
    Rounds are read only if `with_rounds`, or where a target or a link needs them. Raise `UsageError` if a link is added
    to a run on devices.
    """
    runs = list({row.run_id: row for row in map(store.run, names)}.values())
    if link != Link() and (measured := [row.run_id for row in runs if row.source == "devices"]):
        raise UsageError(
            f"the time on a link is not added to {', '.join(measured)}",
            why="a run on devices: the time on their own links is in its seconds",
            hint="leave out --mbps and --rtt-ms, or compare simulated runs only",
        )
    whole = with_rounds or target is not None or link != Link()
    cells = [_cell(store, row, whole) for row in runs]
    told = [dict(_flat(cell)) for cell in cells]
    metric = metric or judged_by(runs[0].plan, {name for row in runs for name in row.metrics})
    differ = _differing(told)
    settings = [
        {RUN: row.run_id, **{key: flat.get(key, NONE) for key in differ}} for row, flat in zip(runs, told, strict=True)
    ]
    rows = [_row(of, [cell], [cell], metric, target, link) for of, cell in zip(settings, cells, strict=True)]
    values = {key: {of[RUN]: of[key] for of in settings} for key in differ}
    ended = {row.run_id for row in runs if row.status in UNFINISHED_STATUSES}
    return RunsCompared(
        metric, target, sorted({name for row in runs for name in (*row.metrics, *row.metrics0)}), runs,
        [row for row in rows if row.settings[RUN] not in ended], [row for row in rows if row.settings[RUN] in ended],
        values,
    )  # fmt: skip


def judged_by(plan: Mapping[str, Any], measured: Collection[str]) -> str:
    """Return the metric by which a run is judged: that of its target, or of `best` if the plan names one, or accuracy.

    The loss is left where no accuracy was measured.

    >>> judged_by({"run": {"metric": "loss"}}, ["loss", "accuracy"]), judged_by({"run": {"metric": "loss"}}, ["loss"])
    ('accuracy', 'loss')
    """
    run = plan["run"]
    if target := run.get("target"):
        return str(target["metric"])
    return "accuracy" if run["metric"] == "loss" and "accuracy" in measured else str(run["metric"])


def run_curves(store: Store, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each run its measured rounds: number, seconds and payload bytes until then, and the metrics.

    The bytes are None in a run with Poisson sampling.
    """
    found = []
    for row in {row.run_id: row for row in map(store.run, names)}.values():
        first = [{"round": 0, "seconds": 0.0, "bytes": 0, "metrics": row.metrics0}] if row.metrics0 else []
        points = first + [
            {"round": one.round, "seconds": one.until_s, "bytes": one.until_payload, "metrics": one.decisive}
            for one in store.points(row.run_id, POINTS)
        ]
        hidden: dict[str, Any] = {"bytes": None} if is_sampled(row.plan) else {}
        found.append({"run_id": row.run_id, "points": [point | hidden for point in points]})
    return found


def _cell(store: Store, row: RunRow, whole: bool) -> Trial:
    rounds = store.rounds(row.run_id) if whole else []
    clients = store.client_count(row.run_id)[0] if row.source == "sim" else 0  # the number of devices changes
    made = TrialSpec(row.plan, clients, "", "", row.task_report.source_digest)
    seconds = totals_of(store, row).seconds if row.rounds_closed else 0.0
    return replace(Trial.of(made, row, rounds), payload_up=row.payload_up, seconds=None if whole else seconds)


def _facts(row: RunRow) -> dict[str, Any]:
    """Return what a row of a stored run has besides: what it is, how far it came, and its bytes on the wire."""
    hidden = FIGURES_OF_SAMPLE if is_sampled(row.plan) else ()
    found = {name: None if name in hidden else getattr(row, name) for name in FACTS}
    return found | {"metrics": row.decisive, "best_metric": row.plan["run"]["metric"]}


def reached(cell: Trial, metric: str, target: float, link: Link = Link()) -> Reached | None:
    """Return the first round whose model reaches the target: a loss at most, another metric at least; None if none
    does.
    """
    up = down = 0
    seconds = 0.0
    for number, one in enumerate(cell.rounds, start=1):
        up, down = up + one.payload_up, down + one.payload_down
        seconds += one.seconds + link.seconds((one.payload_up + one.payload_down) / max(1, one.selected))
        if Target(metric=metric, value=target).is_met(one.metrics):
            return Reached(number, up, down, seconds)
    return None


def curve(row: Row, metric: str) -> list[tuple[float, Spread]]:
    """Return (uplink bytes so far, the metric) after each round in which all runs of the row were evaluated."""
    points = []
    sums = [list(accumulate(one.payload_up for one in cell.rounds)) for cell in row.cells]
    for number in range(min((len(cell.rounds) for cell in row.cells), default=0)):
        values = [cell.rounds[number].metrics.get(metric) for cell in row.cells]
        known = [value for value in values if value is not None]
        if len(known) == len(values) and (spread := Spread.of(known)):
            points.append((statistics.fmean(sent[number] for sent in sums), spread))
    return points


def figures(row: Row) -> dict[str, Any]:
    """Return a row as plain values on one level, for JSON and CSV."""
    flat: dict[str, Any] = {**row.settings, "runs": row.runs, "failed": row.failed}
    flat |= {"stopped": row.stopped, "reached": row.reached}
    for name in ("value", "payload_up", "payload_down", "seconds", "rounds_to", "up_to", "down_to", "seconds_to"):
        spread: Spread | None = getattr(row, name)
        flat |= {name: spread.mean if spread else None, f"{name}_sd": spread.sd if spread else None}
    return flat | {"ratio_up": row.ratio_up}


def _row(
    settings: dict[str, str], of: list[Trial], cells: list[Trial], metric: str, target: float | None, link: Link
) -> Row:
    """Return the row of the runs `of`, with the figures of those in `cells`."""
    firsts = [reached(cell, metric, target, link) for cell in of] if target is not None else []
    there = [first for first in firsts if first]
    sent = [(_uplink_bytes(cell), _downlink_bytes(cell)) for cell in cells]
    took = [_seconds(cell, link) for cell in cells]
    up = sum(one for one, _ in sent)
    row = Row(
        settings=settings,
        runs=len(of),
        failed=sum(cell.status == "failed" for cell in of),
        stopped=sum(cell.status == "stopped" for cell in of),
        value=Spread.of(cell.metrics[metric] for cell in cells if metric in cell.metrics),
        payload_up=Spread.of(one for one, _ in sent),
        payload_down=Spread.of(other for _, other in sent),
        ratio_up=sum(cell.dense_up for cell in cells) / up if up else None,
        seconds=Spread.of(took),
        reached=len(there),
        rounds_to=Spread.of(first.round for first in there),
        up_to=Spread.of(first.payload_up for first in there),
        down_to=Spread.of(first.payload_down for first in there),
        seconds_to=Spread.of(first.seconds for first in there),
        cells=tuple(cells),
    )
    if not any(is_sampled(cell.made.plan) for cell in of):
        return row
    row = replace(row, payload_up=None, payload_down=None, ratio_up=None, up_to=None, down_to=None)
    return replace(row, seconds=None, seconds_to=None) if link.mbps else row


def _uplink_bytes(cell: Trial) -> int:
    return sum(one.payload_up for one in cell.rounds) if cell.payload_up is None else cell.payload_up


def _seconds(cell: Trial, link: Link) -> float:
    if cell.seconds is not None:
        return cell.seconds
    return sum(r.seconds + link.seconds((r.payload_up + r.payload_down) / max(1, r.selected)) for r in cell.rounds)


def _downlink_bytes(cell: Trial) -> int:
    return sum(one.payload_down for one in cell.rounds) if cell.payload_down is None else cell.payload_down


def _flat(cell: Trial) -> Iterator[tuple[str, str]]:
    """Yield every property of a cell's run, by key."""
    for section, keys in cell.made.plan.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                yield f"{section}.{key}", value if isinstance(value, str) else json.dumps(value)
    for name in ("clients", "split", "data", "task_digest", "code_digest"):
        yield name, str(getattr(cell.made, name) or ("varies" if name == "clients" else ""))
