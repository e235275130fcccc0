"""So many threads for everything that a benchmark calls: our kernels, and BLAS behind numpy, which takes all cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from threadpoolctl import threadpool_limits

from thinwire.compression.native import using_threads


@contextlib.contextmanager
def limited(threads: int) -> Iterator[None]:
    with using_threads(threads), threadpool_limits(threads):
        yield
