"""A `SecretRng` from a seed, for tests only: what it gives is no secret."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ScriptedRng:
    """Repeats itself: the same seed and the same calls give the same bits. Nothing in `thinwire` may import it."""

    def __init__(self, seed: int) -> None:
        self._drawn = np.random.default_rng(seed)

    def random_bytes(self, count: int) -> bytes:
        return self._drawn.bytes(count)

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(self._drawn.bytes(out.nbytes), np.uint8)
