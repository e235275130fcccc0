"""What stands last in a chain: a compressor of bytes, ours (`zstd`) or another package's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from thinwire.aggregation.codec import Role, Step
from thinwire.aggregation.frame import Stream
from thinwire.core.errors import BadPayload


@runtime_checkable
class Last(Step, Protocol):
    """Works on each stream of a frame by itself, after all other coders.

    Law: grow(shrink(data), len(data)) == data; `grow` never gives, nor takes memory for, more than `most` bytes.
    """

    def shrink(self, data: bytes | memoryview) -> Stream: ...  # as it is, where that is shorter
    def grow(self, stream: Stream, most: int) -> bytes | memoryview: ...  # BadPayload


class Compressor(ABC):
    """A base: a compressor says `compress` and `decompress`, and is a frozen dataclass.

    What does not become shorter is sent as it is. `decompress` may stop at `most` bytes and has to end by itself: it
    raises ValueError for what it cannot read, and must not take more memory than it was allowed for bytes that claim
    to be more.
    """

    role: ClassVar[Role] = "coder"

    @abstractmethod
    def compress(self, data: bytes | memoryview) -> bytes: ...

    @abstractmethod
    def decompress(self, data: bytes | memoryview, most: int) -> bytes: ...

    def shrink(self, data: bytes | memoryview) -> Stream:
        packed = self.compress(data) if len(data) else b""
        return Stream(packed, True) if 0 < len(packed) < len(data) else Stream(data)

    def grow(self, stream: Stream, most: int) -> bytes | memoryview:
        if not stream.compressed:
            return stream.data
        try:
            grown = self.decompress(stream.data, most)
        except BadPayload:
            raise
        except Exception as error:  # whatever another package raises for bytes of a stranger
            raise BadPayload("a stream that cannot be read", why=type(error).__name__) from error
        if len(grown) > most:
            raise BadPayload(f"a compressed stream of {len(grown)} bytes", why=f"at most {most} can be right")
        return grown
