"""What stands last in a chain: a compressor of bytes, ours (`zstd`) or another package's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import zstandard

from thinwire.compression.base import Role, Step
from thinwire.compression.frame import Stream
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


# zstd: a general compressor, where it makes a stream shorter.


ZSTD_FROM = 64  # bytes: below this its own head costs more than it saves
ZSTD_LEVEL = 3


@dataclass(frozen=True)
class Zstd(Compressor):
    """Compresses each stream with Zstandard where that makes it shorter; stands last (RFC 8878)."""

    examples: ClassVar[tuple[str, ...]] = ("identity > zstd", "topk(0.1) > int8 > zstd")
    spec: ClassVar[str] = "zstd"

    @classmethod
    def read(cls, argument: str | None) -> Zstd:
        del argument
        return cls()

    def compress(self, data: bytes | memoryview) -> bytes:
        if len(data) < ZSTD_FROM:
            return bytes(data)
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)

    def decompress(self, data: bytes | memoryview, most: int) -> bytes:
        """The size that the stream claims is checked before memory is taken."""
        try:
            size = zstandard.frame_content_size(data)
            if not 0 < size <= most:
                raise BadPayload(f"a compressed stream of {size} bytes", why=f"at most {most} can be right")
            grown = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadPayload("a stream that zstd cannot read", why=str(error)) from error
        if len(grown) != size:
            raise BadPayload("a compressed stream that is not as long as it says")
        return grown
