"""One vector on several threads: parts that begin at whole blocks, so that no bit depends on how many there are."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from thinwire.core.errors import UsageError

T = TypeVar("T")

VARIABLE = "THINWIRE_THREADS"
GRAIN = 1 << 16  # elements: parts begin at multiples, which are whole buckets
LEAST = 1 << 18  # elements a thread is worth waking for

_forced: int | None = None  # by `using_threads`


def threads() -> int:
    """How many one call may use: 1, unless the environment says more (0: as many as cores)."""
    return _forced or _of_environment(os.environ.get(VARIABLE, "1"))


@functools.cache
def _of_environment(said: str) -> int:
    if not (said.isascii() and said.isdigit() and int(said) <= 1024):
        raise UsageError(f"{VARIABLE}={said} cannot be", why="it is a number of threads, 0 for all cores")
    return int(said) or os.cpu_count() or 1


def parts(start: int, stop: int) -> list[tuple[int, int]]:
    """(from, to) of about equal parts of start .. stop, one a thread."""
    count = max(1, min(threads(), (stop - start) // LEAST))
    each = -(-(stop - start) // count)
    cuts = [start, *((start + i * each) // GRAIN * GRAIN for i in range(1, count)), stop]
    return list(itertools.pairwise(cuts))


def each(start: int, stop: int, work: Callable[[int, int], T]) -> list[T]:
    """What work(from, to) gave of every part, in order."""
    pieces = parts(start, stop)
    if len(pieces) == 1:
        return [work(start, stop)]
    return list(_pool(len(pieces)).map(lambda piece: work(*piece), pieces))


@functools.cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "thinwire-kernel")


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """So many, for the whole process, while the context lasts: for tests and benchmarks."""
    global _forced  # noqa: PLW0603  # it stands for the environment, which is the process's too
    before, _forced = _forced, count
    try:
        yield
    finally:
        _forced = before


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
