"""An entropy coder of symbols and indices (`rans`): range asymmetric numeral systems (Duda 2013).

A stream of symbols begins with a byte, its form: 0, and the symbols follow as `pack` writes them; else

    bits 0-1: frequencies of the symbols: 0 even, 1 measured, 2 normal | 2: sparse | 3: background | 4-7: width

A sparse stream has the places of the symbols that are not the background (a byte if bit 3 is set, else 0), and these
symbols. A symbol's number is zigzag: 0, -1, 1, -2, .. have the numbers 0, 1, 2, 3, .., without the background. `width`
is the number of bits of the largest number. Behind the form a stream has, as far as it needs them:

    background | number of places | model of gaps | model of symbols | even numbers, packed | states | words | rests

A stream of indices begins at the model of gaps. If it has more than half of the indices up to its last one, it has the
others instead: a byte 254 and the last index come first.

A decoder needs no lengths: the words come from the front, the rests of gaps (see `gaps`) from the back. A stream is
whole if both meet, and all lanes end in the state in which an encoder begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import frequencies
from thinwire.compression.base import Coder, Indices, Symbols, packed_bytes
from thinwire.compression.codecs.pack_zstd import Pack, unpacked
from thinwire.compression.frame import read_varint, varint
from thinwire.compression.frequencies import UNIT
from thinwire.compression.gaps import GapReader, Gaps, Places, read_model
from thinwire.compression.interleaved import Bytes, Model, Words, counts_of, lanes_for, write_numbers
from thinwire.core.errors import BadPayload

EVEN, MEASURED, NORMAL = range(3)
SPARSE, BACKGROUND = 4, 8  # bits of the form
PACKED = b"\0"  # the form of packed symbols
COMPLEMENT = 254  # where a model of gaps begins: the gaps are of the indices that are left out
AMPLIFICATION = (
    256  # bytes of a result for each of its stream; before a larger result the stream is read once for nothing
)
LONG_TABLE = 8  # numbers: for fewer, measured frequencies are short enough
SYMBOLS = tuple((n >> 1) ^ -(n & 1) for n in range(256))  # by number


class Rans(Coder):
    """Codes indices and symbols of at most 8 bits close to their entropy, by interleaved range ANS.

    Duda (2013). Symbols of which one makes more than half are coded as its gaps, so the work is in proportion to the
    others. Frequencies are measured, or a distribution of one byte where that is shorter.

    Invariant: random indices, and symbols of normal values, take at most 2 % + 16 bytes more than their entropy. No
    symbols take more than packed and a byte.
    """

    examples: ClassVar[tuple[str, ...]] = ("ternary > rans", "topk(0.01) > int8 > rans")
    paper: ClassVar[str] = "Duda 2013"
    spec: ClassVar[str] = "rans"

    def pack_indices(self, indices: Indices) -> bytes:
        """Return the code of strictly rising indices."""
        if not indices.size:
            return b""
        last, start, places = int(indices[-1]), b"", np.ascontiguousarray(indices, np.int64)
        if 2 * indices.size > last + 1:
            left_out = np.ones(last + 1, np.bool_)
            left_out[indices] = False
            start, places = bytes([COMPLEMENT]) + varint(last), np.flatnonzero(left_out)
        if not places.size:
            return start
        gaps = Gaps.at(places)
        head, model = gaps.model()
        free, rest = gaps.split_rest()
        words = write_numbers([(gaps.classes, model)], lanes_for(places.size), free)
        return b"".join([start, head, words, rest])

    def unpack_indices(self, data: bytes | memoryview, items: int, size: int) -> Indices:
        """Return `items` strictly rising indices under `size`; raise BadPayload if the data holds anything else."""
        view, count, last = memoryview(data), items, -1
        if items and view and view[0] == COMPLEMENT:
            last, at = read_varint(view, 1)
            view, count = view[at:], last + 1 - items
            if not (last < size and 0 <= count < items):
                raise BadPayload(f"{items} indices up to {last}", why=f"they are more than half, and under {size}")
        if not count:
            if len(view):
                raise BadPayload("bytes behind the last index")
            return np.arange(last + 1, dtype=np.int64)

        def reader() -> GapReader:
            model, rest = read_model(view)
            return GapReader(Words(rest, lanes_for(count)), model, count, size if last < 0 else last)

        if 8 * items > AMPLIFICATION * len(data):
            reader().skip()
        places = reader().places()
        if last >= 0:
            left = np.ones(last + 1, np.bool_)
            left[places] = False
            return np.flatnonzero(left)
        if 2 * items > places[-1] + 1:
            raise BadPayload("more than half of the indices", why="an encoder sends the others")
        return places

    def max_index_bytes(self, items: int, size: int) -> int:
        """Return the most bytes of `items` indices under `size`.

        A gap of mean m takes at most 3 + log2(1 + m) bits, and so does the mean of many.
        """
        coded = min(items, size // 2 + 1)
        return int(coded * (3 + log2(1 + size / max(1, coded)))) // 8 + 4 * lanes_for(coded) + 8

    def pack_symbols(self, symbols: Symbols, bits: int) -> bytes:
        """Return the code of signed symbols of `bits` bits."""
        symbols = np.ascontiguousarray(symbols, np.int8)
        half, background, found = symbols.size // 2, 0, Gaps.of(symbols, 0, symbols.size // 2)
        if found is None:
            counts = counts_of(symbols.view(np.uint8))
            largest = max(counts)
            if largest < symbols.size - half:
                return _shorter(_dense(symbols.view(np.uint8), counts, bits), symbols, bits)
            background = int(np.uint8(counts.index(largest)).astype(np.int8))
            found = Gaps.of(symbols, background, half)
            assert found is not None, "the background is counted"
        return _shorter(_sparse(*found, background, bits), symbols, bits)

    def unpack_symbols(self, data: bytes | memoryview, items: int, bits: int) -> NDArray[np.int8]:
        """Return `items` signed symbols of `bits` bits; raise BadPayload if the data holds anything else."""
        view = memoryview(data)
        form = _form(view, bits)
        if not form:
            symbols: NDArray[np.int8] = Pack().unpack(view[1:], items, np.dtype(np.int8), bits)
            return symbols
        twice = items > AMPLIFICATION * len(view)
        if form & SPARSE:
            if twice:
                SparseStream.read(view, items, bits).skip()
            sparse = SparseStream.read(view, items, bits)
            values = sparse.values()
            out = np.full(items, sparse.background, np.int8) if sparse.background else np.zeros(items, np.int8)
            if sparse.gaps:
                sparse.gaps.fill(values, out.view(np.uint8))
            return out
        model, rest = _read_model(view[1:], form & 3, form >> 4, ZIGZAG[: 1 << bits])
        if model is None:
            raise BadPayload("symbols without frequencies", why="an encoder packs those")
        if twice:
            words = Words(rest, lanes_for(items))
            words.skip(model, items)
            words.finish()
        words, out = Words(rest, lanes_for(items)), np.empty(items, np.int8)
        words.read(model, out.view(np.uint8))
        words.finish()
        return out

    def max_symbol_bytes(self, items: int, bits: int) -> int:
        """Return the most bytes of `items` symbols of `bits` bits."""
        return 1 + packed_bytes(items, bits)

    def pack_sparse(self, places: Places, symbols: Symbols, items: int, bits: int) -> bytes:
        """Return what `pack_symbols` gives for `items` symbols that are 0 except at strictly rising places.

        `symbols` has those at the places, none of which is 0. The work does not depend on `items` while they are at
        most half of them.
        """
        coded = None
        if 2 * places.size <= items:
            values = np.ascontiguousarray(symbols, np.int8).view(np.uint8)
            coded = _sparse(Gaps.at(np.ascontiguousarray(places, np.int64)), values, 0, bits)
        if coded is None or len(coded) > packed_bytes(items, bits):
            dense = np.zeros(items, np.int8)
            dense[places] = symbols
            return self.pack_symbols(dense, bits)
        return coded

    def unpack_sparse(self, data: bytes | memoryview, items: int, bits: int) -> tuple[Places, NDArray[np.int8]] | None:
        """Return the places of the symbols that are not 0, and these symbols.

        Return None if the stream has no gaps between such symbols: `unpack_symbols` reads it. Raise BadPayload if the
        data holds anything but `items` symbols of `bits` bits. The work does not depend on `items`.
        """
        view = memoryview(data)
        form = _form(view, bits)
        if not form & SPARSE or form & BACKGROUND:
            return None
        sparse = SparseStream.read(view, items, bits)
        if 9 * sparse.count > AMPLIFICATION * len(view):
            sparse.skip()
            sparse = SparseStream.read(view, items, bits)
        values = sparse.values()
        return sparse.gaps.places() if sparse.gaps else np.empty(0, np.int64), values.view(np.int8)


ZIGZAG = np.array(SYMBOLS, np.int8).view(np.uint8)  # the byte of each number


def _shorter(coded: bytes, symbols: NDArray[np.int8], bits: int) -> bytes:
    if len(coded) <= packed_bytes(symbols.size, bits):
        return coded
    return PACKED + bytes(Pack().pack(symbols, bits))


def _dense(symbols: Bytes, counts: list[int], bits: int) -> bytes:
    """Return the stream of symbols of which none makes more than half."""
    of = ZIGZAG[: 1 << bits]
    kind, width, head, model = _model([counts[byte] for byte in of], of)
    if model is None:  # even: the caller packs them
        return bytes(1 + packed_bytes(symbols.size, bits))
    return bytes([kind | width << 4]) + head + write_numbers([(symbols, model)], lanes_for(symbols.size))


def _sparse(gaps: Gaps, values: Bytes, background: int, bits: int) -> bytes:
    """Return the stream of symbols by the gaps between those that are not the background."""
    of = _numbered(background, bits)
    form = SPARSE | BACKGROUND * (background != 0)
    start = (bytes([background & 0xFF]) if background else b"") + varint(values.size)
    if not values.size:
        return bytes([form]) + start
    counts = counts_of(values)
    kind, width, head, model = _model([counts[byte] for byte in of], of)
    gap_head, gap_model = gaps.model()
    even, parts = b"", [(gaps.classes, gap_model)]
    if model is not None:
        parts.insert(0, (values, model))
    elif width:
        number = np.zeros(256, np.uint8)
        number[of] = np.arange(of.size)
        even = bytes(Pack().pack(_translated(values, number).view(np.int8), width))
    free, rest = gaps.split_rest()
    words = write_numbers(parts, lanes_for(values.size), free)
    return b"".join([bytes([form | kind | width << 4]), start, gap_head, head, even, words, rest])


def _translated(values: Bytes, by: Bytes) -> Bytes:
    """Return by[values] for a table of 256 bytes: a tenth of numpy's time."""
    return np.frombuffer(values.tobytes().translate(by.tobytes()), np.uint8)


def _numbered(background: int, bits: int) -> Bytes:
    """Return the byte of each number of a symbol that is not the background."""
    of = ZIGZAG[: 1 << bits]
    found: Bytes = of[of != background & 0xFF]
    return found


def _model(counts: list[int], of: Bytes) -> tuple[int, int, bytes, Model | None]:
    """Return the shortest model for so many of each number: kind, width, what the stream has of it, the model."""
    while not counts[-1]:
        counts.pop()
    width, bits = (len(counts) - 1).bit_length(), frequencies.bits_for(len(counts))
    best = UNIT * width * sum(counts)
    found: tuple[int, int, bytes, Model | None] = (EVEN, width, b"", None)
    levels = frequencies.levels_of(counts)
    tried = [(MEASURED, frequencies.of_levels(levels, bits), frequencies.write_levels(levels, width, 2))]
    if len(counts) > LONG_TABLE:
        parameter, fitted = frequencies.fitting_normal(counts, of.view(np.int8)[: len(counts)].tolist())
        tried.append((NORMAL, fitted, bytes([len(counts) - 1, parameter])))
    for kind, given, head in tried:
        cost = given.cost(counts) + 8 * UNIT * len(head)
        if cost < best:
            best, found = cost, (kind, width, head, Model(given, of))
    return found


def _form(view: memoryview, bits: int) -> int:
    """Return the first byte of symbols; raise BadPayload if rans never makes it."""
    form = view[0] if len(view) else 255
    if form & 3 > NORMAL or form >> 4 > bits or (form & BACKGROUND and not form & SPARSE):
        raise BadPayload("symbols of a form that rans never makes")
    return form


def _read_model(view: memoryview, kind: int, width: int, of: Bytes) -> tuple[Model | None, memoryview]:
    """Return the model of symbols at the beginning of a stream, None for even ones, and what is behind it."""
    if kind == EVEN:
        return None, view
    if kind == MEASURED:
        levels, size = frequencies.read_levels(view, width, 2)
        given, count = frequencies.of_levels(levels, frequencies.bits_for(len(levels))), len(levels)
    else:
        if len(view) < 2:
            raise BadPayload("a stream that ends before its symbols")
        count, size = view[0] + 1, 2
        given = frequencies.normal(view[1], tuple(of.view(np.int8)[:count].tolist()))
    if count > of.size or (count - 1).bit_length() != width:
        raise BadPayload(f"frequencies of {count} symbols", why=f"there are at most {of.size}, of {width} bits")
    return Model(given, of), view[size:]


@dataclass
class SparseStream:
    """A stream of symbols other than the background, and of the gaps between them; `gaps` is None if there are none."""

    background: int
    count: int
    width: int
    of: Bytes
    even: Bytes
    model: Model | None = None
    gaps: GapReader | None = None

    @classmethod
    def read(cls, view: memoryview, items: int, bits: int) -> SparseStream:
        """Read everything before the words; raise BadPayload if it is invalid."""
        form, view, background = view[0], view[1:], 0
        if form & BACKGROUND:
            background = int(np.int8(np.uint8(view[0]).astype(np.int8))) if len(view) else 0
            view = view[1:]
            if not background or not -(1 << bits - 1) <= background < 1 << bits - 1:
                raise BadPayload(f"the background {background}", why=f"it is a symbol of {bits} bits other than 0")
        count, at = read_varint(view, 0)
        view, width, of = view[at:], form >> 4, _numbered(background, bits)
        if count > items // 2:
            raise BadPayload(f"{count} of {items} symbols", why="a sparse stream has at most half")
        if not count:
            if len(view) or form & 3 or width:
                raise BadPayload("a stream of no symbols that holds something")
            return cls(background, 0, 0, of, np.empty(0, np.uint8))
        gap_model, view = read_model(view)
        model, view = _read_model(view, form & 3, width, of)
        size = packed_bytes(count, width) if model is None else 0
        words = Words(view[size:], lanes_for(count))
        even = np.frombuffer(view[:size], np.uint8)
        return cls(background, count, width, of, even, model, GapReader(words, gap_model, count, items))

    def skip(self) -> None:
        """Read everything and keep nothing; raise BadPayload unless it is what an encoder makes."""
        if self.gaps:
            if self.model:
                self.gaps.words.skip(self.model, self.count)
            elif self.width:
                self.values()
            self.gaps.skip()

    def values(self) -> Bytes:
        """Return the symbols that are not the background, as bytes."""
        if self.model and self.gaps:
            out = np.empty(self.count, np.uint8)
            self.gaps.words.read(self.model, out)
            return out
        if not self.width:
            return np.full(self.count, self.of[0], np.uint8)
        numbers = self.even
        if self.width < 8:
            numbers = unpacked(self.even, self.count, self.width).view(np.uint8) & np.uint8((1 << self.width) - 1)
        if numbers.max() >= self.of.size:
            raise BadPayload(f"a symbol of number {int(numbers.max())}", why=f"all are under {self.of.size}")
        return _translated(numbers, np.resize(self.of, 256))
