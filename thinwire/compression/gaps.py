"""The gaps between rising places, as `rans` codes them: their classes by frequencies, and the rest of each as bits.

Four classes an octave (see `frequencies`) need no parameter, so one pass over the symbols finds the places, classes and
rests. The rests are at the end of a stream, backwards: the first one is in the lowest bits of the last byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import frequencies
from thinwire.compression.frequencies import CLASSES, FIRSTS, MEANS, UNIT, WIDTHS
from thinwire.compression.interleaved import PART, Bytes, Model, Words, counts_of, lanes_for
from thinwire.compression.native import address, kernel
from thinwire.core.errors import BadPayload

Places = NDArray[np.int64]

MAX_ITEMS = 1 << 26  # no gap is larger
MEASURED_GAPS = 255  # a model of gaps that is no parameter of `geometric`
CLASS_BITS = 7
FREE = 2  # bytes of the rests, which a single lane has in its first state
CLASS_BYTES = np.arange(CLASSES, dtype=np.uint8)


@dataclass(frozen=True)
class Gaps:
    """The gaps between places: their classes, their rests, and the last place."""

    classes: Bytes
    rest: Bytes
    last: int

    @classmethod
    def at(cls, places: Places) -> Gaps:
        """Return the gaps between strictly rising places."""
        run, count = kernel("rans_gaps_at"), places.size
        last = int(places[-1]) if count else -1
        if last >= MAX_ITEMS:
            raise ValueError(f"index {last} of a vector, which has at most {MAX_ITEMS} values")
        if run is not None:
            classes, rest = np.empty(count, np.uint8), np.empty(3 * count + 8, np.uint8)
            return cls(classes, rest[: run(address(places), count, classes.ctypes.data, rest.ctypes.data)], last)
        gaps = np.diff(places, prepend=-1) - 1
        classes = frequencies.classes_of(gaps)
        widths = WIDTHS[classes].astype(np.int64)
        ends = np.cumsum(widths)
        bits = np.zeros(int(ends[-1]) if count else 0, np.uint8)
        left = gaps - FIRSTS[classes]
        for place in range(int(widths.max(initial=0))):
            here = widths > place
            bits[(ends - widths)[here] + place] = left[here] >> place & 1
        return cls(classes, np.packbits(bits, bitorder="little"), last)

    @classmethod
    def of(cls, symbols: NDArray[np.int8], background: int, most: int) -> tuple[Gaps, Bytes] | None:
        """Return the gaps between symbols other than the background, and these; None if there are more than `most`."""
        run = kernel("rans_gaps_of")
        if symbols.size > MAX_ITEMS:
            raise ValueError(f"a vector of {symbols.size} symbols, which has at most {MAX_ITEMS}")
        if run is None:
            places = np.flatnonzero(symbols != background)
            return None if places.size > most else (cls.at(places), symbols[places].view(np.uint8))
        classes, values = np.empty(most, np.uint8), np.empty(most, np.uint8)
        rest, sizes = np.empty(symbols.size // 32 + 16, np.uint8), np.empty(2, np.int64)
        out = (classes.ctypes.data, values.ctypes.data, rest.ctypes.data, sizes.ctypes.data)
        found = run(symbols.ctypes.data, symbols.size, background, most, *out)
        return None if found < 0 else (cls(classes[:found], rest[: sizes[0]], int(sizes[1])), values[:found])

    def split_rest(self) -> tuple[int, bytes]:
        """Return the free bits of the first state, and the rests behind them as a stream ends with them."""
        if lanes_for(self.classes.size) > 1:
            return 0, self.rest[::-1].tobytes()
        whole = self.rest.tobytes().ljust(FREE, b"\0")
        return int.from_bytes(whole[:FREE], "little"), whole[: FREE - 1 : -1]

    def model(self) -> tuple[bytes, Model]:
        """Return the shorter model, as the stream has it and as the coder takes it."""
        counts = counts_of(self.classes)[:CLASSES]
        parameter = frequencies.mean_parameter(self.last + 1 - self.classes.size, self.classes.size)
        geometric = frequencies.geometric(parameter)
        levels = frequencies.levels_of(counts[: max(n for n, count in enumerate(counts) if count) + 1])
        measured = frequencies.of_levels(levels, frequencies.bits_for(len(levels)))
        table = frequencies.write_levels(levels, CLASS_BITS, 1)
        if measured.cost(counts) + 8 * UNIT * len(table) < geometric.cost(counts):
            return bytes([MEASURED_GAPS]) + table, Model(measured, CLASS_BYTES)
        return bytes([parameter]), Model(geometric, CLASS_BYTES)


def read_model(data: memoryview) -> tuple[Model, memoryview]:
    """Return the model of gaps at the beginning of a stream, and what is behind it; or raise BadPayload."""
    if not len(data):
        raise BadPayload("a stream that ends before its gaps")
    if data[0] != MEASURED_GAPS:
        if data[0] > MEANS:
            raise BadPayload(f"{data[0]} as the mean of gaps", why=f"it is at most {MEANS}")
        return Model(frequencies.geometric(data[0]), CLASS_BYTES), data[1:]
    levels, size = frequencies.read_levels(data[1:], CLASS_BITS, 1)
    if len(levels) > CLASSES:
        raise BadPayload(f"{len(levels)} classes of gaps", why=f"there are {CLASSES}")
    measured = frequencies.of_levels(levels, frequencies.bits_for(len(levels)))
    return Model(measured, CLASS_BYTES), data[1 + size :]


@dataclass
class GapReader:
    """Reads the places of a stream: the classes of their gaps from its words, the rests from its end."""

    words: Words
    model: Model
    count: int
    size: int  # all places are under it

    def skip(self) -> None:
        """Read everything and keep nothing; raise BadPayload unless it is what an encoder makes."""
        for _ in self._parts("rans_places", lambda _: (0,)):
            pass

    def places(self) -> Places:
        """Return the places; raise BadPayload unless the stream is what an encoder makes."""
        out = np.empty(self.count, np.int64)
        for first, places in self._parts("rans_places", lambda first: (out[first:].ctypes.data,)):
            out[first : first + places.size] = places
        return out

    def fill(self, values: Bytes, symbols: Bytes) -> None:
        """Write the values at their places; raise BadPayload unless the stream is what an encoder makes."""
        to = symbols.ctypes.data
        for first, places in self._parts("rans_fill", lambda first: (values[first:].ctypes.data, to)):
            symbols[places] = values[first : first + places.size]

    def _parts(self, name: str, arguments: Callable[[int], tuple[int, ...]]) -> Iterator[tuple[int, Places]]:
        """Run a kernel on the classes of each part; where numpy is the path, yield (first, places) of each instead."""
        run, data = kernel(name), np.frombuffer(self.words.data, np.uint8)
        state = np.array([0, -1], np.int64)  # the next bit, the place before
        for first in range(0, self.count, PART):
            classes = np.empty(min(PART, self.count - first), np.uint8)
            self.words.read(self.model, classes)
            if self.words.lanes == 1:  # so this is the only part
                data = np.concatenate([data, np.frombuffer(self.words.free.to_bytes(FREE, "big"), np.uint8)])
            if run is None:
                places = _places(classes, data, state)
                if places[-1] >= self.size:
                    raise BadPayload(f"a place of {int(places[-1])}", why=f"all are under {self.size}")
                yield first, places
            else:
                own = (data.ctypes.data, data.size, self.size, state.ctypes.data)
                if not run(classes.ctypes.data, classes.size, *own, *arguments(first)):
                    raise BadPayload("a place behind the last one", why=f"all are under {self.size}")
        bits, free = int(state[0]), FREE if self.words.lanes == 1 else 0
        used = max(free, -(-bits // 8))
        self.words.finish(used - free, self.words.free)
        if int.from_bytes(data[data.size - used : data.size - bits // 8].tobytes(), "big") >> bits % 8:
            raise BadPayload("bits behind the last gap", why="they are 0 in what an encoder makes")


def _places(classes: Bytes, data: Bytes, state: Places) -> Places:
    """Return the next places, and move `state` behind them."""
    widths = WIDTHS[classes].astype(np.int64)
    ends = np.cumsum(widths) + state[0]
    first, last = int(state[0]) // 8, -(-int(ends[-1]) // 8)
    if last > data.size:
        raise BadPayload("a stream whose gaps end too early")
    bits = np.unpackbits(data[data.size - last : data.size - first][::-1], bitorder="little")
    gaps = FIRSTS[classes]
    for place in range(int(widths.max())):
        here = widths > place
        gaps[here] |= bits[(ends - widths)[here] + (place - 8 * first)].astype(np.int64) << place
    places: Places = np.cumsum(gaps + 1) + state[1]
    state[:] = ends[-1], places[-1]
    return places
