"""How the lane puts JSON and parts into one body: blocks of a 4-byte little-endian length and that many bytes.

hello: [JSON]. pull: [JSON] up; [control JSON] [ask, maybe empty] parts.. down. push: [head] parts.. up.
"""

from __future__ import annotations

import struct

from thinwire.core.messages import MAX_HEAD_BYTES

LENGTH = struct.Struct("<I")
HELLO, PULL, PUSH = "/tw/v1/hello", "/tw/v1/pull", "/tw/v1/push"
MAX_HELLO_BYTES = 256 * 2**10
MAX_PULL_BYTES = 256 * 2**10
MAX_PUSH_HEAD_BYTES = MAX_HEAD_BYTES
STREAM_BYTES = 2**20  # read, hashed and written at once


def block(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data
