"""What an encoder remembers goes into an encode, and what is to be remembered takes the place of what was given.

A residual (feedback.py):  p = x + r;  C(p) is sent;  r' = p - decoded
A reference (ef21.py):     p = x - g;  C(p) is sent;  g' = g + decoded

Both work in any part of a vector: a codec that can encode a part by itself does all of this while it is in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.aggregation.codec import ALL, Everything, Support
from thinwire.aggregation.vectors import add_finite, require_finite
from thinwire.core.types import Vector


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
