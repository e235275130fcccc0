"""The shared library of kernels, opened once by ctypes, which releases the GIL around every call.

`chosen` is the active path: the best one that this processor runs, or the one that the environment forces.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from thinwire.core.errors import UsageError

# Pointers are c_void_p: callers pass addresses of arrays as integers, after they checked dtype, order and size.
P, I64, I32, U32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32
F32, F64 = ctypes.c_float, ctypes.c_double
ABI = 1  # the version of these signatures: change it here and in csrc/paths.cpp whenever one of them changes
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
    "levels_held": (I32, [P, P, F32, I64, I32, F32, I32, U32, U32, I32, P, P]),
    "sign_held": (I32, [P, P, F32, I64, P, P]),
    "fp16_held": (I32, [P, P, F32, I64, P, P]),
    "bf16_held": (I32, [P, P, F32, I64, P]),
    "ternary_held": (I32, [P, P, F32, P, I64, F32, I32, P, P]),
    "add_squares": (I32, [P, P, F32, I64, P]),
    "steps_held": (I32, [P, P, F32, I64, F32, I32, P]),
    "lowrank_add": (None, [P, P, I64, I32, I64, I64, F32, I32, P]),
    "sparse_add": (None, [P, P, I64, F32, I64, I32, P]),
    "pack": (None, [P, I64, I32, P]),
    "unpack": (None, [P, I64, I32, P]),
    "least": (I32, [P, I64, I32]),
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
    "eden_held": (I32, [P, P, F32, I64, U32, U32, I32, I32, P, F64, F32, P, P, P]),
    "eden_add": (None, [P, I32, P, I64, I64, I64, U32, I32, P, F32, I32, P, P]),
    "eden_room": (I64, []),
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


def symbol(name: str, path: str) -> ctypes._CFuncPtr:  # type: ignore[name-defined]  # typeshed keeps it private
    """Return the kernel of this path, with the types of its arguments."""
    function = getattr(library(), f"tw_{name}_{path}")
    function.restype, function.argtypes = SIGNATURES[name]
    return function


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
            f"{VARIABLE}={wanted} cannot be",
            why=f"this machine has {', '.join(available())}",
            hint=f"unset {VARIABLE}: the best one is taken, and all give the same bytes",
        )
    return wanted


def kernel(name: str) -> Callable[..., Any] | None:
    """Return this kernel of the active path, or None if numpy does its work."""
    path = chosen()
    return None if path == NUMPY else _kernel(name, path)


@functools.cache
def _kernel(name: str, path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = symbol(name, path)
    return function


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
