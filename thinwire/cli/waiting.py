"""Waiting for something that another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.05


def until(true: Callable[[], bool], within_s: float) -> bool:
    """Look until it is so; False when it was not within `within_s` seconds."""
    end = time.monotonic() + within_s
    while not (found := true()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return found
