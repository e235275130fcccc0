"""Importing what stays until a process ends, such as torch, without the garbage collector's looks through it."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def imported_for_good() -> Iterator[None]:
    """What is made inside is no garbage: it is not looked through meanwhile, nor at any later collection.

    torch and what comes with it are there a tenth sooner, Flower's SuperLink an eighth.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
