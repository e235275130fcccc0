"""This module draws counter-based public random numbers: a key decides them, not the state of a generator.

Invariant: the same key gives the same numbers on every machine, in any order, on any number of threads. A draw for a
value depends on the value's index and a word of the key, not on earlier draws. A secret never comes from a `Key`: it
comes from a `SecretRng`, which is not made from a seed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thinwire.core.types import Vector

MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Key:
    """Holds 128 bits of public randomness as two unsigned 64-bit words.

    >>> Key(1) == Key(1, 0)
    True
    """

    a: int
    b: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.a <= MASK64 and 0 <= self.b <= MASK64):
            raise ValueError(f"a Key's words are unsigned 64-bit integers, not {self.a}, {self.b}")

    def to_bytes(self) -> bytes:
        """Return sixteen bytes, little-endian, `a` before `b`."""
        return struct.pack("<QQ", self.a, self.b)


def derive(key: Key, *labels: str | int) -> Key:
    """Return a key for one purpose: BLAKE2s over the key and length-prefixed labels.

    Invariant: different labels give independent keys.

    >>> derive(Key(1), "round", 2) == derive(Key(1), "round", 2)
    True
    >>> derive(Key(1), "ab", "c") == derive(Key(1), "a", "bc")
    False
    """
    digest = hashlib.blake2s(key.to_bytes(), digest_size=16, person=b"tw-drv-1")
    for label in labels:
        kind, raw = (b"i", str(label).encode()) if isinstance(label, int) else (b"s", label.encode())
        digest.update(kind + struct.pack("<I", len(raw)) + raw)
    return Key(*struct.unpack("<QQ", digest.digest()))


def word32(key: Key, stage: str, segment: int) -> int:
    """Return the 32 bits that a stage of a codec mixes into each index: BLAKE2s(key, stage, segment)."""
    raw = key.to_bytes() + struct.pack("<I", segment) + stage.encode()
    return int(struct.unpack("<I", hashlib.blake2s(raw, digest_size=4, person=b"tw-w32-1").digest())[0])


def second_word(word: int) -> int:
    """Return a word for a second draw at the same indices: `uniform` and `signs` hash index ^ word to the same bits.

    Without it, stochastic rounding behind a rotation would round by the bits that chose the signs.

    >>> second_word(1) != 1
    True
    """
    return int(lowbias32(np.array([word ^ 0x9E3779B9], np.uint32))[0])


def seed63(key: Key) -> int:
    """Return a seed of 63 bits for a library's generator (torch, random)."""
    return int(struct.unpack("<Q", hashlib.blake2s(key.to_bytes(), digest_size=8).digest())[0]) >> 1


class SecretBits(Protocol):
    """Gives secret random bits, which a sampler turns into noise."""

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        """Overwrite a contiguous array with random bits, at the speed of a stream cipher."""


class SecretRng(SecretBits, Protocol):
    """Gives randomness from the operating system, for keys, masks, shares, rounding and privacy noise.

    `thinwire.privacy.secret_rng.SystemRng` is the only implementation outside tests: it takes no seed.
    """

    def random_bytes(self, count: int) -> bytes:
        """Return `count` random bytes, straight from the operating system: for keys, roots and seeds."""


def uniform(start: int, stop: int, word: int) -> Vector:
    """Return U in [0, 1) as float32 for each index: the upper 24 bits of lowbias32(index ^ word) / 2^24."""
    mixed = np.arange(start, stop, dtype=np.uint32)
    mixed ^= np.uint32(word)
    lowbias32(mixed)
    mixed >>= np.uint32(8)
    drawn = mixed.astype(np.float32)
    drawn *= np.float32(2.0**-24)
    return drawn


def lowbias32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash 32-bit words in place by two multiplications, with very low bias; return them.

    Wellons (2018), "Prospecting for Hash Functions".

    >>> int(lowbias32(np.uint32([1]))[0])
    1753845952
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
