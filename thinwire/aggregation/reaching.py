"""Which values are large enough: the pass over all of them that topk and threshold share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native import topk as native
from thinwire.core.types import Vector

MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits but the sign's


def reaching(values: Vector, least: np.uint32, share: float) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Places and bits of all values whose magnitude is at least that of the bits `least`; about this share is expected.

    As integers, magnitudes of floats sort like the floats, and equal ones are equal bits.

    >>> places, bits = reaching(np.float32([1, -3, 2]), np.float32(2).view(np.uint32), 1.0)
    >>> places.tolist(), bits.view(np.float32).tolist()
    ([1, 2], [-3.0, 2.0])
    """
    found = native.reaching(values, least, share)
    if found is not None:
        return found
    bits = values.view(np.uint32)
    places = np.flatnonzero(bits & MAGNITUDE >= least)
    return places, bits[places]
