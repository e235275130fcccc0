"""zstd: a general compressor, where it makes a stream shorter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import zstandard

from thinwire.aggregation.coders.compressor import Compressor
from thinwire.core.errors import BadPayload

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
