"""Bytes and seconds to a target: what a chain is worth on a wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.accuracy_bytes.reading import METRIC, POINTS
from thinwire.reports.comparison import Link, Reached, reached
from thinwire.reports.sweep_results import Trial

LINKS = tuple(Link(mbps, rtt_ms) for mbps in (1.0, 10.0, 100.0) for rtt_ms in (20.0, 200.0))


@dataclass(frozen=True)
class ToTarget:
    """Medians over seeds, of all clients together; None where half of the seeds or more never got there.

    `seconds`: on each of `LINKS`, from the bytes of a client in a round, two round trips, and the round's own seconds
    as they were measured with nothing else running.
    """

    target: float  # points
    reached: int
    seeds: int
    rounds: float | None
    payload_up: float | None
    payload_down: float | None
    seconds: dict[str, float | None]


def to_target(cells: Sequence[Trial], target: float, round_s: float) -> ToTarget:
    """When these cells reach so many points for the first time.

    The cells' own seconds are not used: other work ran beside them.
    """
    alone = [replace(cell, rounds=[replace(one, seconds=round_s) for one in cell.rounds]) for cell in cells]
    first = [reached(cell, METRIC, target / POINTS) for cell in alone]
    on_links = {
        name(link): _median([_seconds(reached(cell, METRIC, target / POINTS, link)) for cell in alone])
        for link in LINKS
    }
    return ToTarget(
        target,
        sum(one is not None for one in first),
        len(first),
        _median([one.round if one else math.inf for one in first]),
        _median([one.payload_up if one else math.inf for one in first]),
        _median([one.payload_down if one else math.inf for one in first]),
        on_links,
    )


def name(link: Link) -> str:
    """
    >>> name(Link(10.0, 200.0))
    '10 Mb/s, 200 ms'
    """
    return f"{link.mbps:g} Mb/s, {link.rtt_ms:g} ms"


def _seconds(one: Reached | None) -> float:
    return one.seconds if one else math.inf


def _median(values: Sequence[float]) -> float | None:
    found = median(values) if values else math.inf
    return found if math.isfinite(found) else None
