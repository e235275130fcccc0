"""Integer codes: varints of gaps between sorted indices (`delta`), and Rice codes of gaps and symbols (`rice`).

A Rice code writes small numbers in few bits (Rice 1979; Golomb 1966 with powers of two). A `rice` stream has three
regions: one parameter byte for each 4096 numbers; all quotients in unary, as that many 0 bits and a 1; all remainders
in as many bits as their block's parameter. Each region begins on a byte, with the lowest bits first. Quotients separate
from remainders can be read without a branch for each number. A block of symbols that would not become shorter has the
parameter `RAW`, no quotients, and its symbols as `pack` writes them.
"""

from __future__ import annotations

from math import log2
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import Coder, Indices, Symbols
from thinwire.compression.native import address, kernel
from thinwire.core.errors import BadPayload

VARINT = 10  # the most bytes of a 64-bit varint, as the kernel writes them
GAP_BYTES = 4  # a segment has at most 2^24 values: no gap needs more


class Delta(Coder):
    """Sends the gaps between indices, less one, as varints: one byte for a gap of up to 128; always present.

    LEB128, in its shortest form only. Indices that do not rise strictly have no encoding.
    """

    examples: ClassVar[tuple[str, ...]] = ("topk(0.1) > delta",)
    spec: ClassVar[str] = "delta"

    def pack(self, array: Indices) -> bytes:
        """Return the varints of strictly rising indices."""
        run = kernel("delta_write")
        if run is not None:
            done = np.empty(VARINT * array.size, np.uint8)
            return done[: run(address(array), array.size, done.ctypes.data)].tobytes()
        gaps = np.diff(array, prepend=-1) - 1
        lengths = np.ones(gaps.size, np.int64)
        for more in range(1, GAP_BYTES):
            lengths += gaps >= 1 << 7 * more
        ends = np.cumsum(lengths)
        out = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
        starts = ends - lengths
        for byte in range(int(lengths.max(initial=0))):
            here = lengths > byte
            follows = (lengths[here] > byte + 1).astype(np.uint8) << 7
            out[starts[here] + byte] = ((gaps[here] >> 7 * byte) & 0x7F).astype(np.uint8) | follows
        return out.tobytes()

    def unpack(self, data: bytes | memoryview, items: int, size: int) -> Indices:
        """Return `items` strictly rising indices under `size`; raise BadPayload if the data holds anything else."""
        raw = np.frombuffer(data, np.uint8)
        if not items <= raw.size <= self.max_bytes(items, size):
            raise BadPayload(f"{raw.size} bytes of indices", why=f"{items} were expected")
        done = _read_by_kernel("delta_read", data, items, size, np.empty(items, np.int64))
        if done is not None:
            return done
        ends = np.flatnonzero(raw < 0x80)
        if ends.size != items or (items and ends[-1] != raw.size - 1):
            raise BadPayload(f"{ends.size} indices in {raw.size} bytes", why=f"{items} were expected")
        starts = np.concatenate([[0], ends[:-1] + 1]) if items else ends
        lengths = ends - starts + 1
        if items and (lengths.max() > GAP_BYTES or np.any(raw[ends[lengths > 1]] == 0)):
            raise BadPayload("a gap that is not readable", why="a varint too long, or not in its shortest form")
        gaps = np.zeros(items, np.int64)
        for byte in range(int(lengths.max(initial=0))):
            here = lengths > byte
            gaps[here] |= (raw[starts[here] + byte] & 0x7F).astype(np.int64) << 7 * byte
        indices = np.cumsum(gaps + 1) - 1
        if items and indices[-1] >= size:
            raise BadPayload(f"index {int(indices[-1])} of a vector of {size}")
        return indices

    def max_bytes(self, items: int, size: int) -> int:
        """Return the most bytes of `items` indices under `size`.

        A second byte needs a gap of 2^7, a third one a gap of 2^14.
        """
        return items + sum(min(items, size >> 7 * more) for more in range(1, GAP_BYTES))


BLOCK = 4096  # numbers that share a parameter
MAX_PARAMETER = 24  # of Rice codes: a gap is under 2^24
RAW = 255
RICE_BITS = 26  # the most bits of a number that has no raw form

T = TypeVar("T", np.int64, np.int8)
Numbers = NDArray[np.int64]
Bits = NDArray[np.uint8]  # one bit an element


class Rice(Coder):
    """Writes gaps between indices as Rice codes, and symbols where that is shorter.

    Rice and Plaunt (1971). The gaps of a share of 1 % take 8.12 bits each, 0.5 % more than their entropy. Symbols never
    take more than packed, except for a byte a block; they need an entropy coder, which this is not.

    Invariant: random indices take at most 2 % + 8 bytes more than their entropy for shares of up to 5 %, and at most
    4.5 % for any share: most at 38 %, between two parameters.
    """

    examples: ClassVar[tuple[str, ...]] = ("topk(0.1) > rice", "topk(0.3) > int8 > rice")
    paper: ClassVar[str] = "Rice and Plaunt 1971"
    spec: ClassVar[str] = "rice"

    def pack_indices(self, indices: Indices) -> bytes:
        """Return the codes of the gaps between strictly rising indices, less one."""
        done = _rice_by_kernel("rice_write_places", np.ascontiguousarray(indices, np.int64), RICE_BITS)
        return _written(np.diff(indices, prepend=-1) - 1, 0) if done is None else done

    def unpack_indices(self, data: bytes | memoryview, items: int, size: int) -> Indices:
        """Return `items` strictly rising indices under `size`; raise BadPayload if the data holds anything else."""
        _require_room(data, items)
        done = _read_by_kernel("rice_read_places", data, items, size, np.empty(items, np.int64))
        if done is not None:
            return done
        gaps = _read(data, items, 0, size)
        indices: Indices = np.cumsum(gaps + 1) - 1
        if items and indices[-1] >= size:
            raise BadPayload(f"index {int(indices[-1])} of a vector of {size}")
        return indices

    def pack_symbols(self, symbols: Symbols, bits: int) -> bytes:
        """Return the codes of signed symbols: 0, -1, 1, -2, .. have the numbers 0, 1, 2, 3, .. (zigzag)."""
        done = _rice_by_kernel("rice_write_symbols", np.ascontiguousarray(symbols, np.int8), bits, bits)
        if done is not None:
            return done
        wide = symbols.astype(np.int64)
        return _written((wide << 1) ^ (wide >> 63), bits)

    def unpack_symbols(self, data: bytes | memoryview, items: int, bits: int) -> Symbols:
        """Return `items` signed symbols of `bits` bits; raise BadPayload if the data holds anything else."""
        _require_room(data, items)
        done = _read_by_kernel("rice_read_symbols", data, items, bits, np.empty(items, np.int8))
        if done is not None:
            return done
        numbers = _read(data, items, bits, 1 << bits)
        return ((numbers >> 1) ^ -(numbers & 1)).astype(np.int8)

    def max_index_bytes(self, items: int, size: int) -> int:
        """Return the most bytes of `items` indices under `size`.

        A gap of mean m takes at most 3 + log2(1 + m) bits, and so does the mean of many.
        """
        return -(-items // BLOCK) + int(items * (3 + log2(1 + size / max(1, items)))) // 8 + 3

    def max_symbol_bytes(self, items: int, bits: int) -> int:
        """Return the most bytes of `items` symbols of `bits` bits."""
        return -(-items // BLOCK) + -(-items * bits // 8) + 1


def _read_by_kernel(name: str, data: bytes | memoryview, items: int, limit: int, out: NDArray[T]) -> NDArray[T] | None:
    """Return `out`, filled by a kernel; None if numpy is the path.

    A stream that a kernel cannot read gives None too: numpy then reads it again and raises the error with the reason.
    """
    run = kernel(name)
    if run is None or not items:
        return None
    raw = np.frombuffer(data, np.uint8)
    return out if run(raw.ctypes.data, raw.size, items, limit, out.ctypes.data) else None


def _rice_by_kernel(name: str, items: NDArray[Any], most: int, *raw: int) -> bytes | None:
    """Return the Rice codes of `items`, each of at most `most` bits, or None if numpy has to write them."""
    run = kernel(name)
    if run is None:
        return None
    parameters, sizes = np.empty(-(-items.size // BLOCK), np.uint8), np.empty(2, np.int64)
    room = most * items.size // 8 + 1
    unary, low = np.zeros(room, np.uint8), np.empty(room, np.uint8)
    buffers = (one.ctypes.data for one in (parameters, unary, low, sizes))
    if not run(items.ctypes.data, items.size, *raw, room, *buffers):
        return None  # too long for sorted indices: the kernel stopped at the end of its buffers
    return b"".join([parameters.data, unary[: sizes[0]].data, low[: sizes[1]].data])


def _require_room(data: bytes | memoryview, items: int) -> None:
    """Raise BadPayload, before any allocation, if the data is too short for `items` numbers.

    Each takes at least a bit, and each block a parameter.
    """
    least = -(-items // BLOCK) + -(-items // 8)
    if len(data) < least:
        raise BadPayload(f"a stream of {len(data)} bytes", why=f"{items} numbers take {least} at least")


def _written(numbers: Numbers, raw: int) -> bytes:
    """Return the stream of these numbers.

    `raw` is the number of bits of each number without a code; 0 for gaps, which are always coded.
    """
    parameters, quotients, remainders = bytearray(), list[Bits](), list[Bits]()
    for start in range(0, numbers.size, BLOCK):
        block = numbers[start : start + BLOCK]
        parameter, length = best(block)
        if raw and length >= raw * block.size:
            parameters.append(RAW)
            remainders.append(_bits(block, raw))
            continue
        parameters.append(parameter)
        ends = np.cumsum((block >> parameter) + 1)
        unary = np.zeros(int(ends[-1]), np.uint8)
        unary[ends - 1] = 1
        quotients.append(unary)
        remainders.append(_bits(block, parameter))
    return bytes(parameters) + _packed(quotients) + _packed(remainders)


def best(block: Numbers) -> tuple[int, int]:
    """Return (parameter, bits) of the shortest code, the smallest parameter of equal ones.

    It tries the parameters near the number of bits of the mean.

    >>> best(np.array([90, 110, 100]))
    (6, 24)
    """
    near = min(int(block.sum() // block.size).bit_length(), MAX_PARAMETER)
    tried = [
        (int((block >> k).sum()) + block.size * (k + 1), k)
        for k in range(max(0, near - 2), min(near + 1, MAX_PARAMETER) + 1)
    ]
    length, parameter = min(tried)
    return parameter, length


def _read(data: bytes | memoryview, items: int, raw: int, limit: int) -> Numbers:
    """Return `items` numbers under `limit`, or raise BadPayload."""
    view = np.frombuffer(data, np.uint8)
    count = -(-items // BLOCK)
    parameters = view[:count].astype(np.int64)
    coded = parameters != RAW
    if (parameters[coded] > MAX_PARAMETER).any() or not (raw or coded.all()):
        raise BadPayload("a parameter that rice never has")
    sizes = np.full(count, BLOCK)
    sizes[-1:] = items - BLOCK * (count - 1)
    widths = np.where(coded, parameters, raw)
    low_bytes = -(-int((sizes * widths).sum()) // 8)
    unary_bytes = view.size - count - low_bytes
    if unary_bytes < 0:
        raise BadPayload(f"a stream of {view.size} bytes", why="its remainders alone are longer")
    quotients = _quotients(view[count : count + unary_bytes], int(sizes[coded].sum()), limit)
    low = np.unpackbits(view[count + unary_bytes :], bitorder="little")
    out: Numbers = np.zeros(items, np.int64)
    at = of_quotients = 0
    for block, (size, width) in enumerate(zip(sizes.tolist(), widths.tolist(), strict=True)):
        here = out[block * BLOCK : block * BLOCK + size]
        if width:
            here += low[at : at + size * width].reshape(size, width) @ (1 << np.arange(width))
        if coded[block]:
            here += quotients[of_quotients : of_quotients + size] << width
            of_quotients += size
        at += size * width
    if low[at:].any():
        raise BadPayload("bits behind the last number", why="they are 0 in what an encoder makes")
    if items and out.max() >= limit:
        raise BadPayload(f"the number {int(out.max())}", why=f"all are under {limit}")
    return out


def _quotients(unary: Bits, items: int, limit: int) -> Numbers:
    bits = np.unpackbits(unary, bitorder="little")
    ends = np.flatnonzero(bits)
    if ends.size != items or (items and bits.size - ends[-1] > 8) or (not items and bits.size):
        raise BadPayload(f"{ends.size} quotients in {unary.size} bytes", why=f"{items} were expected")
    quotients: Numbers = np.diff(ends, prepend=-1) - 1
    if items and quotients.max() >= limit:
        raise BadPayload(f"a quotient of {int(quotients.max())}", why=f"all are under {limit}")
    return quotients


def _bits(numbers: Numbers, width: int) -> Bits:
    """Return the `width` lowest bits of each number, lowest first."""
    return ((numbers[:, None] >> np.arange(width)) & 1).astype(np.uint8).reshape(-1)


def _packed(pieces: list[Bits]) -> bytes:
    return np.packbits(np.concatenate(pieces), bitorder="little").tobytes() if pieces else b""
