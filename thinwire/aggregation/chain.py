"""A chain of stages, `Sparsifier? > Quantizer? > coders`: one vector to its streams and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np

from thinwire.aggregation import straight
from thinwire.aggregation.bound import Bound
from thinwire.aggregation.codec import (
    Contractive,
    Drawn,
    Everything,
    Kind,
    Quantizer,
    Scales,
    Sparsifier,
    Support,
    Unbiased,
    chained,
)
from thinwire.aggregation.coded import WORD, Coded, read_word
from thinwire.aggregation.frame import Stream
from thinwire.aggregation.group import Group
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.identity import Identity
from thinwire.aggregation.read import Read
from thinwire.core.keys import Key, word32
from thinwire.core.layout import Layout, Slice
from thinwire.core.types import State, Vector

PLAIN = Identity()
UNCODED = Coded()


@dataclass(frozen=True)
class Chain:
    """What `parse` gives. A frame's streams: a word of the key if it is needed to decode, indices if they are sent,
    symbols, and scales if there are any. What is quantized is divided by `divisor` first; a decoder need not know.
    """

    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = PLAIN
    coded: Coded = UNCODED
    divisor: float = 1.0

    @property
    def spec(self) -> str:
        """Canonical: what is always there is left out."""
        stages = [self.sparsifier.spec] if self.sparsifier else []
        stages += [self.quantizer.spec] if self.quantizer != PLAIN or not stages else []
        return " > ".join(stages + self.coded.specs)

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [[Group(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> Chain:
        """This chain for a vector in which these slices of tensors stand one after the other."""
        return self.over(tuple(accumulate((piece.size for piece in slices[:-1]), initial=0)))

    def over(self, starts: tuple[int, ...]) -> Chain:
        """This chain for a vector whose tensors begin at these places; what a sparsifier sends counts as one tensor."""
        return self if self.sparsifier else replace(self, quantizer=self.quantizer.over(starts))

    def under_feedback(self) -> Chain:
        """Inside a residual: a quantizer's own way, and C / (1 + omega) where that is unbiased and no contraction.

        E||C(x) / (1 + omega) - x||^2 <= omega / (1 + omega) ||x||^2, so delta = 1 / (1 + omega) for any omega.
        """
        quantizer = self.quantizer.under_feedback()
        kind = quantizer.kind()
        divisor = 1 + kind.omega if isinstance(kind, Unbiased) and kind.omega >= 1 else 1.0
        return replace(self, quantizer=quantizer, divisor=divisor)

    @property
    def kind(self) -> Kind:
        inner = self.quantizer.kind() if self.divisor == 1 else Contractive(1 / self.divisor)
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    @property
    def looks(self) -> bool:
        """Whether `write` itself refuses NaN and infinity."""
        return self.sparsifier is not None and self.sparsifier.looks

    @property
    def seeded(self) -> bool:
        """Whether the decoder needs the word."""
        return self.quantizer.seeded or (self.sparsifier is not None and self.sparsifier.seeded)

    def sent(self, size: int) -> int:
        """How many of `size` values are sent, at the most."""
        return self.sparsifier.count(size) if self.sparsifier else size

    def init(self) -> State:
        """It remembers nothing."""
        return {}

    @property
    def writes(self) -> bool:
        """Whether a kernel writes what it makes of a vector straight into a frame, and refuses NaN and infinity."""
        plain = self.sparsifier is None and self.coded == UNCODED and self.divisor == 1
        return plain and straight.writes(self.quantizer)

    @property
    def apart(self) -> bool:
        """Whether parts of a vector can be encoded by themselves, so that there is `held`."""
        return self.writes and straight.apart(self.quantizer)

    def written(self, x: Vector, key: Key, segment: int, bound: bytes) -> bytes:
        """The whole frame of one vector, where the chain `writes`: the bytes that `write` leads to."""
        return straight.written(self.quantizer, x, self._word(key, segment), bound)

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Held, state: State) -> bytes:
        """The frame of x with what is held (see `Held`), where a chain encodes `apart`: each part is read once."""
        del state
        return straight.written(self.quantizer, x, self._word(key, segment), bound, held)

    def _word(self, key: Key, segment: int, group: int = 0) -> int:
        """What the rounding of one group draws by: groups of a segment draw apart from each other."""
        stage = self.quantizer.spec if group == 0 else f"{self.quantizer.spec}#{group}"
        return word32(key, stage, segment)

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Read]:
        """The streams for one vector, the segment's `group`-th, which coordinates they hold, and what `read` finds."""
        streams, word = list[Stream](), self._word(key, segment, group)
        values, indices = x, None
        if self.seeded:
            streams.append(Stream(WORD.pack(word)))
        if self.sparsifier is not None:
            indices, values = self.sparsifier.select(x, word)
            if not self.sparsifier.seeded:
                streams.append(self.coded.indices(indices, self.sparsifier))
        if self.divisor != 1:
            values = values * np.float32(1 / self.divisor)
        symbols, scales = self.quantizer.quantize(values, word)
        streams.append(self.coded.symbols(symbols, self.quantizer))
        if scales.size:
            streams.append(self.coded.scales(scales))
        support = Everything.SENT if indices is None else indices
        return streams, support, Read(self.quantizer, indices, symbols, scales, word)

    def streams(self, size: int) -> int:
        """How many streams a frame of a vector of `size` has."""
        places = self.sparsifier is not None and not self.sparsifier.seeded
        return 1 + self.seeded + places + (self.quantizer.scales_count(self.sent(size)) > 0)

    def read(self, streams: list[Stream], size: int) -> Read:
        """Undo the coders and check everything; `BadPayload` before anything else happens."""
        rest = iter(streams)
        word = read_word(next(rest)) if self.seeded else 0
        indices, sent = None, self.sent(size)
        drawn = self.sparsifier is not None and self.sparsifier.seeded
        if self.sparsifier is not None and not drawn:
            indices = self.coded.read_indices(next(rest), size, self.sparsifier)
            sent = indices.size
        symbols = self.coded.read_symbols(next(rest), sent, self.quantizer)
        if self.sparsifier is not None and isinstance(symbols, np.ndarray):
            symbols = np.require(symbols, requirements="A")  # they are few, and read more than once
        scales: Scales = np.zeros(0, self.quantizer.scales_dtype)
        if count := self.quantizer.scales_count(sent):
            scales = self.coded.read_scales(next(rest), count, self.quantizer)
        self.quantizer.check(symbols, scales)
        if drawn:  # last: no stream says how many they are
            indices = cast("Drawn", self.sparsifier).places(size, word)
        return Read(self.quantizer, indices, symbols, scales, word)

    def add(self, read: Read, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """See `Read.add`."""
        read.add(weight, into, start, stop, shift)

    def max_bytes(self, size: int) -> int:
        """The most bytes that the streams of a vector of `size` can have."""
        sent, quantizer, coded = self.sent(size), self.quantizer, self.coded
        indices = 0
        if self.sparsifier is not None and not self.sparsifier.seeded:
            indices = coded.most_of_indices(size, self.sparsifier)
        scales = quantizer.scales_count(sent) * quantizer.scales_dtype.itemsize
        return WORD.size * self.seeded + indices + coded.most_of_symbols(sent, quantizer) + scales
