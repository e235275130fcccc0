"""What a quantizer may have kernels for: where one is there, values are read and written once instead of step by step.

None has to: a chain goes by `quantize` and `dequantize` where these are missing, and the bits are the same.
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
class Writes(Protocol):
    """A quantizer that has a kernel for it: symbols go straight into the frame, packed, and no value is read twice.

    `writes` says whether this path has it. NonFiniteUpdate for NaN and infinity: no pass of its own looks for them.
    `apart`: whole buckets may be written by themselves, as a part of a vector whose values are counted from `first`.
    """

    @property
    def writes(self) -> bool: ...
    @property
    def apart(self) -> bool: ...
    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None: ...


@runtime_checkable
class Feeds(Protocol):
    """A quantizer that `Writes` and has a kernel for feedback: values become what is to be held, each bucket in cache.

    `feeds` says whether there is one; without, a quantizer that writes `apart` does so in larger parts.
    """

    @property
    def feeds(self) -> bool: ...
    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None: ...


@runtime_checkable
class Adds(Protocol):
    """A quantizer that has a kernel for it: into[0 ..] gets the values in `span` times a factor, added or in place of
    what stands there. False: it has none on this path, nothing was done, and `dequantize` is the way.

    Symbols of fewer than 8 bits reach it, `check` and `dequantize` as `Packed`: they have a size, a least one, and
    slices that are arrays.
    """

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool: ...


# What an encoder remembers goes into an encode, and what is to be remembered takes the place of what was given.
#
# A residual (feedback.py):  p = x + r;  C(p) is sent;  r' = p - decoded
# A reference (ef21.py):     p = x - g;  C(p) is sent;  g' = g + decoded
#
# Both work in any part of a vector: a codec that can encode a part by itself does all of this while it is in cache.


@dataclass(frozen=True)
class Held:
    """A vector that is remembered: only read. `sign` is 1 for a residual and -1 for a reference."""

    vector: Vector
    sign: float

    @property
    def weight(self) -> float:
        """With which the decoded values are added after `after`."""
        return -self.sign

    def before(self, x: Vector, span: slice = ALL) -> None:
        """X becomes p, the vector that is encoded; NonFiniteUpdate when there is NaN or infinity in it."""
        add_finite(x[span], self.vector[span], self.sign)

    def after(self, x: Vector, span: slice = ALL) -> None:
        """What stands in p's place before the decoded values are added."""
        if self.sign < 0:
            x[span] = self.vector[span]

    def settled(self, x: Vector, span: slice | Support = ALL) -> None:
        """NonFiniteUpdate where what is to be held has overflowed, as it may near float32's largest value.

        A device that kept it could never encode again.
        """
        require_finite(x if isinstance(span, Everything) else x[span])
