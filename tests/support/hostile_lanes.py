"""Packed vectors of secure aggregation as a hostile client may send them, with spans everywhere, for `make fuzz`."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import native
from thinwire.privacy.masks import add_mask, add_packed, check_packed, lane_dtype, pack, packed_size

LANES = "packed lanes"  # beside the specs of codecs
COUNTS = (1, 7, 8, 9, 300, 4095, 4096, 4097, 9000)
KEY = bytes(32)


def fuzz_lanes(cases: int, seed: int) -> int:
    """How many of so many packed vectors were refused; AssertionError where two paths differ.

    Each array is one allocation of exactly its size, so that the sanitizers see an access behind it.
    """
    rng, refused = random.Random(seed), 0
    *kernels, oracle = native.available()
    for number in range(cases):
        width, count = rng.randint(1, 32), rng.choice(COUNTS)
        sent = bytearray(rng.randbytes(max(0, packed_size(count, width) + rng.choice((0, 0, 0, 0, 0, -1, 1, -7, 16)))))
        if sent and rng.random() < 0.8:
            sent[-1] &= (1 << (count * width - 1) % 8 + 1) - 1  # the bits behind the last lane
        start = rng.randrange(count + 1)
        stop = rng.randrange(start, count + 1 + rng.choice((0, 0, 0, 9)))
        results = [
            _result(path, np.frombuffer(sent, np.uint8).copy(), width, count, start, stop)
            for path in (*kernels[number % max(1, len(kernels)) :][:1], oracle)
        ]
        assert results[0] == results[-1], (number, seed, width, count, start, stop, sent[:64].hex())
        refused += results[0] is None
    return refused


def _result(path: str, sent: NDArray[np.uint8], width: int, count: int, start: int, stop: int) -> bytes | None:
    into = np.full(stop - start, 3, lane_dtype(width))
    with native.using(path):
        try:
            check_packed(sent, count, width)
            add_packed(sent, width, into, start)
        except ValueError:
            return None
        add_mask(into, KEY, -1, start)
        again = np.empty(packed_size(into.size, width), np.uint8)
        pack(into, width, again)
    return into.tobytes() + again.tobytes()
