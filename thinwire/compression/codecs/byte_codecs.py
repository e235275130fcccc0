"""Compressors of bytes for the end of a chain: Zstandard (`zstd`), and the base class of other compressors."""

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
    """The last coder of a chain, which works on each stream of a frame separately, after all other coders.

    Invariant: grow(shrink(data), len(data)) == data; `grow` never returns, nor allocates, more than `most` bytes.
    """

    def shrink(self, data: bytes | memoryview) -> Stream:
        """Return the compressed stream, or the data as it is if that is shorter."""

    def grow(self, stream: Stream, most: int) -> bytes | memoryview:
        """Return the decompressed bytes; raise BadPayload if they are invalid or more than `most`."""


class Compressor(ABC):
    """A base class for compressors: a subclass is a frozen dataclass with `compress` and `decompress`.

    A stream that does not become shorter is sent as it is.
    """

    role: ClassVar[Role] = "coder"

    @abstractmethod
    def compress(self, data: bytes | memoryview) -> bytes:
        """Return the compressed bytes."""

    @abstractmethod
    def decompress(self, data: bytes | memoryview, most: int) -> bytes:
        """Return the decompressed bytes; raise ValueError for invalid data.

        It may stop at `most` bytes. It must always end, and must not allocate more than `most` bytes for data that
        claims to be larger.
        """

    def shrink(self, data: bytes | memoryview) -> Stream:
        """Return the compressed stream, or the data as it is if that is shorter."""
        packed = self.compress(data) if len(data) else b""
        return Stream(packed, True) if 0 < len(packed) < len(data) else Stream(data)

    def grow(self, stream: Stream, most: int) -> bytes | memoryview:
        """Return the decompressed bytes; raise BadPayload if they are invalid or more than `most`."""
        if not stream.compressed:
            return stream.data
        try:
            grown = self.decompress(stream.data, most)
        except BadPayload:
            raise
        except Exception as error:  # another package's code may raise anything for untrusted bytes
            raise BadPayload("a stream that cannot be read", why=type(error).__name__) from error
        if len(grown) > most:
            raise BadPayload(f"a compressed stream of {len(grown)} bytes", why=f"at most {most} can be right")
        return grown


ZSTD_FROM = 64  # bytes: below this, zstd's header costs more than it saves
ZSTD_LEVEL = 3


@dataclass(frozen=True)
class Zstd(Compressor):
    """Compresses each stream with Zstandard (RFC 8878) if that makes it shorter; the last stage of a chain."""

    examples: ClassVar[tuple[str, ...]] = ("identity > zstd", "topk(0.1) > int8 > zstd")
    spec: ClassVar[str] = "zstd"

    @classmethod
    def read(cls, argument: str | None) -> Zstd:
        """Make the coder; it has no argument."""
        del argument
        return cls()

    def compress(self, data: bytes | memoryview) -> bytes:
        """Return the compressed bytes, or the data as it is below 64 bytes."""
        if len(data) < ZSTD_FROM:
            return bytes(data)
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)

    def decompress(self, data: bytes | memoryview, most: int) -> bytes:
        """Return the decompressed bytes; the size that the data claims is checked before any allocation."""
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
