"""The messages of secure aggregation: one of each type and its reader, and hostile bytes for it, for `make fuzz`."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

from thinwire.privacy.keys import ML_KEM_CIPHERTEXT_BYTES, PublicKeys
from thinwire.privacy.messages import (
    SEALED_BYTES,
    Advertisement,
    Agreements,
    BadMessage,
    Delivery,
    Disclosure,
    HolderShares,
    Roster,
    Shares,
    Survivors,
)

MESSAGES = "phase messages"  # beside the specs of codecs
CLIENTS = 4


def keys(post_quantum: bool, byte: int) -> PublicKeys:
    return PublicKeys(bytes([byte]) * 32, bytes([byte]) * 1184 if post_quantum else b"")


def advertised(name: str, post_quantum: bool) -> Advertisement:
    return Advertisement(
        name, b"identity of " + name.encode(), b"p" * 16, keys(post_quantum, 1), keys(post_quantum, 2), b"n" * 32,
        b"s" * 32, b"signature",
    )  # fmt: skip


def entry(holder: int, post_quantum: bool, own: bool = False) -> HolderShares:
    kem = b"" if own or not post_quantum else b"c" * ML_KEM_CIPHERTEXT_BYTES
    return HolderShares(holder, b"r" * 32, b"s" * 32, b"" if own else b"x" * SEALED_BYTES, kem, kem)


def messages(post_quantum: bool) -> dict[str, tuple[Any, Callable[[bytes], Any]]]:
    """A message of each type, and how it is read."""
    escrow = b"e" * (32 * 3 + 16) if post_quantum else b""
    dealt = tuple((dealer, entry(2, post_quantum)) for dealer in (1, 4))
    return {
        "advertisement": (advertised("pi-1", post_quantum), lambda raw: Advertisement.read(raw, post_quantum)),
        "roster": (
            Roster(tuple(advertised(f"pi-{i}", post_quantum) for i in range(CLIENTS))),
            lambda raw: Roster.read(raw, post_quantum),
        ),
        "shares": (
            Shares(b"n" * 32, tuple(entry(i, post_quantum, own=i == 2) for i in (1, 2, 3, 4)), escrow),
            lambda raw: Shares.read(raw, 2, [1, 2, 3, 4], post_quantum),
        ),
        "delivery": (
            Delivery((1, 2, 4), (b"1" * 32, b"2" * 32, b"4" * 32), dealt),
            lambda raw: Delivery.read(raw, 2, CLIENTS, post_quantum),
        ),
        "survivors": (Survivors((1, 4)), lambda raw: Survivors.read(raw, CLIENTS)),
        "agreements": (Agreements(((1, b"a"), (3, b""))), lambda raw: Agreements.read(raw, CLIENTS)),
        "disclosure": (
            Disclosure(((1, False, b"s" * 33), (3, True, b"t" * 33))),
            lambda raw: Disclosure.read(raw, CLIENTS),
        ),
    }


HUGE = (b"\xff\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80")
SPARE_BYTES = 40_000  # that reading may take beside what is in proportion to the message


def hostile(rng: random.Random, raw: bytes) -> bytes:
    """A message whose bytes were changed, cut, doubled, or that claims a huge count."""
    data = bytearray(raw)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = rng.randbytes(rng.choice((1, 2, 32, 500)))
            case 3:
                huge = rng.choice(HUGE)
                data[at : at + len(huge)] = huge
            case 4:
                data[at:at] = data[at : at + rng.choice((1, 33, 200))]
            case _:
                del data[at : at + rng.choice((1, 2, 33))]
    return bytes(data)


def fuzz_messages(cases: int, seed: int) -> int:
    """How many of so many hostile messages were refused; AssertionError where one is read as another message.

    What reading takes is in proportion to the message that came, whatever counts it claims.
    """
    rng, refused = random.Random(seed), 0
    every = [made for post_quantum in (False, True) for made in messages(post_quantum).values()]
    for number in range(cases):
        message, read = every[number % len(every)]
        raw = hostile(rng, message.write())
        traced = number % 50 < len(every)  # each type now and then, because tracing is slow
        if traced:
            tracemalloc.start()
        try:
            found = read(raw)
        except BadMessage:
            refused += 1
        else:
            assert found.write() == raw, (number, seed, raw.hex()[:4000])
        finally:
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < SPARE_BYTES + 20 * len(raw), (number, seed, peak, raw.hex()[:4000])
    return refused
