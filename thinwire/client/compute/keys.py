"""Public randomness as in `core/keys.py`, for an interpreter that has no `core`; a test holds the two together."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple


class Key(NamedTuple):
    """128 bits as two unsigned 64-bit words."""

    a: int
    b: int = 0


def derive(key: Key, *labels: str | int) -> Key:
    """A key for one purpose; different labels give independent keys."""
    digest = hashlib.blake2s(struct.pack("<QQ", key.a, key.b), digest_size=16, person=b"tw-drv-1")
    for label in labels:
        kind, raw = (b"i", str(label).encode()) if isinstance(label, int) else (b"s", label.encode())
        digest.update(kind + struct.pack("<I", len(raw)) + raw)
    return Key(*struct.unpack("<QQ", digest.digest()))


def seed63(key: Key) -> int:
    """A seed for a library's generator (torch, random): 63 bits."""
    raw = hashlib.blake2s(struct.pack("<QQ", key.a, key.b), digest_size=8).digest()
    return int(struct.unpack("<Q", raw)[0]) >> 1
