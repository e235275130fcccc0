"""delta: gaps of sorted indices as varints."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from thinwire.aggregation.codec import Indices, Role
from thinwire.aggregation.native import gaps as native
from thinwire.core.errors import BadPayload

GAP_BYTES = 4  # a segment has at most 2^24 values: no gap takes more


class Delta:
    """Sends the gaps between places, less one, as varints: one byte for a gap of up to 128 (always there).

    What does not rise, or stands twice, cannot be said. LEB128, in its shortest form only.
    """

    role: ClassVar[Role] = "coder"
    examples: ClassVar[tuple[str, ...]] = ("topk(0.1) > delta",)
    spec: ClassVar[str] = "delta"

    @classmethod
    def read(cls, argument: str | None) -> Delta:
        del argument
        return cls()

    def pack(self, array: Indices) -> bytes:
        done = native.delta_write(array)
        if done is not None:
            return done
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
        """`items` strictly rising indices under `size`."""
        raw = np.frombuffer(data, np.uint8)
        if not items <= raw.size <= self.max_bytes(items, size):
            raise BadPayload(f"{raw.size} bytes of indices", why=f"{items} were expected")
        done = native.delta_read(data, items, size)
        if done is not None:
            return done
        ends = np.flatnonzero(raw < 0x80)
        if ends.size != items or (items and ends[-1] != raw.size - 1):
            raise BadPayload(f"{ends.size} indices in {raw.size} bytes", why=f"{items} were expected")
        starts = np.concatenate([[0], ends[:-1] + 1]) if items else ends
        lengths = ends - starts + 1
        if items and (lengths.max() > GAP_BYTES or np.any(raw[ends[lengths > 1]] == 0)):
            raise BadPayload("a gap that cannot be read", why="a varint too long, or not in its shortest form")
        gaps = np.zeros(items, np.int64)
        for byte in range(int(lengths.max(initial=0))):
            here = lengths > byte
            gaps[here] |= (raw[starts[here] + byte] & 0x7F).astype(np.int64) << 7 * byte
        indices = np.cumsum(gaps + 1) - 1
        if items and indices[-1] >= size:
            raise BadPayload(f"index {int(indices[-1])} of a vector of {size}")
        return indices

    def max_bytes(self, items: int, size: int) -> int:
        """Of so many indices under `size`: a second byte needs a gap of 2^7, a third one of 2^14."""
        return items + sum(min(items, size >> 7 * more) for more in range(1, GAP_BYTES))
