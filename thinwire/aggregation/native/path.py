"""Which path the kernels take: the best that this processor runs, or the one that the environment forces."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from thinwire.aggregation.native.library import runs, symbol
from thinwire.core.errors import UsageError

VARIABLE = "THINWIRE_KERNELS"
NUMPY = "numpy"
PATHS = ("avx512", "avx2", "neon", "scalar")  # the best first

_forced: str | None = None  # by `using`


@functools.cache
def available() -> tuple[str, ...]:
    """All that this machine has, the best first; numpy is always there, and comes last."""
    return (*(path for path in PATHS if runs(path)), NUMPY)


def chosen() -> str:
    """The path in use; UsageError when the environment forces one that is not here."""
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
    """This kernel on the path in use; None: numpy does it."""
    path = chosen()
    return None if path == NUMPY else _kernel(name, path)


@functools.cache
def _kernel(name: str, path: str) -> Callable[..., Any]:
    function: Callable[..., Any] = symbol(name, path)
    return function


@contextlib.contextmanager
def using(path: str) -> Iterator[None]:
    """This path, for the whole process, while the context lasts: for tests and benchmarks."""
    global _forced  # noqa: PLW0603  # it stands for the environment, which is the process's too
    if path not in available():
        raise UsageError(f"this machine has no {path} path", why=f"it has {', '.join(available())}")
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before
