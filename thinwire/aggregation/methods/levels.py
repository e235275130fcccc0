"""Levels at equal distances: values as whole multiples of their bucket's scale, rounded at random or to nearest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import maxima, scaled
from thinwire.aggregation.codec import Scales, Symbols
from thinwire.aggregation.hashing import uniform
from thinwire.aggregation.native import levels as native
from thinwire.aggregation.vectors import blocks
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

LEAST = np.float32(2.0**-110)  # scales below this would make 1/scale overflow: such buckets are sent as zeros


def most(levels: int) -> np.float32:
    """The largest scale of which so many levels are finite."""
    return np.float32(np.nextafter(np.float32(np.finfo(np.float32).max / np.float32(levels)), np.float32(0)))


def usable(scales: NDArray[np.floating], levels: int) -> Vector:
    """Scales as they are sent: none so large that a level is infinite, none so small that its inverse is."""
    with np.errstate(over="ignore"):
        sent: Vector = np.minimum(scales.astype(np.float32), most(levels))
    sent[sent < LEAST] = 0
    return sent


def encoded(values: Vector, levels: int, word: int | None) -> tuple[NDArray[np.int8], Vector]:
    """Symbols of so many levels a side, and their scales: the bucket's largest magnitude over `levels`."""
    done = native.encode(values, levels, most(levels), word)
    if done is not None:
        return done
    scales = usable(maxima(values) / np.float32(levels), levels)
    return rounded(values, scales, levels, word), scales


def rounded(values: Vector, scales: Vector, levels: int, word: int | None, first: int = 0) -> NDArray[np.int8]:
    """floor(x * (1 / scale) + u) with u of a hash of index and word; without a word to nearest, ties to even.

    `first`: the index of the first value, where the vector is a part of another one.
    """
    done = native.rounded(values, scales, levels, word, first)
    if done is not None:
        return done
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    symbols = np.empty(values.size, np.int8)
    for start, stop in blocks(values.size):
        place = scaled(values[start:stop], inverse, start)
        if word is None:
            np.rint(place, out=place)
        else:
            place += uniform(first + start, first + stop, word)
            np.floor(place, out=place)
        symbols[start:stop] = np.clip(place, -levels, levels, out=place)
    return symbols


def check(name: str, symbols: Symbols, scales: Scales, levels: int) -> None:
    """BadPayload for what no encoder of so many levels makes."""
    if scales.size and not np.all((scales == 0) | ((scales >= LEAST) & (scales <= most(levels)))):
        raise BadPayload(f"a scale that {name} never makes", why="it is negative, not finite or out of range")
    if symbols.size and symbols.min() < -levels:
        raise BadPayload(f"a symbol outside -{levels}..{levels}")
