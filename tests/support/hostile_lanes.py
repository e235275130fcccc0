"""Packed vectors, lattice points and sums of secure aggregation as a hostile client makes them, for `make fuzz`."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from tests.support.lattices import KINDS, of_kind
from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation.lattice import BadSum, Lattice
from thinwire.aggregation.lattice_window import Lanes
from thinwire.compression import native
from thinwire.core import Key
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.types import Vector
from thinwire.privacy.masks import add_mask, add_packed, check_packed, lane_dtype, pack, packed_size

LANES, LATTICE = "packed lanes", "lattice points"  # beside the specs of codecs
SIZES = (65, 300, 1000, 4097)  # of a model, in parameters
EXTREMES = (0.0, -0.0, 1e-45, -1e-38, 3e38, -3e38, 1.0, float("inf"), float("nan"))
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


def fuzz_lattice(cases: int, seed: int) -> int:
    """How many of so many hostile updates and sums were refused; AssertionError where two paths differ."""
    rng, refused = random.Random(seed), 0
    *kernels, oracle = native.available()
    for number in range(cases):
        lattice = of_kind(rng.choice(KINDS), rng.choice(SIZES), clip=rng.choice((2.0**-60, 1.0, 2.0**60)))
        window, survivors = rng.randrange(lattice.walk.windows), rng.randint(1, 10)
        x, total = _update(rng, lattice), _sum(rng, lattice, survivors)
        results = [
            _lattice_result(path, lattice, x.copy(), total.copy(), window, survivors)
            for path in (*kernels[number % max(1, len(kernels)) :][:1], oracle)
        ]
        assert results[0] == results[-1], (number, seed, lattice.terms, window, survivors)
        refused += None in results[0]
    return refused


def _update(rng: random.Random, lattice: Lattice) -> Vector:
    """A vector of random numbers with a few extreme ones, half of the time finite."""
    drawn = np.random.default_rng(rng.getrandbits(32))
    x: Vector = (drawn.standard_normal(lattice.terms.size) * 10.0 ** rng.randint(-40, 36)).astype(np.float32)
    for value in rng.sample(EXTREMES[:-2] if rng.random() < 0.5 else EXTREMES, 3):
        x[rng.randrange(x.size)] = value
    return x


def _sum(rng: random.Random, lattice: Lattice, survivors: int) -> Lanes:
    """Random lanes, or numbers that these survivors can make, with the right check lanes half of the time."""
    drawn = np.random.default_rng(rng.getrandbits(32))
    most = survivors * lattice.terms.most if rng.random() < 0.7 else np.iinfo(np.int32).max
    lanes = drawn.integers(-most, most, lattice.lanes, endpoint=True).astype(np.int32).astype(lattice.dtype)
    if rng.random() < 0.8:
        lanes[lattice.padded :] = survivors
    return np.ascontiguousarray(lanes)


def _lattice_result(
    path: str, lattice: Lattice, x: Vector, total: Lanes, window: int, survivors: int
) -> tuple[bytes | None, bytes | None]:
    """The points and the residual of an update, and the decoded sum; None for what is refused."""
    with native.using(path):
        try:
            points = lattice.encode(x, 1, window, Key(3), ScriptedRng(4))
            update: bytes | None = points.lanes.tobytes() + x.tobytes()
        except NonFiniteUpdate:
            update = None
        try:
            decoded: bytes | None = lattice.decode_sum(total, survivors, survivors, window, Key(3)).tobytes()
        except BadSum:
            decoded = None
    return update, decoded
