"""A client that is killed at each write of an assignment: what its disk holds then is one of two commits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.small_task import Aggregator
from thinwire.core.statedir import write_atomically


class Killed(BaseException):
    """What ends the process at a write."""


def killed_at_each_write(
    folder: Path,
    device: Callable[[Path], Aggregator],
    trained: Callable[..., list[Any]],
    kept: Callable[[Any], Any],
    writes: int,
) -> int:
    """Kill a client in its second assignment, at each of so many writes, and train again; return how often it died.

    `trained` returns what the device keeps after each of some rounds, `kept` what it keeps in a handler.
    """
    before, after = trained(device(folder / "whole"), 1, 2)
    assert before[1] != after[1]
    died = 0
    for last in range(writes):
        aggregator = device(folder / str(last))
        trained(aggregator, 1)
        left = [last]

        def write(path: Path, data: bytes, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            write_atomically(path, data)

        try:
            aggregator.answer(aggregator.handler(write=write), aggregator.assign(2))
        except Killed:
            died += 1
        assert kept(aggregator.handler()) in (before, after)
        assert trained(aggregator, 2) == [after]
    return died
