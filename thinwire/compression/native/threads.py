"""Kernels on several threads: a vector is split at whole blocks, so that no bit depends on the number of threads.

The environment variable THINWIRE_THREADS sets the number of threads; without it, the plan of the run does.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import not_finite
from thinwire.compression.native.library import kernel
from thinwire.core.errors import UsageError
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.compression.memory import Memory


T = TypeVar("T")

VARIABLE = "THINWIRE_THREADS"
GRAIN = 1 << 16  # elements: parts begin at multiples of it, which are whole buckets
LEAST = 1 << 18  # elements: less work is not worth another thread
MOST = 1024

_said: ContextVar[int] = ContextVar("threads", default=0)  # set by `using_threads` for the calling thread


def threads() -> int:
    """Return the number of threads that one call may use; 1 by default."""
    return _said.get() or of_environment() or 1


def of_environment() -> int:
    """Return the number of threads that the environment sets (its 0 means all cores), or 0 if it sets none."""
    said = os.environ.get(VARIABLE, "")
    return _read(said) if said else 0


@functools.cache
def _read(said: str) -> int:
    if not (said.isascii() and said.isdigit() and int(said) <= MOST):
        raise UsageError(f"{VARIABLE}={said} cannot be", why=f"it is a number up to {MOST}, 0 for all cores")
    return int(said) or cores()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parts(start: int, stop: int) -> list[tuple[int, int]]:
    """Return (start, stop) of about equal parts of start .. stop, one a thread."""
    count = max(1, min(threads(), (stop - start) // LEAST))
    each = -(-(stop - start) // count)
    cuts = [start, *((start + i * each) // GRAIN * GRAIN for i in range(1, count)), stop]
    return list(itertools.pairwise(cuts))


def parts_between(edges: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) as positions in `edges` of about equal parts, one a thread.

    The packed symbols of each part begin at a byte.
    """
    size = edges[-1] - edges[0]
    count = max(1, min(threads(), size // LEAST))
    whole = [place for place, edge in enumerate(edges) if edge % 8 == 0 and 0 < place < len(edges) - 1]
    places = [bisect.bisect_left(whole, edges[0] + i * size // count, key=edges.__getitem__) for i in range(1, count)]
    cuts = sorted({0, *(whole[place] for place in places if place < len(whole)), len(edges) - 1})
    return list(itertools.pairwise(cuts))


def each(start: int, stop: int, work: Callable[[int, int], T]) -> list[T]:
    """Return the results of work(start, stop) for every part, in order."""
    return each_of(parts(start, stop), work)


def each_of(pieces: Sequence[tuple[int, int]], work: Callable[[int, int], T]) -> list[T]:
    """Return the results of work(start, stop) for the given parts, in order."""
    if len(pieces) == 1:
        return [work(*pieces[0])]
    return list(_pool(len(pieces)).map(lambda piece: work(*piece), pieces))


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    # Worker threads run nested calls serially: waiting for a task of the same pool could deadlock.
    return ThreadPoolExecutor(count, "thinwire-kernel", initializer=lambda: _said.set(1))


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Use `count` threads for the calls of this thread while the context lasts.

    It overrides the environment and the plan.
    """
    before = _said.set(count)
    try:
        yield
    finally:
        _said.reset(before)


@contextlib.contextmanager
def planned_threads(count: int) -> Iterator[None]:
    """Use the plan's number of threads, at most `MOST`, unless the environment sets another."""
    with using_threads(of_environment() or min(count, MOST)):
        yield


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads of its parent


Own = Callable[[int], tuple[Any, ...]]  # a kernel's own arguments for the part that begins at this value


def write_in_parts(name: str, values: Vector, own: Own) -> None:
    """Run encode kernel `name` on each thread's part; raise NonFiniteUpdate for NaN and infinity."""
    run = kernel(name)
    assert run is not None
    x = values.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, b - a, *own(a)))):
        raise not_finite()


def write_held_in_parts(name: str, values: Vector, held: Memory, own: Own) -> None:
    """Run encode kernel `name` with error feedback on each thread's part; `values` becomes the updated memory."""
    run = kernel(name)
    assert run is not None
    x, r = values.ctypes.data, held.vector.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, r + 4 * a, held.sign, b - a, *own(a)))):
        raise not_finite()


def add_in_parts(
    name: str, own: Sequence[NDArray[Any] | int], span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    """Run decode kernel `name` on each thread's part: write the values in `span` times `factor` to into[0 ..].

    The values are added if `adds`, else they replace those of `into`. Return False if numpy is the path: nothing was
    done.
    """
    run = kernel(name)
    if run is None:
        return False
    at = [array.ctypes.data if isinstance(array, np.ndarray) else array for array in own]
    to = into.ctypes.data
    each(span.start, span.stop, lambda a, b: run(*at, a, b, factor, adds, to + 4 * (a - span.start)))
    return True
