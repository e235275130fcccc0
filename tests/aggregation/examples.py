"""What the conformance suite runs: every example of every registered codec, some chains, and vectors of many kinds."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from thinwire.aggregation import codecs, parse
from thinwire.aggregation.hashing import lowbias32
from thinwire.core import Layout
from thinwire.core.types import Vector

CHAINS = {
    "topk(0.01) > int8 > zstd",
    "topk(0.1) > fp16",
    "topk(0.3) > int8",
    "topk(0.04) > sign > rice",
    "topk(0.01) > qsgd(4) > rice",
    "ternary > rice",
    "threshold(1.5) > sign > rice > zstd",
    "fp16 > zstd",
    'layers("*.bias"=fp16; *=topk(0.1) > int8)',
    'layers("a*"=int8; "b*"=int8 > zstd; *=topk(0.2))',
}
SPECS = sorted({parse(example).spec for step in codecs.values() for example in step.examples} | CHAINS)


def rotates(spec: str) -> bool:
    return "drive" in spec or "eden" in spec


def dense(x: Vector) -> bool:
    """Whether no few values are most of it."""
    return bool(np.abs(x).max() <= 6 * np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def layout_of(n: int) -> Layout:
    """Some n values as three tensors whose names the rules of CHAINS tell apart."""
    third = n // 3
    return Layout.of({"a.weight": (third,), "b.bias": (third,), "c.weight": (n - 2 * third,)})


def made(n: int, seed: int, shape: str, exponent: int) -> Vector:
    """A vector whose largest magnitude is about 2^exponent."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
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
    return made(
        n=draw(st.integers(1, most)),
        seed=draw(st.integers(0, 2**32)),
        shape=draw(st.sampled_from(["normal", "ties", "spike", "steep", "sparse"])),
        exponent=draw(st.integers(-furthest, furthest)),
    )


def fixed_vector(n: int = 4200) -> Vector:
    """The vector of the golden files: integers by a hash, so that no library's generator can change it."""
    drawn = lowbias32(np.arange(n, dtype=np.uint32) + np.uint32(1))
    signed = (drawn >> np.uint32(8)).astype(np.float32) - np.float32(2**23)
    falling = np.float32(2.0) ** -(np.arange(n) % 40).astype(np.float32)
    x: Vector = signed * falling * np.float32(2.0**-30)
    return x
