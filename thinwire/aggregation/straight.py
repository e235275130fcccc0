"""A frame that a kernel writes straight from a vector: no stream is made first, and no value is read twice.

With what is held (see `Held`) a part of the vector is prepared, written, decoded and settled while it is in cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation import frame
from thinwire.aggregation.by_kernel import Feeds, Writes
from thinwire.aggregation.codec import Quantizer, Scales
from thinwire.aggregation.coded import WORD, Coded
from thinwire.aggregation.coders.pack import packed_bytes
from thinwire.aggregation.frame import Stream
from thinwire.aggregation.held import Held
from thinwire.aggregation.native.threads import each
from thinwire.aggregation.read import Read
from thinwire.core.types import Vector

CACHED = 1 << 18  # elements: of three passes over so many the last two find them in the second or third level


def writes(quantizer: Quantizer) -> bool:
    """Whether a kernel writes what this quantizer makes, and refuses NaN and infinity."""
    return isinstance(quantizer, Writes) and quantizer.writes


def apart(quantizer: Quantizer) -> bool:
    """Whether it writes parts of a vector by themselves, as it must where something is held."""
    return writes(quantizer) and (_feeds(quantizer) or (isinstance(quantizer, Writes) and quantizer.apart))


def _feeds(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, Feeds) and quantizer.feeds


def written(quantizer: Quantizer, x: Vector, word: int, bound: bytes, held: Held | None = None) -> bytes:
    """The whole frame of one vector; with `held` x becomes what is to be held."""
    assert isinstance(quantizer, Writes)
    scales: Scales = np.empty(quantizer.scales_count(x.size), quantizer.scales_dtype)
    symbols_bytes = packed_bytes(x.size, quantizer.bits)
    lengths = [WORD.size] * quantizer.seeded + [symbols_bytes] + [scales.nbytes] * (scales.size > 0)
    payload, places = frame.blank(bound, lengths)
    if quantizer.seeded:
        places.pop(0)[:] = np.frombuffer(WORD.pack(word), np.uint8)
    if held is None:
        quantizer.write(x, word, places[0], scales)
    elif isinstance(quantizer, Feeds) and quantizer.feeds:
        quantizer.write_held(x, held, word, places[0], scales)
    else:
        _write_parts(quantizer, x, held, word, places[0], scales)
    if scales.size:
        places[1][:] = scales.view(np.uint8)
    return payload


def _write_parts(
    quantizer: Quantizer, x: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales
) -> None:
    assert isinstance(quantizer, Writes)

    def part(start: int, stop: int) -> None:
        for a, b in cached(start, stop):
            here = slice(a, b)
            held.before(x, here)
            packed = symbols[packed_bytes(a, quantizer.bits) : packed_bytes(b, quantizer.bits)]
            own = scales[quantizer.scales_count(a) : quantizer.scales_count(b)]
            quantizer.write(x[here], word, packed, own, a)
            held.after(x, here)
            found = Coded().read_symbols(Stream(packed.data), b - a, quantizer)
            # Signs are drawn by index ^ word. No index within the part has a bit of a's, so a + i is a ^ i: counted
            # from a they are drawn by word ^ a.
            Read(quantizer, None, found, own, word ^ a).add(held.weight, x[here], 0, b - a)
            held.settled(x, here)

    each(0, x.size, part)


def cached(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(from, to) of what is worked on while it is in cache: none longer than its start's lowest bit says.

    >>> list(cached(3 << 16, 1 << 19)) == [(3 << 16, 1 << 18), (1 << 18, 1 << 19)]
    True
    """
    while start < stop:
        end = min(start + min(start & -start or CACHED, CACHED), stop)
        yield start, end
        start = end
