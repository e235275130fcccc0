"""What is to happen on a virtual clock: the soonest first, and what falls together in the order it was put in."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from thinwire.core.clock import VirtualClock

T = TypeVar("T")


@dataclass(order=True)
class Entry(Generic[T]):
    """`at` is on the clock; numbers count up as things are put in."""

    at: float
    number: int
    what: T = field(compare=False)


class Timetable(Generic[T]):
    """Law: nothing is lost by an exception: what was taken when it was raised is the next to be taken.

    >>> clock = VirtualClock()
    >>> table = Timetable(clock)
    >>> table.put(2.0, "late"), table.put(1.0, "early"), table.next_at
    (None, None, 1.0)
    >>> with table.taken() as what:
    ...     print(what, clock.now())
    early 1.0
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._entries: list[Entry[T]] = []
        self._numbers = itertools.count()

    def put(self, after_s: float, what: T) -> None:
        """It is due so many seconds from now."""
        heapq.heappush(self._entries, Entry(self._clock.now() + after_s, next(self._numbers), what))

    @property
    def next_at(self) -> float:
        """When the soonest is due; infinity where nothing is."""
        return self._entries[0].at if self._entries else math.inf

    @contextlib.contextmanager
    def taken(self) -> Iterator[T]:
        """Take the soonest: the clock goes on to its time, unless that has passed. IndexError where nothing is due."""
        entry = heapq.heappop(self._entries)
        self._clock.advance(max(0.0, entry.at - self._clock.now()))
        try:
            yield entry.what
        except BaseException:
            heapq.heappush(self._entries, entry)
            raise
