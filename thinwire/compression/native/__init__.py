"""The native kernels in C++: the library, the path that is chosen at run time, and kernels on several threads.

`kernel(name)` returns a kernel of the active path, or None if numpy is the path. The path is the best one that this
processor runs, or the one that the environment forces. ctypes releases the GIL around every call. Each kernel is called
beside its numpy oracle, which defines its bits: in a codec's file, or in `vector_ops`.

A vector is split among threads at whole blocks. The environment variable THINWIRE_THREADS sets the number of threads;
without it, the plan of the run does.

Invariant: every path and every number of threads give the same bytes and floats. Without the library numpy does the
work: slower, with equal results.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import UsageError

if TYPE_CHECKING:
    from thinwire.core.types import Vector

# Pointers are c_void_p: callers pass addresses of arrays as integers, after they checked dtype, order and size.
P, I64, I32, U32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
F32, F64 = ctypes.c_float, ctypes.c_double
ABI = 7  # the version of these signatures: change it here and in csrc/paths.cpp whenever one of them changes
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "finite": (I32, [P, I64]),
    "add_finite": (I32, [P, P, I64, F32]),
    "reaching": (I64, [P, I64, U32, I64, I64, P, P]),
    "delta_write": (I64, [P, I64, P]),
    "delta_read": (I32, [P, I64, I64, I64, P]),
    "rice_write_places": (I32, [P, I64, I64, P, P, P, P]),
    "rice_write_symbols": (I32, [P, I64, I32, I64, P, P, P, P]),
    "rice_read_places": (I32, [P, I64, I64, I64, P]),
    "rice_read_symbols": (I32, [P, I64, I64, I32, P]),
    "rans_counts": (None, [P, I64, P]),
    "rans_write": (I64, [P, I64, I64, I32, P, P, P, P, I64]),
    "rans_read": (I64, [P, I64, I64, I64, I32, P, P, P, P, I64, P]),
    "rans_gaps_at": (I64, [P, I64, P, P]),
    "rans_gaps_of": (I64, [P, I64, I32, I64, P, P, P, P]),
    "rans_places": (I32, [P, I64, P, I64, I64, P, P]),
    "rans_fill": (I32, [P, I64, P, I64, I64, P, P, P]),
    "levels_compensate": (I32, [P, P, F32, I64, I32, F32, I32, U32, U32, I32, P, P]),
    "sign_compensate": (I32, [P, P, F32, I64, P, P]),
    "fp16_compensate": (I32, [P, P, F32, I64, P, P]),
    "bf16_compensate": (I32, [P, P, F32, I64, P]),
    "ternary_compensate": (I32, [P, P, F32, P, I64, F32, I32, P, P]),
    "add_squares": (I32, [P, P, F32, I64, P]),
    "steps_compensate": (I32, [P, P, F32, I64, F32, I32, P]),
    "lowrank_add": (None, [P, P, I64, I32, I64, I64, F32, I32, P]),
    "sparse_add": (None, [P, P, I64, F32, I64, I32, P]),
    "pack": (None, [P, I64, I32, P]),
    "unpack": (None, [P, I64, I32, P]),
    "least": (I32, [P, I64, I32]),
    "lanes_add": (None, [P, P, I64, I32, I32]),
    "lanes_pack": (None, [P, I64, I32, I32, P]),
    "lanes_add_packed": (None, [P, I64, I32, I64, I64, I32, P]),
    "fp16_encode": (I32, [P, I64, P, P]),
    "halves_finite": (I32, [P, I64, I32]),
    "fp16_add": (None, [P, P, I64, I64, F32, I32, P]),
    "bf16_encode": (I32, [P, I64, P]),
    "bf16_add": (None, [P, I64, I64, F32, I32, P]),
    "natural_encode": (I32, [P, I64, U32, U32, P, P]),
    "natural_add": (None, [P, P, I64, I64, F32, I32, P]),
    "bucket_sums": (None, [P, I64, I32, P]),
    "maxima": (None, [P, I64, P]),
    "sign_encode": (I32, [P, I64, P, P]),
    "sign_add": (None, [P, I32, P, I64, I64, F32, I32, P]),
    "levels_round": (None, [P, I64, P, I32, I32, U32, U32, I32, P]),
    "levels_encode": (I32, [P, I64, I32, F32, I32, U32, U32, I32, P, P]),
    "levels_add": (None, [P, I32, P, P, I64, I64, F32, I32, P]),
    "ternary_encode": (I32, [P, P, I64, F64, F32, I32, U32, I32, P, P]),
    "steps_encode": (None, [P, I64, F32, I32, P]),
    "eden_encode": (I32, [P, I64, U32, U32, I32, I32, P, F64, F32, P, P, P]),
    "eden_compensate": (I32, [P, P, F32, I64, U32, U32, I32, I32, P, F64, F32, P, P, P]),
    "eden_add": (None, [P, I32, P, I64, I64, I64, U32, I32, P, F32, I32, P, P]),
    "eden_sparse_encode": (I64, [P, I64, U32, U32, F32, F64, F32, P, I64, P, P, P]),
    "eden_sparse_add": (None, [P, P, I64, P, I64, I64, I64, U32, F32, I32, P, P]),
    "eden_room": (I64, []),
    "lattice_squares": (None, [P, P, I64, I64, P]),
    "lattice_round": (U32, [P, P, I64, I64, I64, I64, F32, F32, I32, U32, I32, P, P, I32, P]),
    "lattice_add": (U32, [P, I32, I32, P, I64, I64, I64, I64, I32, U32, F32, I32, P, P]),
    "sampler_draw": (I64, [P, I64, P, P, I32, P]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None if it was not built, has another ABI number, or does not open on this system.

    A library with another number gives a RuntimeWarning: numpy then does all the work, and it is slower.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"kernels{suffix}")
        if path.exists():
            try:
                found = ctypes.CDLL(str(path))
            except OSError:  # built for another processor or another C library
                return None
            number = abi_of(found)
            if number == ABI:
                return found
            warnings.warn(
                f"the native kernels in {path.name} have ABI {number}, this version of Thinwire needs {ABI}: codecs "
                "run in numpy, with the same bytes and slower; pip install -e . (or make setup) builds them again",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
    return None


def abi_of(found: ctypes.CDLL) -> int:
    """Return the ABI number of a library, or 0 if it has none."""
    try:
        return int(found.tw_abi())
    except AttributeError:
        return 0


def runs(path: str) -> bool:
    """Return True if the library has this path and this processor can run it."""
    found = library()
    return found is not None and bool(found.tw_runs(path.encode()))


@functools.cache
def symbol(name: str, path: str) -> Callable[..., Any]:
    """Return the kernel of this path, with the types of its arguments."""
    function: Any = getattr(library(), f"tw_{name}_{path}")
    function.restype, function.argtypes = SIGNATURES[name]
    made: Callable[..., Any] = function
    return made


VARIABLE = "THINWIRE_KERNELS"
NUMPY = "numpy"
PATHS = ("avx512", "avx2", "neon", "scalar")  # best first

_forced: str | None = None  # set by `using`


@functools.cache
def available() -> tuple[str, ...]:
    """Return all paths of this machine, best first; numpy is always available and comes last."""
    return (*(path for path in PATHS if runs(path)), NUMPY)


def chosen() -> str:
    """Return the active path; raise UsageError if the environment forces one that this machine does not have."""
    return _forced or _of_environment(os.environ.get(VARIABLE, ""))


@functools.cache
def _of_environment(wanted: str) -> str:
    if not wanted:
        return available()[0]
    if wanted not in available():
        raise UsageError(
            f"{VARIABLE}={wanted} is not valid",
            why=f"this machine has {', '.join(available())}",
            hint=f"unset {VARIABLE}: the best one is taken, and all give the same bytes",
        )
    return wanted


def kernel(name: str) -> Callable[..., Any] | None:
    """Return this kernel of the active path, or None if numpy does its work."""
    path = chosen()
    return None if path == NUMPY else symbol(name, path)


def require_kernel(name: str) -> Callable[..., Any]:
    """Return this kernel; the active path must not be numpy."""
    run = kernel(name)
    assert run is not None
    return run


@contextlib.contextmanager
def using(path: str) -> Iterator[None]:
    """Use this path in the whole process while the context lasts; for tests and benchmarks."""
    global _forced  # noqa: PLW0603  # it replaces the environment variable, which is global to the process too
    if path not in available():
        raise UsageError(f"this machine has no {path} path", why=f"it has {', '.join(available())}")
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


T = TypeVar("T")

THREADS_VARIABLE = "THINWIRE_THREADS"
GRAIN = 1 << 16  # elements: parts begin at multiples of it, which are whole buckets
LEAST = 1 << 18  # elements: less work is not worth another thread
MAX_THREADS = 1024

# For the calling thread: set by `using_threads`; negative, by `planned_threads`.
_said: ContextVar[int] = ContextVar("threads", default=0)


def threads() -> int:
    """Return the number of threads that one call may use; 1 by default."""
    said = _said.get()
    return said if said > 0 else of_environment() or -said or 1


def of_environment() -> int:
    """Return the number of threads that the environment sets (its 0 means all cores), or 0 if it sets none."""
    said = os.environ.get(THREADS_VARIABLE, "")
    return _read(said) if said else 0


@functools.cache
def _read(said: str) -> int:
    if not (said.isascii() and said.isdigit() and int(said) <= MAX_THREADS):
        raise UsageError(
            f"{THREADS_VARIABLE}={said} is not valid", why=f"it is a number up to {MAX_THREADS}, 0 for all cores"
        )
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
    if stop - start < 2 * LEAST:  # one part: a small vector takes less time than its division
        return [work(start, stop)]
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


class ThreadCount(contextlib.AbstractContextManager[None]):
    """A context in which the calls of this thread use `count` threads; a class, as each update enters three of them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = _said.set(self._count)

    def __exit__(self, *raised: object) -> None:
        _said.reset(self._before)


def using_threads(count: int) -> ThreadCount:
    """Return a context that uses `count` threads for the calls of this thread.

    It overrides the environment and the plan.
    """
    return ThreadCount(count)


def planned_threads(count: int) -> ThreadCount:
    """Return a context that uses the plan's threads, at most `MAX_THREADS`, unless the environment sets a number."""
    return ThreadCount(-min(count, MAX_THREADS))  # small vectors are not divided, so nobody asks for the environment


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads of its parent


def require_vector(x: Vector, size: int) -> None:
    """Raise ValueError unless `x` is a contiguous, aligned float32 vector of this size.

    This is not a `ThinwireError`. Those refuse input of people and other machines, which never chooses an array's type
    or strides. The caller's own code does, so a wrong array is a bug in the caller; nothing is changed.
    """
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 vector, got {x.dtype} of shape {x.shape}")
    if not x.flags.aligned:
        raise ValueError("expected a float32 vector at a multiple of 4 bytes")
    if x.size != size:
        raise ValueError(f"expected {size} values, got {x.size}")


def require_writable(x: Vector, size: int) -> None:
    """Raise ValueError as `require_vector` does, or if `x` is read-only.

    A kernel gets only the address and cannot check it.
    """
    require_vector(x, size)
    if not x.flags.writeable:
        raise ValueError("expected a float32 vector that may be written, got one that is read-only")


def address(indices: NDArray[np.int64]) -> int:
    """Return the address of indices for a kernel; raise ValueError unless they are contiguous int64."""
    if indices.dtype != np.int64 or not indices.flags.c_contiguous:
        raise ValueError(f"indices are contiguous int64, not {indices.dtype}")
    return int(indices.ctypes.data)


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


class PackedSymbols(Protocol):
    """Symbols of fewer than 8 bits that stay packed until they are used (`Packed` in codecs/pack_zstd.py)."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """Return the packed bytes."""

    @property
    def bits(self) -> int:
        """Return the bits of one symbol."""


def stored(symbols: NDArray[Any] | PackedSymbols) -> tuple[int, int]:
    """Return the address at which a kernel finds symbols, in an array or packed, and the bits that each has there."""
    if isinstance(symbols, np.ndarray):
        return symbols.ctypes.data, 8 * symbols.itemsize
    return symbols.data.ctypes.data, symbols.bits
