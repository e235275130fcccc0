"""How the two processes speak over their socket: a JSON head behind its length, then vectors of float32 as they are.

    4 bytes, little-endian: the head's length | the head | the bytes of each of head["vectors"], counts of float32

Law: nothing is allocated by what the other side says. A head has at most `MOST_HEAD` bytes, and vectors have the counts
that the reader works out from the model's tensors. Nothing is pickled: neither side can make the other run anything.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .order import Vector

MOST_HEAD = 16 << 20  # a model of some hundred thousand tensors
LENGTH = struct.Struct("<I")


class BadFrame(Exception):
    """What came is not what it must be; the other process is of no use any more."""


class Wire:
    """One end. Each side is used by one thread; `EOFError` when the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, head: Mapping[str, Any], *vectors: Vector) -> None:
        data = json.dumps({**head, "vectors": [v.size for v in vectors]}, separators=(",", ":")).encode()
        if len(data) > MOST_HEAD:
            raise BadFrame(f"a head of {len(data)} bytes")
        try:
            self.sock.sendall(LENGTH.pack(len(data)) + data)
            for vector in vectors:
                self.sock.sendall(vector.astype("<f4", "C", copy=False).data.cast("B"))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def head(self) -> dict[str, Any]:
        """The next head; its vectors must be taken before the next one."""
        (length,) = LENGTH.unpack(self._exactly(bytearray(LENGTH.size)))
        if length > MOST_HEAD:
            raise BadFrame(f"a head of {length} bytes")
        try:
            found = json.loads(bytes(self._exactly(bytearray(length))))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a head that is no JSON") from error
        if not isinstance(found, dict) or not isinstance(found.get("vectors"), list):
            raise BadFrame("a head that is none")
        return found

    def vectors(self, head: Mapping[str, Any], sizes: Sequence[int]) -> list[Vector]:
        """The head's vectors, when they have these sizes; `BadFrame` before anything is allocated."""
        if head["vectors"] != list(sizes):
            raise BadFrame(f"vectors of {str(head['vectors'])[:80]} floats instead of {list(sizes)}")
        import numpy as np  # not before: a Python without it must be able to say so

        found = []
        for size in sizes:
            vector: Vector = np.empty(size, np.float32)
            if size:
                self._exactly(vector.data.cast("B"))
            found.append(vector)
        return found

    def _exactly(self, into: bytearray | memoryview) -> bytearray | memoryview:
        view, at = memoryview(into), 0
        while at < len(view):
            try:
                count = self.sock.recv_into(view[at:])
            except ConnectionResetError as error:
                raise EOFError from error
            if not count:
                raise EOFError
            at += count
        return into
