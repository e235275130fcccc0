"""The kernel that finds what reaches a threshold; None where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector

SPARE = 4096  # places beyond what was expected


def reaching(values: Vector, least: np.uint32, share: float) -> tuple[NDArray[np.int64], NDArray[np.uint32]] | None:
    """Places and magnitudes' bits of all values of at least `least`, where about this share of them is expected."""
    run = kernel("reaching")
    if run is None:
        return None
    x = values.ctypes.data

    def part(a: int, b: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        room = min(b - a, int(1.2 * share * (b - a)) + SPARE)
        while True:
            places, bits = np.empty(room, np.int64), np.empty(room, np.uint32)
            found = run(x + 4 * a, b - a, least, a, room, places.ctypes.data, bits.ctypes.data)
            if found <= room:
                return places[:found], bits[:found]
            room = found

    parts = each(0, values.size, part)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([places for places, _ in parts]), np.concatenate([bits for _, bits in parts])
