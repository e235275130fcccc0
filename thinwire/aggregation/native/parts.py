"""A kernel called on each part of a vector, one a thread: what it takes besides the vector is each kernel's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import not_finite
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.aggregation.held import Held

Own = Callable[[int], tuple[Any, ...]]  # for the part that begins at this value


def write(name: str, values: Vector, own: Own) -> None:
    """Encode values; NonFiniteUpdate for NaN and infinity."""
    run = kernel(name)
    assert run is not None
    x = values.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, b - a, *own(a)))):
        raise not_finite()


def write_held(name: str, values: Vector, held: Held, own: Own) -> None:
    """The same with what is held, and values become what is to be held."""
    run = kernel(name)
    assert run is not None
    x, r = values.ctypes.data, held.vector.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, r + 4 * a, held.sign, b - a, *own(a)))):
        raise not_finite()


def add(
    name: str, own: Sequence[NDArray[Any] | int], span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    """into[0 ..] gets the values in `span` times a factor, added or in place of what stands there.

    False: numpy is the path, and nothing was done.
    """
    run = kernel(name)
    if run is None:
        return False
    at = [array.ctypes.data if isinstance(array, np.ndarray) else array for array in own]
    to = into.ctypes.data
    each(span.start, span.stop, lambda a, b: run(*at, a, b, factor, adds, to + 4 * (a - span.start)))
    return True
