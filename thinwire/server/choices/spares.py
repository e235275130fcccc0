"""Who could be asked in the middle of a round: which idle device can still answer in time, and who is asked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median

from thinwire.core.keys import Key, derive

UNKNOWN = 0.5  # share of a round's deadline that a device gets where nothing was measured yet


def who_could_answer(
    idle: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float, seed: int, number: int
) -> list[str]:
    """Those of the idle devices that should answer within `left_s` seconds, in the order that the seed draws.

    `took` holds the seconds of each device's last answers.

    >>> who_could_answer(["a", "b", "c"], 9.0, {"a": [5.0, 8.0], "b": [10.0]}, 60.0, seed=1, number=4)
    ['c', 'a']
    """
    return in_drawn_order(in_time(idle, left_s, took, deadline_s), seed, number)


def in_time(
    devices: Iterable[str], left_s: float, took: Mapping[str, Sequence[float]], deadline_s: float
) -> Iterator[str]:
    """Those of the devices that should answer within `left_s` seconds; looks no further than is asked for."""
    others_s = cache(lambda: expected_s("", took, deadline_s))
    for device in devices:
        seconds = expected_s(device, took, deadline_s) if took.get(device) else others_s()
        if seconds <= left_s:
            yield device


def in_drawn_order(devices: Iterable[str], seed: int, number: int) -> list[str]:
    """A device's place depends on (seed, round, device) alone, so that it is the same whoever else is there."""
    return sorted(devices, key=lambda device: derive(Key(seed), "spare", number, device).to_bytes())


def expected_s(device: str, took: Mapping[str, Sequence[float]], deadline_s: float) -> float:
    """How long a device is expected to take: its slowest answer of late, else the others' median of these.

    >>> expected_s("a", {"a": [5.0, 8.0]}, 60.0), expected_s("a", {"b": [4.0], "c": [6.0]}, 60.0)
    (8.0, 5.0)
    >>> expected_s("a", {}, 60.0)
    30.0
    """
    if took.get(device):
        return max(took[device])
    others = [max(seconds) for seconds in took.values() if seconds]
    return median(others) if others else UNKNOWN * deadline_s
