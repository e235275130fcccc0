"""Large pages for memory that is about to be filled: a fault each 2 MiB, not each 4 KiB, as numpy has it on Linux."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

PAGE = 4096
LEAST = 1 << 22  # bytes from which it pays
MADV_HUGEPAGE = 14


def prefer_large(address: int, size: int) -> None:
    """A wish: nothing depends on it."""
    advise = _madvise()
    if advise is not None and size >= LEAST:
        start = -(-address // PAGE) * PAGE
        advise(start, (address + size - start) // PAGE * PAGE, MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
