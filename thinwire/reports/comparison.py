"""This module compares simulated runs: means over seeds, and the bytes and seconds until a target is reached."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from thinwire.core.plan_schema import Target
from thinwire.reports.sweep_results import Trial

SEED, RUN = "run.seed", "run"
NONE = "none"
SIM = "sim"  # in place of the split of a stored simulation, which its row does not have


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
    figures until the target (`rounds_to` and others) are means over the runs that `reached` it.
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
    cells: tuple[Trial, ...]

    @property
    def label(self) -> str:
        """Return the settings in one line."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all"


def compare(
    cells: Sequence[Trial], metric: str, target: float | None, link: Link = Link(), names: Sequence[str] = ()
) -> list[Row]:
    """Return one row for each setting, sorted by the settings' values.

    `names` are the names of stored runs, one for each cell. Runs of one setting get a row each, if they share a seed or
    are not all done, because they are then no sample. Each stored simulation gets a row of its own too, because its
    split is not known.
    """
    told = [(cell, dict(_flat(cell))) for cell in cells]
    keys = dict.fromkeys(key for _, flat in told for key in flat)
    differ = [key for key in keys if key != SEED and len({flat.get(key, NONE) for _, flat in told}) > 1]
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for cell, flat in told:
        groups.setdefault(tuple(flat.get(key, NONE) for key in differ), []).append(cell)
    settings = {values: dict(zip(differ, values, strict=True)) for values in sorted(groups)}
    called = {id(cell): name for cell, name in zip(cells, names, strict=bool(names))}
    if not names:
        return [_row(settings[values], groups[values], metric, target, link) for values in settings]
    rows = list[Row]()
    for values, of in settings.items():
        for group in [groups[values]] if _is_one_sample(groups[values]) else [[cell] for cell in groups[values]]:
            said = ", ".join(_called(cell, called[id(cell)]) for cell in group)
            rows.append(_row({RUN: said, **of}, group, metric, target, link))
    return rows


def _is_one_sample(cells: Sequence[Trial]) -> bool:
    """Return True if stored runs differ only in the seed, as far as is known of them."""
    seeds = [cell.made.plan["run"]["seed"] for cell in cells]
    alike = len(set(seeds)) == len(seeds) and all(cell.status == "done" and cell.made.split != SIM for cell in cells)
    return len(cells) == 1 or alike


def _called(cell: Trial, name: str) -> str:
    return name if cell.status == "done" else f"{name} ({cell.status})"


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


def _row(settings: dict[str, str], cells: list[Trial], metric: str, target: float | None, link: Link) -> Row:
    firsts = [reached(cell, metric, target, link) for cell in cells] if target is not None else []
    there = [first for first in firsts if first]
    sent = [(sum(r.payload_up for r in cell.rounds), _down(cell)) for cell in cells]
    took = [
        sum(r.seconds + link.seconds((r.payload_up + r.payload_down) / max(1, r.selected)) for r in cell.rounds)
        for cell in cells
    ]
    up = sum(one for one, _ in sent)
    return Row(
        settings=settings,
        runs=len(cells),
        failed=sum(cell.status == "failed" for cell in cells),
        stopped=sum(cell.status == "stopped" for cell in cells),
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


def _down(cell: Trial) -> int:
    return sum(one.payload_down for one in cell.rounds) if cell.payload_down is None else cell.payload_down


def _flat(cell: Trial) -> Iterator[tuple[str, str]]:
    """Yield every property of a cell's run, by key."""
    for section, keys in cell.made.plan.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                yield f"{section}.{key}", value if isinstance(value, str) else json.dumps(value)
    for name in ("clients", "split", "data", "task_digest"):
        yield name, str(getattr(cell.made, name) or ("varies" if name == "clients" else ""))
