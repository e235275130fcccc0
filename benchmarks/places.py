"""Compare what the places of the largest values cost, in bits a parameter, with the entropy of so many places."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import lgamma, log

from thinwire.compression.codecs.delta_rice import Delta, Rice
from thinwire.compression.codecs.topk_randk_threshold import TopK
from thinwire.core.types import Vector

RATIO = "0.01"
CODERS = {"rice": Rice().pack_indices, "delta": Delta().pack}


def place_bits(xs: Sequence[Vector], ratio: str = RATIO) -> dict[str, float]:
    """By each coder, and at least, of a model's segments.

    >>> import numpy as np
    >>> found = place_bits([np.float32([3, 1, 2, 9] * 100)], "0.25")
    >>> [round(value, 2) for value in found.values()]
    [0.78, 2.0, 0.8]
    """
    step = TopK(Decimal(ratio))
    places = [step.select(x, 0)[0] for x in xs]
    params = sum(x.size for x in xs)
    coded = {name: sum(len(pack(one)) for one in places) for name, pack in CODERS.items()}
    least = sum(choices_bits(x.size, one.size) for x, one in zip(xs, places, strict=True))
    told = {f"place_bits topk({ratio}) > {name}": 8 * size / params for name, size in coded.items()}
    return told | {f"place_entropy topk({ratio})": least / params}


def choices_bits(size: int, many: int) -> float:
    """log2 of how many sets of so many places there are."""
    return (lgamma(size + 1) - lgamma(many + 1) - lgamma(size - many + 1)) / log(2)
