"""Fewer bytes without loss: packed symbols, gaps of sorted indices as varints, zstd where it helps.

Each coder decodes into a size that is known beforehand, so a hostile stream cannot make it allocate more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from thinwire.aggregation.codec import Indices
from thinwire.aggregation.frame import Stream
from thinwire.core.errors import BadPayload

ZSTD_FROM = 64  # bytes: below this its own head costs more than it saves
ZSTD_LEVEL = 3


class Pack:
    """Symbols as little-endian bytes, one after the other."""

    def pack(self, array: np.ndarray[Any, Any]) -> bytes:
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

    def unpack(self, data: bytes | memoryview, items: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if len(data) != items * dtype.itemsize:
            raise BadPayload(f"a stream of {len(data)} bytes", why=f"{items} items take {items * dtype.itemsize}")
        return np.frombuffer(data, dtype.newbyteorder("<"))


class Delta:
    """Sorted indices as LEB128 varints of (gap - 1): one byte where gaps are under 129."""

    def pack(self, indices: Indices) -> bytes:
        gaps = np.diff(indices, prepend=-1) - 1
        lengths = np.ones(gaps.size, np.int64)
        for shift in (7, 14, 21, 28):
            lengths += gaps >= 1 << shift
        ends = np.cumsum(lengths)
        out = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
        starts = ends - lengths
        for byte in range(int(lengths.max(initial=0))):
            here = lengths > byte
            more = (lengths[here] > byte + 1).astype(np.uint8) << 7
            out[starts[here] + byte] = ((gaps[here] >> 7 * byte) & 0x7F).astype(np.uint8) | more
        return out.tobytes()

    def unpack(self, data: bytes | memoryview, items: int, size: int) -> Indices:
        """`items` strictly rising indices under `size`."""
        raw = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(raw < 0x80)
        if not items <= raw.size <= 5 * items or ends.size != items or (items and ends[-1] != raw.size - 1):
            raise BadPayload(f"{ends.size} indices in {raw.size} bytes", why=f"{items} were expected")
        starts = np.concatenate([[0], ends[:-1] + 1]) if items else ends
        lengths = ends - starts + 1
        if items and lengths.max() > 5:
            raise BadPayload("an index of more than 5 bytes")
        gaps = np.zeros(items, np.int64)
        for byte in range(int(lengths.max(initial=0))):
            here = lengths > byte
            gaps[here] |= (raw[starts[here] + byte] & 0x7F).astype(np.int64) << 7 * byte
        indices = np.cumsum(gaps + 1) - 1
        if items and (gaps.max() >= size or indices[-1] >= size):
            raise BadPayload(f"index {int(indices[-1])} of a vector of {size}")
        return indices

    def max_bytes(self, items: int) -> int:
        return 5 * items


class Zstd:
    """Zstandard (RFC 8878) over a whole stream, kept only where it is shorter."""

    def shrink(self, data: bytes) -> Stream:
        if len(data) < ZSTD_FROM:
            return Stream(data)
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)
        return Stream(packed, True) if len(packed) < len(data) else Stream(data)

    def grow(self, stream: Stream, most: int) -> bytes | memoryview:
        """The stream's bytes, at most `most`: the size that it claims is checked before memory is taken."""
        if not stream.compressed:
            return stream.data
        try:
            size = zstandard.frame_content_size(stream.data)
            if not 0 <= size <= most:
                raise BadPayload(f"a compressed stream of {size} bytes", why=f"at most {most} can be right")
            grown = zstandard.ZstdDecompressor().decompress(stream.data, max_output_size=max(size, 1))
        except zstandard.ZstdError as error:
            raise BadPayload("a stream that zstd cannot read", why=str(error)) from error
        if len(grown) != size:
            raise BadPayload("a compressed stream that is not as long as it says")
        return grown
