"""What stands in a frame, and how it comes into a vector: in work proportional to what was sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from thinwire.aggregation.by_kernel import Adds
from thinwire.aggregation.codec import Indices, Quantizer, Scales, Symbols
from thinwire.aggregation.native import gaps as native
from thinwire.aggregation.vectors import blocks
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Read:
    """A frame's content before it is decoded: nothing of the size of the vector has been allocated."""

    quantizer: Quantizer
    indices: Indices | None  # None: every coordinate
    symbols: Symbols
    scales: Scales
    word: int

    def apart_from(self, x: Vector) -> Read:
        """The same where x is written to: what identity makes of x is x itself."""
        return replace(self, symbols=self.symbols.copy()) if np.may_share_memory(self.symbols, x) else self

    def add(self, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """into[start - shift : stop - shift] += weight * decoded[start:stop].

        With no weight the values replace what stands there.
        """
        factor, adds = np.float32(1 if weight is None else weight), weight is not None
        first, last = start, stop
        if self.indices is not None:
            first, last = (int(i) for i in np.searchsorted(self.indices, [start, stop]))
        elif isinstance(self.quantizer, Adds):
            here, to = slice(start, stop), into[start - shift : stop - shift]
            if self.quantizer.add(self.symbols, self.scales, here, self.word, factor, adds, to):
                return
        for a, b in blocks(last, start=first):
            self._add_block(slice(a, b), factor, adds, into, shift)

    def _add_block(self, here: slice, factor: np.float32, adds: bool, into: Vector, shift: int) -> None:
        """The same for those that were sent at `here`."""
        values = self.quantizer.dequantize(self.symbols, self.scales, here, self.word)
        places: slice | Indices = slice(here.start - shift, here.stop - shift)
        if self.indices is not None:
            if native.sparse_add(self.indices[here], values, factor, shift, adds, into):
                return
            places = self.indices[here] - shift  # they rise strictly: none stands twice
        scaled = values if factor == 1 else values * factor
        if adds:
            into[places] += scaled
        else:
            into[places] = scaled
