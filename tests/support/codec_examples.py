"""What the conformance suite runs: every example of every registered codec, and some chains."""

from __future__ import annotations

import numpy as np

from thinwire.aggregation import codecs
from thinwire.compression import parse
from thinwire.compression.base import Quantizer, Sparsifier
from thinwire.compression.codecs.powersgd import LowRank
from thinwire.compression.spec import chains
from thinwire.conformance.codec_suite import (
    dense,
    drawn,
    has_low_rank,
    layout_of,
    made,
    rotates,
    takes_feedback,
    vectors,
)
from thinwire.core import Key
from thinwire.core.prng import lowbias32
from thinwire.core.types import Vector

__all__ = [
    "CHAINS", "QUANTIZERS", "SPARSIFIERS", "SPECS", "decoded", "dense", "drawn", "fixed_vector", "has_low_rank",
    "is_ours_alone", "layout_of", "made", "rotates", "takes_feedback",
    "vectors",
]  # fmt: skip

CHAINS = {
    "topk(0.01) > int8 > zstd",
    "topk(0.1) > fp16",
    "topk(0.3) > int8",
    "topk(0.04) > sign > rice",
    "topk(0.01) > qsgd(4) > rice",
    "ternary > rice",
    "qsgd(4) > rans",
    "threshold(1.5) > sign > rice > zstd",
    "fp16 > zstd",
    'layers("*.bias"=fp16; *=topk(0.1) > int8)',
    'layers("a*"=int8; "b*"=int8 > zstd; *=topk(0.2))',
}
SPECS = sorted({parse(example).spec for step in codecs.values() for example in step.examples} | CHAINS)

QUANTIZERS = [step.examples[0] for step in codecs.values() if issubclass(step, Quantizer)]  # one spec of each
SPARSIFIERS = [step.examples[0] for step in codecs.values() if issubclass(step, Sparsifier)]


def is_ours_alone(spec: str) -> bool:
    """Return True if no byte of a frame is a library's: compressors and BLAS may give others in another version."""
    parts = chains(parse(spec))
    return not any(isinstance(chain, LowRank) or chain.coded.last is not None for chain in parts)


def fixed_vector(n: int = 4200) -> Vector:
    """The vector of the golden files: integers by a hash, so that no library's generator can change it."""
    drawn = lowbias32(np.arange(n, dtype=np.uint32) + np.uint32(1))
    signed = (drawn >> np.uint32(8)).astype(np.float32) - np.float32(2**23)
    falling = np.float32(2.0) ** -(np.arange(n) % 40).astype(np.float32)
    x: Vector = signed * falling * np.float32(2.0**-30)
    return x


def decoded(spec: str, x: Vector, key: int = 1) -> Vector:
    """What comes of a vector on the other end."""
    codec = parse(spec).bind(layout_of(x.size))
    return codec.decode(codec.encode(x.copy(), codec.init(), Key(key)).payload)
