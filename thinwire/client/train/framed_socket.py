"""The socket between a client and its worker process: JSON headers, float32 vectors and named arrays.

    4 bytes, little-endian: the header's length | the header | the bytes of each of header["vectors"], counts of float32
    | the bytes of each of header["arrays"], [name, dtype, shape], where the header has that key

Invariant: no allocation depends on what the other process claims. A header has at most `MAX_HEADER` bytes. The reader
works out the sizes of the vectors from the model's tensors, and gives the arrays a bound. Nothing is pickled, so
neither process can make the other execute code.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .protocol import Arrays, Vector


MAX_HEADER = 16 << 20  # a model of some hundred thousand tensors
LENGTH = struct.Struct("<I")


class BadFrame(Exception):
    """Raised for a frame that breaks the framing; the process that sent it is then of no use."""


class FramedSocket:
    """Is one end of the socket between client and worker. One thread uses each end.

    Every method raises `EOFError` if the other process has closed its end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, header: Mapping[str, Any], *vectors: Vector, arrays: Arrays | None = None) -> None:
        """Send a header with its vectors and, if there are any, named arrays as `state.copied` makes them."""
        header = {**header, "vectors": [v.size for v in vectors]}
        if arrays is not None:
            from .state import described

            header["arrays"] = described(arrays)
        data = json.dumps(header, separators=(",", ":")).encode()
        if len(data) > MAX_HEADER:
            raise BadFrame(f"a header of {len(data)} bytes")
        try:
            self.sock.sendall(LENGTH.pack(len(data)) + data)
            for vector in vectors:
                self.sock.sendall(vector.astype("<f4", "C", copy=False).data.cast("B"))
            for array in (arrays or {}).values():
                self.sock.sendall(array.tobytes())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError from error

    def header(self) -> dict[str, Any]:
        """Receive the next header; the caller must receive its vectors and arrays before the next call."""
        (length,) = LENGTH.unpack(self._exactly(bytearray(LENGTH.size)))
        if length > MAX_HEADER:
            raise BadFrame(f"a header of {length} bytes")
        try:
            found = json.loads(bytes(self._exactly(bytearray(length))))
        except (ValueError, RecursionError) as error:
            raise BadFrame("a header that is no JSON") from error
        if not isinstance(found, dict) or not isinstance(found.get("vectors"), list):
            raise BadFrame("a header that is no object with a list of vectors")
        return found

    def vectors(self, header: Mapping[str, Any], sizes: Sequence[int]) -> list[Vector]:
        """Receive the header's vectors, which must have these sizes; raise `BadFrame` before allocating anything."""
        if header["vectors"] != list(sizes):
            raise BadFrame(f"vectors of {str(header['vectors'])[:80]} floats instead of {list(sizes)}")
        import numpy as np  # not earlier: a Python without numpy must be able to report that

        found = []
        for size in sizes:
            vector: Vector = np.empty(size, np.float32)
            if size:
                self._exactly(vector.data.cast("B"))
            found.append(vector)
        return found

    def arrays(self, header: Mapping[str, Any], max_bytes: int) -> dict[str, NDArray[Any]] | None:
        """Receive the header's arrays, None if it has none.

        Raises `BadFrame` before anything is allocated for a description that is not valid, or of over `max_bytes`.
        """
        if "arrays" not in header:
            return None
        from .state import allocated  # with numpy, as above

        try:
            found = allocated(header["arrays"], max_bytes)
        except (ValueError, TypeError) as error:
            raise BadFrame("a description of arrays that is not valid") from error
        for array in found.values():
            if array.nbytes:
                self._exactly(array.reshape(-1).view("u1").data)
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
