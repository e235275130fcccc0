"""Passwords: argon2id hashes, and what a password must be.

A check takes one thread and 32 MiB for about 0.1 s by intention. It costs the same if there is no such user, so that
its time does not tell who exists. At most two checks run at a time in a process, so that a flood of logins cannot use
the whole machine.

Argon2: Biryukov, Dinu, Khovratovich, EuroS&P 2016; RFC 9106.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Final

from thinwire.core.errors import UsageError

if TYPE_CHECKING:
    from pwdlib import PasswordHash

LEAST: Final = 12  # letters of a password
MOST: Final = 256
AT_ONCE: Final = 2
PASSES: Final = 3
MEMORY_KIB: Final = 32 * 1024
_turns = threading.BoundedSemaphore(AT_ONCE)


def require_password(password: str, name: str) -> str:
    """Return a password; raise `UsageError` if it is too short, too long, or holds little but the user's name."""
    hint = "some words that nobody else puts together"
    if not LEAST <= len(password) <= MOST:
        raise UsageError(f"a password has {LEAST} to {MOST} characters", f"this one has {len(password)}", hint)
    if len(set(password)) < 4 or password.lower().replace(name.lower(), "").strip("0123456789") == "":
        raise UsageError("this password is easy to guess", "it repeats a few characters, or the name", hint)
    return password


def hash_password(password: str) -> str:
    """Return the argon2id hash of a password, with its salt and parameters."""
    with _turns:
        return _hasher().hash(_bytes(password))


def matches(password: str, kept: str | None) -> bool:
    """Return True if `kept` is the hash of this password; None, of an unknown user, costs the same and is False."""
    with _turns:
        found: bool = _hasher().verify(_bytes(password[:MOST]), kept if kept is not None else _of_nobody())
    return found and kept is not None


def _bytes(password: str) -> bytes:
    return password.encode("utf-8", "surrogatepass")


@cache
def _hasher() -> PasswordHash:
    """Return the hasher; it is imported here, because most commands open the store and check no password."""
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    return PasswordHash((Argon2Hasher(PASSES, MEMORY_KIB, parallelism=1),))


@cache
def _of_nobody() -> str:
    """Return a hash with the same parameters, to which the checks of unknown users are compared."""
    return _hasher().hash("nobody has this password")
