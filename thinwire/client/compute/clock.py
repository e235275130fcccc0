"""Time as training sees it: passed in, so that a script's can stand in for this machine's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(NamedTuple):
    """`now` in seconds from any origin, never backwards; `sleep` lets so many of them pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()
