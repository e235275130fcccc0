"""Secret randomness of the operating system: `SystemRng`.

`Key` (`core/prng.py`) is public randomness that a run repeats. `SystemRng` is the opposite: nobody repeats it, it takes
no seed, and it refuses to be pickled or copied, because two programs that draw the same masks would cancel each other's
secrecy (Ristenpart and Yilek 2010, "When Good Randomness Goes Bad: Virtual Machine Reset Vulnerabilities").

`StoredKey` is the one exception: noise that a later round takes off again has to be drawn a second time, also by
another process. It is no `SecretRng`, so no key, mask, share or rounding can come from it.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from thinwire.core.errors import ThinwireError

KEY_BYTES = 32
CHUNK = 1 << 16  # bytes: the zeros that are encrypted stay in the second-level cache
ZEROS = bytes(CHUNK)

_forks = 0  # how often this process was forked off a process that had drawn


def _count_fork() -> None:
    global _forks  # noqa: PLW0603  # a fork is an event of the whole process
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def entropy(count: int) -> bytes:
    """Return random bytes of the operating system; raise `ThinwireError` if it has none to give."""
    try:
        return os.urandom(count)
    except (OSError, NotImplementedError) as error:
        raise ThinwireError(
            "the operating system gives no random bytes, so nothing is masked or noised and nothing leaves",
            why=str(error),
            hint="/dev/urandom has to be readable in this container or chroot, then again",
        ) from error


def stream(key: bytes, block: int) -> CipherContext:
    """Return AES-256 in counter mode (NIST SP 800-38A) from this block of 16 bytes on; it encrypts zeros to its stream.

    The counter is 128 bits, big-endian, and begins at 0 with each key: a key is for one stream.
    """
    return Cipher(AES256(key), CTR(block.to_bytes(16, "big"))).encryptor()


def _expand(expand: CipherContext, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
    raw = out.reshape(-1).view(np.uint8).data
    for start in range(0, len(raw), CHUNK):
        here = raw[start : start + CHUNK]
        expand.update_into(ZEROS if len(here) == CHUNK else ZEROS[: len(here)], here)


class SystemRng:
    """Gives secret random bytes and numbers; it implements `thinwire.core.prng.SecretRng`.

    `random_bytes` reads from the operating system each time. A key, a root or a seed never comes from a buffer that a
    fork or a snapshot of a virtual machine could copy. `fill` expands a key of the operating system, one a thread.

    Invariant: a forked child draws under a new key. Neither a copy nor a pickle exists.

    >>> SystemRng().random_bytes(16) != SystemRng().random_bytes(16)
    True
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def random_bytes(self, count: int) -> bytes:
        """Return `count` random bytes of the operating system."""
        return entropy(count)

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        """Overwrite a contiguous array with random bits: AES-256 in counter mode under a key of the operating system.

        Raises ValueError if the array is not contiguous.
        """
        if not out.flags.c_contiguous:
            raise ValueError("an array that is filled with random bits must be contiguous")
        _expand(self._stream(), out)

    def _stream(self) -> CipherContext:
        if getattr(self._own, "forks", None) != _forks:  # a new thread, or a child of the process that drew
            self._own.stream, self._own.forks = stream(entropy(KEY_BYTES), 0), _forks
        made: CipherContext = self._own.stream
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("SystemRng must not be pickled or copied: two programs would draw the same secrets")


class StoredKey:
    """A secret key that is kept in a file, so that the noise drawn under it can be drawn again.

    `made` takes it from the operating system, once for each vector of noise. `read` takes what `write` gave; nothing
    else makes one. Whoever has the key and a released model that has the noise, has the sum without noise.

    >>> key = StoredKey.made()
    >>> key.write() == StoredKey.read(key.write()).write() != StoredKey.made().write()
    True
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a stored key has {KEY_BYTES} bytes, not {len(key)}")
        self._key = key

    @classmethod
    def made(cls) -> StoredKey:
        """Return a new key of the operating system."""
        return cls(entropy(KEY_BYTES))

    @classmethod
    def read(cls, text: str) -> StoredKey:
        """Return the key that `write` gave as this text; raise ValueError for any other text."""
        return cls(bytes.fromhex(text))

    def write(self) -> str:
        """Return the key as text, for a file that only its owner can read."""
        return self._key.hex()

    def stream(self) -> StoredStream:
        """Return the key's random bits, from the first one on."""
        return StoredStream(stream(self._key, 0))


class StoredStream:
    """Gives the random bits of a stored key, each time the same: AES-256 in counter mode.

    It implements `thinwire.core.prng.SecretBits`.
    """

    def __init__(self, expand: CipherContext) -> None:
        self._expand = expand

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        """Overwrite a contiguous array with the next bits; raise ValueError if the array is not contiguous."""
        if not out.flags.c_contiguous:
            raise ValueError("an array that is filled with random bits must be contiguous")
        _expand(self._expand, out)
