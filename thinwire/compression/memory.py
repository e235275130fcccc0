"""Error-feedback memory, and the fused kernels that a quantizer may have.

The memory goes into an encode, and the updated memory replaces the vector that was given (x is the update, p the vector
that is encoded):

    A residual (classic error feedback):  p = x + r;  C(p) is sent;  r' = p - decoded
    A reference (EF21):                   p = x - g;  C(p) is sent;  g' = g + decoded

Both work on any part of a vector: a codec that can encode parts separately does all of this while a part is in cache.

A quantizer with a fused kernel reads and writes each value once instead of once a step. No quantizer needs one: without
it a chain uses `quantize` and `dequantize`.

Invariant: fused or not, the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import ALL, Everything, Scales, Support, Symbols
from thinwire.compression.vector_ops import add_finite, require_finite
from thinwire.core.types import Vector


@runtime_checkable
class FusedEncoder(Protocol):
    """A quantizer with a fused kernel that quantizes, bit-packs and writes into the frame buffer in one pass.

    `apart` is True if whole buckets may be encoded separately, as a part of a vector whose first value has the index
    `first`.
    """

    @property
    def writes(self) -> bool:
        """Return True if the active kernels include this one."""

    @property
    def apart(self) -> bool:
        """Return True if whole buckets may be encoded separately."""

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales of `values` in one pass; raise NonFiniteUpdate for NaN and infinity."""


@runtime_checkable
class FusedFeedbackEncoder(Protocol):
    """A quantizer with a fused kernel for error feedback: it updates the memory while a bucket is in cache.

    Without this kernel, a quantizer that is `apart` does the same in larger parts.
    """

    @property
    def feeds(self) -> bool:
        """Return True if the active kernels include this one."""

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""


@runtime_checkable
class FusedDecoder(Protocol):
    """A quantizer with a fused kernel for decoding.

    Symbols of fewer than 8 bits reach it, `check` and `dequantize` as `Packed`, which has a size, a minimum, and slices
    that are arrays.
    """

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Write the values in `span` times `factor` to into[0 ..], added to its values if `adds`, else in their place.

        Return False if the active kernels do not include this one: nothing was done, and the caller uses `dequantize`.
        """


@dataclass(frozen=True)
class Memory:
    """The memory of an encoder, which is only read. `sign` is 1 for a residual and -1 for a reference."""

    vector: Vector
    sign: float

    @property
    def weight(self) -> float:
        """Return the weight with which the decoded values are added after `after`."""
        return -self.sign

    def before(self, x: Vector, span: slice = ALL) -> None:
        """Replace `x` by p, the vector that is encoded; raise NonFiniteUpdate if p holds NaN or infinity."""
        add_finite(x[span], self.vector[span], self.sign)

    def after(self, x: Vector, span: slice = ALL) -> None:
        """Replace p by the vector to which the decoded values are added."""
        if self.sign < 0:
            x[span] = self.vector[span]

    def settled(self, x: Vector, span: slice | Support = ALL) -> None:
        """Raise NonFiniteUpdate if the updated memory overflowed, which can happen near float32's largest value.

        A device that kept such a memory could never encode again.
        """
        require_finite(x if isinstance(span, Everything) else x[span])
