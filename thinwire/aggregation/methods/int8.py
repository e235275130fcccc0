"""int8: eight bits a value, rounded at random, a scale for each bucket of 4096."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.aggregation.codec import BUCKET, Kind, Unbiased
from thinwire.aggregation.methods.levelled import Levelled


@dataclass(frozen=True)
class Int8(Levelled):
    """Sends every value as 8 bits, rounded at random so that the mean is exact, with a scale for each 4096 values.

    Integers from -127 to 127 times max|x|/127 of the bucket. Unbiased (QSGD, Alistarh et al. 2017, with the bucket's
    maximum as norm): the variance is at most scale^2/4 a value, so omega = 4096 / (4 * 127^2) = 0.064 < 1, and
    feedback around it contracts. Rounding draws from a hash of the index: bits depend on the key, not on the order.
    """

    examples: ClassVar[tuple[str, ...]] = ("int8",)
    spec: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def kind(self) -> Kind:
        return Unbiased(BUCKET / (4 * self.levels**2))
