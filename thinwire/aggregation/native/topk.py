"""The kernel that finds what reaches a threshold; None where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector

SPARE = 4096  # places beyond what was expected
AHEAD = 16  # that are written before it is known how many of them count

Found = tuple[NDArray[np.int32], NDArray[np.uint32]]


def reaching(values: Vector, least: np.uint32, share: float) -> Found | None:
    """Places and bits of all values whose magnitude is at least `least`, where about this share is expected."""
    run = kernel("reaching")
    if run is None:
        return None
    x = values.ctypes.data

    def part(a: int, b: int) -> Found:
        room = min(b - a, int(1.2 * share * (b - a)) + SPARE) + AHEAD
        while True:
            places, bits = np.empty(room, np.int32), np.empty(room, np.uint32)
            found = run(x + 4 * a, b - a, least, a, room, places.ctypes.data, bits.ctypes.data)
            if found + AHEAD <= room:
                return places[:found], bits[:found]
            room = found + AHEAD

    parts = each(0, values.size, part)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([places for places, _ in parts]), np.concatenate([bits for _, bits in parts])
