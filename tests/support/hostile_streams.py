"""Long streams of `rans` as a hostile client makes them, for `make fuzz`: their lanes are decoded sixteen at a time."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import native
from thinwire.compression.codecs.rans import Rans
from thinwire.core.errors import BadPayload

LONG_STREAMS = "long streams of rans"  # beside the specs of codecs
SHORT = 200  # frames of other decoders take as long as one of these
COUNTS = (2048 * 16, 2048 * 16 + 15, 2048 * 32 + 1, 2048 * 64 - 7, 2048 * 256 + 100)  # of numbers: 16 to 256 lanes
RANS = Rans()


def fuzz_streams(cases: int, seed: int) -> int:
    """Return how many of so many streams were refused; AssertionError where two paths differ.

    Each stream is one allocation of its size, and the NUL that CPython appends, so that the sanitizers see an access
    behind it.
    """
    rng, refused = random.Random(seed), 0
    *kernels, oracle = native.available()
    for case in range(cases):
        symbols, bits = _symbols(rng)
        with native.using(kernels[case % len(kernels)] if kernels else oracle):
            right = RANS.pack_symbols(symbols, bits)
        sent = _broken(rng, right)
        paths = (*kernels[case % max(1, len(kernels)) :][:1], oracle)
        results = [_result(path, bytes(sent), symbols.size, bits) for path in paths]
        assert results[0] == results[-1], (case, seed, symbols.size, bits, bytes(sent[:64]).hex())
        assert sent != right or results[0] == symbols.tobytes(), (case, seed, "not what was encoded")
        refused += results[0] is None
    return refused


def _symbols(rng: random.Random) -> tuple[NDArray[np.int8], int]:
    """Return symbols of few bits, all coded or by the gaps between those that are not 0."""
    draw, count, bits = np.random.default_rng(rng.getrandbits(32)), rng.choice(COUNTS), rng.randint(2, 8)
    largest = (1 << bits - 1) - 1
    drawn = np.clip(np.rint(draw.standard_normal(count) * largest / rng.choice((1, 3, 9))), -largest, largest)
    symbols = drawn.astype(np.int8)
    if rng.random() < 0.5:
        return symbols, bits
    sparse = np.zeros(4 * count, np.int8)
    sparse[np.sort(draw.choice(sparse.size, count, replace=False))] = np.where(symbols, symbols, 1)
    return sparse, bits


def _broken(rng: random.Random, stream: bytes) -> bytearray:
    sent = bytearray(stream)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 40))):
        at = rng.randrange(len(sent)) if rng.random() < 0.5 else rng.randrange(min(len(sent), 200))
        sent[at] = rng.randrange(256)
    if rng.random() < 0.3:
        del sent[rng.randrange(len(sent)) :]
    elif rng.random() < 0.2:
        sent += rng.randbytes(rng.choice((1, 2, 64)))
    return sent


def _result(path: str, sent: bytes, items: int, bits: int) -> bytes | None:
    with native.using(path):
        try:
            return RANS.unpack_symbols(sent, items, bits).tobytes()
        except BadPayload:
            return None
