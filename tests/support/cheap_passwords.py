"""Password hashes without the 0.1 s of CPU that strangers shall need: the product's own code, with less work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thinwire.store import users


@pytest.fixture(scope="module", autouse=True)
def cheap_passwords() -> Iterator[None]:
    """Give argon2id one pass over 8 KiB; a hash of nobody still costs what the hash of a user does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(users, "PASSES", 1)
        patched.setattr(users, "MEMORY_KIB", 8)
        _forget()
        yield
    _forget()


def _forget() -> None:
    users._hasher.cache_clear()
    users._of_nobody.cache_clear()
