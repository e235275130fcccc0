"""Zstandard (`zstd`), a compressor of bytes for the end of a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import zstandard

from thinwire.compression.base import Compressor
from thinwire.core.errors import BadPayload

ZSTD_FROM = 64  # bytes: below this, zstd's header costs more than it saves
ZSTD_LEVEL = 3


@dataclass(frozen=True)
class Zstd(Compressor):
    """Compresses each stream with Zstandard (RFC 8878) if that makes it shorter; the last stage of a chain."""

    examples: ClassVar[tuple[str, ...]] = ("identity > zstd", "topk(0.1) > int8 > zstd")
    paper: ClassVar[str] = "RFC 8878"
    spec: ClassVar[str] = "zstd"

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
