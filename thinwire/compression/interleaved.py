"""Interleaved range asymmetric numeral systems (Duda 2013; Giesen 2014): bytes by their frequencies, in 1 to 256 lanes.

A lane has a state x of 32 bits. A number of frequency f, before which frequencies add up to `start`, makes it

    x // f * 2^bits + x % f + start

and a state too large for that first gives away its lower 16 bits, as a word. The decoder goes the same way back, so the
encoder begins with the last number. Lanes take turns, and all their words are one sequence. Numpy works on all lanes at
once, Python's integers on few; kernels go from one to the next, or take sixteen together with AVX-512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.frequencies import Frequencies
from thinwire.compression.native import kernel
from thinwire.core.errors import BadPayload

Bytes = NDArray[np.uint8]

LEAST_STATE = 1 << 16
LANE, MAX_LANES = 2048, 256  # a lane has so many numbers at least: its two free bytes are under 1 % of them
FEW_LANES = 16  # for so many, integers of Python take half of numpy's time, for one lane a thirtieth
PART = 1 << 15  # numbers that are counted or decoded at a time; every number of lanes divides it


def lanes_for(numbers: int) -> int:
    """Return the number of lanes of a stream of so many gaps or, without gaps, symbols.

    >>> lanes_for(4095), lanes_for(4096), lanes_for(1 << 24)
    (1, 2, 256)
    """
    return min(MAX_LANES, 1 << max(0, (numbers // LANE).bit_length() - 1))


@dataclass(frozen=True)
class Model:
    """The frequencies of bytes: byte `of[n]` has the frequency of number n."""

    frequencies: Frequencies
    of: Bytes

    @cached_property
    def each(self) -> NDArray[np.uint16]:
        """Return the frequency of each byte."""
        out = np.zeros(256, np.uint16)
        out[self.of[: len(self.frequencies.of)]] = self.frequencies.of
        return out

    @cached_property
    def starts(self) -> NDArray[np.uint16]:
        """Return the sum of the frequencies before each byte."""
        out = np.zeros(256, np.uint16)
        out[self.of[: len(self.frequencies.of)]] = self.frequencies.starts
        return out

    @cached_property
    def slots(self) -> Bytes:
        """Return the byte of each place below the sum of all frequencies."""
        return np.repeat(self.of[: len(self.frequencies.of)], self.frequencies.of)

    @property
    def arrays(self) -> tuple[int, int]:
        """Return the addresses of `each` and `starts`."""
        return self.each.ctypes.data, self.starts.ctypes.data


def counts_of(numbers: Bytes) -> list[int]:
    """Return how often each byte occurs."""
    run = kernel("rans_counts")
    if run is None:
        parts = (numbers[at : at + PART] for at in range(0, numbers.size, PART))
        found = sum((np.bincount(part, minlength=256) for part in parts), np.zeros(256, np.int64))
    else:
        found = np.empty(256, np.int64)
        run(numbers.ctypes.data, numbers.size, found.ctypes.data)
    counts: list[int] = found.tolist()
    return counts


def write_numbers(parts: Sequence[tuple[Bytes, Model]], lanes: int, free: int = 0) -> bytes:
    """Return the states and words of these parts; each begins at the first lane.

    A lane begins in a state of 17 bits, of which 16 are free. `free` has these bits; it is 0 for more than one lane.
    """
    parts = [(numbers, model) for numbers, model in parts if not model.frequencies.is_certain]
    words = np.empty(1 + sum(numbers.size for numbers, _ in parts), "<u2")  # a kernel writes over one more
    states, at, run = np.full(lanes, LEAST_STATE + free, "<u4"), words.size, kernel("rans_write")
    for numbers, model in reversed(parts):
        if run is None:
            at = _write_numbers(numbers, model, states, words, at)
        else:
            bits, to = model.frequencies.bits, (states.ctypes.data, words.ctypes.data)
            at = run(numbers.ctypes.data, numbers.size, lanes, bits, *model.arrays, *to, at)
    return states.tobytes() + words[at:].tobytes()


def _write_numbers(numbers: Bytes, model: Model, states: NDArray[np.uint32], words: NDArray[np.uint16], at: int) -> int:
    """Write a part from its end on; return the place of the first word written."""
    if states.size <= FEW_LANES:
        return _write_in_few_lanes(numbers, model, states, words, at)
    bits, lanes = np.uint64(model.frequencies.bits), states.size
    each, starts = model.each.astype(np.uint64), model.starts.astype(np.uint64)
    for first in range((numbers.size - 1) // lanes * lanes, -1, -lanes):
        here = numbers[first : first + lanes]
        x, f = states[: here.size].astype(np.uint64), each[here]
        full = x >= f << (np.uint64(32) - bits)
        taken = x[full]
        words[at - taken.size : at] = taken & np.uint64(0xFFFF)
        at -= taken.size
        x[full] = taken >> np.uint64(16)
        states[: here.size] = (x // f << bits) + x % f + starts[here]
    return at


def _write_in_few_lanes(
    numbers: Bytes, model: Model, states: NDArray[np.uint32], words: NDArray[np.uint16], at: int
) -> int:
    each, starts, bits, last = model.each.tolist(), model.starts.tolist(), model.frequencies.bits, at
    xs, found, lane = states.tolist(), list[int](), (numbers.size - 1) % states.size
    for n in reversed(numbers.tobytes()):
        x, f = xs[lane], each[n]
        if x >= f << (32 - bits):
            found.append(x & 0xFFFF)
            x >>= 16
        xs[lane] = (x // f << bits) + x % f + starts[n]
        lane = (lane or len(xs)) - 1
    states[:], at = xs, at - len(found)
    words[at:last] = found[::-1]
    return at


@dataclass
class Words:
    """Reads numbers from the states and words of a stream, behind which bits may follow."""

    data: memoryview
    lanes: int
    states: NDArray[np.uint32] = field(init=False)
    at: int = 0

    def __post_init__(self) -> None:
        if len(self.data) < 4 * self.lanes:
            raise BadPayload(f"{len(self.data)} bytes of a stream", why=f"it has {self.lanes} states")
        self.states = np.frombuffer(self.data[: 4 * self.lanes], "<u4").astype(np.uint32)
        self.data = self.data[4 * self.lanes :]
        if self.states.min() < LEAST_STATE:
            raise BadPayload("a state that rans never has", why=f"it is at least {LEAST_STATE}")

    def read(self, model: Model, out: Bytes) -> None:
        """Fill `out`, which begins at the first lane; raise BadPayload if there are too few words."""
        if model.frequencies.is_certain:
            out[:] = model.slots[0]
            return
        run, words = kernel("rans_read"), len(self.data) // 2
        if run is None:
            self.at = self._read(model, out, words)
        else:
            raw, slots = np.frombuffer(self.data, np.uint8), model.slots.ctypes.data
            by = (self.lanes, model.frequencies.bits, slots, *model.arrays, self.states.ctypes.data)
            self.at = run(raw.ctypes.data, words, self.at, *by, out.size, out.ctypes.data)
        if self.at < 0:
            raise BadPayload("a stream whose words end too early")

    def skip(self, model: Model, count: int) -> None:
        """Read `count` numbers and keep none."""
        for first in range(0, count, PART):
            self.read(model, np.empty(min(PART, count - first), np.uint8))

    def _read(self, model: Model, out: Bytes, count: int) -> int:
        if self.lanes <= FEW_LANES:
            return self._read_few_lanes(model, out, count)
        words, bits, at = np.frombuffer(self.data, "<u2", count), np.uint32(model.frequencies.bits), self.at
        each, starts = model.each.astype(np.uint32), model.starts.astype(np.uint32)
        for first in range(0, out.size, self.lanes):
            here = out[first : first + self.lanes]
            x = self.states[: here.size]
            slot = x & np.uint32((1 << bits) - 1)
            here[:] = model.slots[slot]
            x[:] = each[here] * (x >> bits) + slot - starts[here]
            few = np.flatnonzero(x < LEAST_STATE)
            if at + few.size > count:
                return -1
            x[few] = x[few] << np.uint32(16) | words[at : at + few.size]
            at += few.size
        return at

    def _read_few_lanes(self, model: Model, out: Bytes, count: int) -> int:
        each, starts, of = model.each.tolist(), model.starts.tolist(), model.slots.tobytes()
        words, at, bits = np.frombuffer(self.data, "<u2", count).tolist(), self.at, model.frequencies.bits
        mask = (1 << bits) - 1
        xs, lane, found = self.states.tolist(), 0, bytearray()
        for _ in range(out.size):
            x = xs[lane]
            slot = x & mask
            n = of[slot]
            x = each[n] * (x >> bits) + slot - starts[n]
            if x < LEAST_STATE:
                if at >= count:
                    return -1
                x = x << 16 | words[at]
                at += 1
            xs[lane] = x
            found.append(n)
            lane = (lane + 1) % len(xs)
        self.states[:], out[:] = xs, np.frombuffer(found, np.uint8)
        return at

    @property
    def free(self) -> int:
        """Return the 16 free bits of a single lane in its first state; all numbers are read."""
        return int(self.states[0]) % LEAST_STATE if self.lanes == 1 else 0

    def finish(self, rest: int = 0, free: int = 0) -> None:
        """Raise BadPayload unless the words end where `rest` bytes begin, and the lanes are where an encoder begins."""
        if len(self.data) != 2 * self.at + rest:
            raise BadPayload("a stream that is not as long as its numbers")
        if (self.states != LEAST_STATE + free).any():
            raise BadPayload("a stream that does not end in the state in which an encoder begins")
