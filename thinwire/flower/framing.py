"""How the lane puts JSON and parts into one body: blocks of a 4-byte little-endian length and that many bytes.

hello, join: [JSON]. pull: [JSON] up; [control JSON] [ask, maybe empty] parts.. down. push: [head] parts.. up. Parts of
more than `INLINE_BYTES` together travel apart, where a cut can be gone on from (flower/bundle.py, flower/uploads.py).
"""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")
INLINE_BYTES = 256 * 2**10
STREAM_BYTES = 2**20  # read, hashed and written at once


def block(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def unblock(data: bytes) -> tuple[bytes, memoryview]:
    """The first block, and what follows it; ValueError where it is cut short."""
    if len(data) < LENGTH.size:
        raise ValueError("a body without a block")
    (length,) = LENGTH.unpack_from(data)
    if LENGTH.size + length > len(data):
        raise ValueError("a block is longer than its body")
    return data[LENGTH.size : LENGTH.size + length], memoryview(data)[LENGTH.size + length :]
