"""What most quantizers have in common: no argument, a float32 scale for each bucket, symbols of a byte or less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from thinwire.aggregation.codec import Role, buckets


@dataclass(frozen=True)
class Whole:
    """A quantizer whose every value is sent. What differs is overridden; see `Quantizer` for what each means."""

    role: ClassVar[Role] = "quantizer"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    seeded: ClassVar[bool] = False
    apart: ClassVar[bool] = True  # where it writes at all

    @classmethod
    def read(cls, argument: str | None) -> Self:
        del argument
        return cls()

    def under_feedback(self) -> Self:
        return self

    def over(self, starts: tuple[int, ...]) -> Self:
        del starts
        return self

    def scales_count(self, size: int) -> int:
        return buckets(size)
