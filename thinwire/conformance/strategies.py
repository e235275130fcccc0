"""Hypothesis strategies of the conformance suite: vectors of many kinds, in layouts of three tensors."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from thinwire.compression import parse
from thinwire.compression.chain import Chain
from thinwire.compression.codecs.powersgd import LowRank
from thinwire.compression.spec import chains
from thinwire.core import Layout
from thinwire.core.types import Vector


def rotates(spec: str) -> bool:
    """Return True if a quantizer of the codec rotates at random."""
    return any(isinstance(chain, Chain) and chain.quantizer.rotates for chain in chains(parse(spec)))


def drawn(spec: str) -> bool:
    """Return True if the indices are random.

    The contraction then holds in expectation, and one value may hold nearly all of the norm.
    """
    found = [chain.sparsifier for chain in chains(parse(spec)) if isinstance(chain, Chain)]
    return any(sparsifier is not None and sparsifier.seeded for sparsifier in found)


def has_low_rank(spec: str) -> bool:
    """Return True if the codec sends factors of matrices."""
    return any(isinstance(chain, LowRank) for chain in chains(parse(spec)))


def is_ours_alone(spec: str) -> bool:
    """Return True if no byte of a frame is a library's: compressors and BLAS may give others in another version."""
    parts = chains(parse(spec))
    return not any(isinstance(chain, LowRank) or chain.coded.last is not None for chain in parts)


def dense(x: Vector) -> bool:
    """Return True if no few values hold most of the norm."""
    return bool(np.abs(x).max() <= 6 * np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def layout_of(n: int, spec: str = "") -> Layout:
    """Return a layout of n values in three tensors whose names per-tensor rules can distinguish.

    For a low rank, some of the tensors are matrices.
    """
    third = n // 3
    if spec and has_low_rank(spec):
        side, rows = math.isqrt(n // 2), n // 16
        rest = n - side * side - rows * 4
        return Layout.of({"a.weight": (side, side), "b.bias": (rest,), "c.weight": (rows, 2, 2)})
    return Layout.of({"a.weight": (third,), "b.bias": (third,), "c.weight": (n - 2 * third,)})


def made(n: int, seed: int, shape: str, exponent: int) -> Vector:
    """Return a vector whose largest magnitude is about 2^exponent: exactly a power of two in all shapes but `equal`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    if shape == "equal":  # the largest rounding error for all values at once
        return np.copysign((1 + rng.random()) * 2.0 ** (exponent - 1), x).astype(np.float32)
    if shape == "ties":
        x = np.round(x)
    elif shape == "spike":
        x *= 1e-3
        x[seed % n] = -1.0
    elif shape == "steep":
        x *= 2.0 ** -rng.integers(0, 60, n)
    elif shape == "sparse":
        x[rng.random(n) < 0.95] = 0
    top = np.abs(x).max()
    scaled: Vector = (x * (2.0**exponent / (top or 1))).astype(np.float32)
    return scaled


@st.composite
def vectors(draw: st.DrawFn, most: int = 5000, furthest: int = 100) -> Vector:
    """Return a strategy of vectors of 1 to `most` values, with exponents up to `furthest`."""
    return made(
        n=draw(st.integers(1, most)),
        seed=draw(st.integers(0, 2**32)),
        shape=draw(st.sampled_from(["normal", "equal", "ties", "spike", "steep", "sparse"])),
        exponent=draw(st.integers(-furthest, furthest)),
    )
