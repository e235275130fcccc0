"""What differs between simulated runs, and what it came to: means over seeds, and bytes and seconds to a target."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from thinwire.reports.sweep_results import Cell

SEED, RUN = "run.seed", "run"
NONE = "none"
SIM = "sim"  # what a stored simulation has in place of its split, which its row does not keep


@dataclass(frozen=True)
class Link:
    """A wire that was not there: `mbps` both ways and one round trip each way of a round; 0: as simulated."""

    mbps: float = 0.0
    rtt_ms: float = 0.0

    def seconds(self, sent_bytes: float) -> float:
        """Of one client and round.

        >>> Link(mbps=8, rtt_ms=100).seconds(1_000_000)
        1.2
        """
        return (8e-6 * sent_bytes / self.mbps if self.mbps else 0.0) + 2e-3 * self.rtt_ms


@dataclass(frozen=True)
class Reached:
    """When a run's metric reached the target for the first time: bytes of all clients together until then."""

    round: int
    payload_up: int
    payload_down: int
    seconds: float


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (None of a single one: nothing is known of its spread)."""

    mean: float
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        found = list(values)
        return cls(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None) if found else None


@dataclass(frozen=True)
class Row:
    """The runs that differ in nothing but the seed. `settings`: the keys in which the rows differ, with their values.

    `value` is of the target's metric at the end; the figures to the target are those of the runs that `reached` it.
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
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all"


def compare(
    cells: Sequence[Cell], metric: str, target: float | None, link: Link = Link(), names: Sequence[str] = ()
) -> list[Row]:
    """One row for each setting, in the order in which they stand in the plans' values.

    `names` are those of stored runs, one a cell: runs that are not all done, or that share a seed, are no sample of one
    setting, and each has a row of its own. So has each stored simulation: nothing says how its data were split.
    """
    told = [(cell, dict(_flat(cell))) for cell in cells]
    keys = dict.fromkeys(key for _, flat in told for key in flat)
    differ = [key for key in keys if key != SEED and len({flat.get(key, NONE) for _, flat in told}) > 1]
    groups: dict[tuple[str, ...], list[Cell]] = {}
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


def _is_one_sample(cells: Sequence[Cell]) -> bool:
    """Return whether stored runs differ in the seed alone, as far as is known of them."""
    seeds = [cell.made.plan["run"]["seed"] for cell in cells]
    alike = len(set(seeds)) == len(seeds) and all(cell.status == "done" and cell.made.split != SIM for cell in cells)
    return len(cells) == 1 or alike


def _called(cell: Cell, name: str) -> str:
    return name if cell.status == "done" else f"{name} ({cell.status})"


def reached(cell: Cell, metric: str, target: float, link: Link = Link()) -> Reached | None:
    """The first round whose model reaches it: a loss at most, another metric at least; None: never."""
    up = down = 0
    seconds = 0.0
    for number, one in enumerate(cell.rounds, start=1):
        up, down = up + one.payload_up, down + one.payload_down
        seconds += one.seconds + link.seconds((one.payload_up + one.payload_down) / max(1, one.asked))
        value = one.metrics.get(metric)
        if value is not None and (value <= target if metric == "loss" else value >= target):
            return Reached(number, up, down, seconds)
    return None


def curve(row: Row, metric: str) -> list[tuple[float, Spread]]:
    """(bytes up so far, the metric) after each round in which all runs of the row were measured."""
    points = []
    sums = [list(accumulate(one.payload_up for one in cell.rounds)) for cell in row.cells]
    for number in range(min((len(cell.rounds) for cell in row.cells), default=0)):
        values = [cell.rounds[number].metrics.get(metric) for cell in row.cells]
        known = [value for value in values if value is not None]
        if len(known) == len(values) and (spread := Spread.of(known)):
            points.append((statistics.fmean(sent[number] for sent in sums), spread))
    return points


def figures(row: Row) -> dict[str, Any]:
    """A row as plain values: one level, for JSON and CSV."""
    flat: dict[str, Any] = {**row.settings, "runs": row.runs, "failed": row.failed}
    flat |= {"stopped": row.stopped, "reached": row.reached}
    for name in ("value", "payload_up", "payload_down", "seconds", "rounds_to", "up_to", "down_to", "seconds_to"):
        spread: Spread | None = getattr(row, name)
        flat |= {name: spread.mean if spread else None, f"{name}_sd": spread.sd if spread else None}
    return flat | {"ratio_up": row.ratio_up}


def _row(settings: dict[str, str], cells: list[Cell], metric: str, target: float | None, link: Link) -> Row:
    firsts = [reached(cell, metric, target, link) for cell in cells] if target is not None else []
    there = [first for first in firsts if first]
    sent = [(sum(r.payload_up for r in cell.rounds), _down(cell)) for cell in cells]
    took = [
        sum(r.seconds + link.seconds((r.payload_up + r.payload_down) / max(1, r.asked)) for r in cell.rounds)
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


def _down(cell: Cell) -> int:
    return sum(one.payload_down for one in cell.rounds) if cell.payload_down is None else cell.payload_down


def _flat(cell: Cell) -> Iterator[tuple[str, str]]:
    """All that a cell was made of, by key."""
    for section, keys in cell.made.plan.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                yield f"{section}.{key}", value if isinstance(value, str) else json.dumps(value)
    for name in ("clients", "split", "data", "task_digest"):
        yield name, str(getattr(cell.made, name))
