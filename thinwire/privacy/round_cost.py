"""The bytes of a secure round for one client, computed from its messages.

`phase_bytes` writes one message of each kind with the sizes that the round's terms give it, and counts. So a change of
a message changes this too. HTTP and its headers are not counted, nor is the model that the training assignment brings.

Each client sends sealed shares to each neighbour, and gets as many. In the complete graph of n clients that is about
200 n bytes up in `share` and down before `masked` (2.4 kB n with ML-KEM), and 320 n bytes of advertisements (5 kB n).
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.types import Phase
from thinwire.privacy.contexts import SecureTerms, identity_of, simulated_key
from thinwire.privacy.keys import ML_KEM_CIPHERTEXT_BYTES, ML_KEM_PUBLIC_BYTES, PublicKeys
from thinwire.privacy.masks import packed_size
from thinwire.privacy.messages import (
    HASH_BYTES,
    PROCESS_BYTES,
    SEALED_BYTES,
    SECRET_BYTES,
    Advertisement,
    Agreements,
    Delivery,
    Disclosure,
    HolderShares,
    Roster,
    Shares,
    Survivors,
)
from thinwire.privacy.shamir import SHARE_BYTES

SIGNATURE_BYTES = 71  # most signatures of a P-256 key in DER; the others have one or two bytes more or less
SCALAR_BYTES = 8


@dataclass(frozen=True)
class PhaseBytes:
    """Holds the bytes that one client sends in a phase, and those of the request that it answers."""

    phase: Phase
    up: int
    down: int


def phase_bytes(terms: SecureTerms, name_letters: int = 8) -> tuple[PhaseBytes, ...]:
    """Return the bytes of each phase of a round in which no client drops out, in the order of the phases.

    `name_letters` is the mean length of the devices' names. Drop-outs make every later message smaller. Raise
    `PlanError` if the terms have no threshold.
    """
    count = terms.selected
    graph = terms.graph_of(count)
    kem = (bytes(ML_KEM_CIPHERTEXT_BYTES),) * 2 if terms.post_quantum else (b"", b"")
    keys = PublicKeys(bytes(32), bytes(ML_KEM_PUBLIC_BYTES if terms.post_quantum else 0))
    commitment, secret, signature = bytes(HASH_BYTES), bytes(SECRET_BYTES), bytes(SIGNATURE_BYTES)
    advertisement = Advertisement(
        "a" * name_letters, identity_of(simulated_key("")), bytes(PROCESS_BYTES), keys, keys, commitment, commitment,
        signature,
    )  # fmt: skip
    own = HolderShares(1, commitment, commitment)
    other = HolderShares(1, commitment, commitment, bytes(SEALED_BYTES), *kem)
    escrow = bytes(SECRET_BYTES * graph.k + 16 if terms.post_quantum else 0)
    everybody = tuple(range(1, count + 1))
    shares = Shares(secret, (own, *(other,) * graph.k), escrow)
    delivery = Delivery(everybody, (secret,) * count, ((1, other),) * graph.k)
    disclosure = Disclosure(((1, False, bytes(SHARE_BYTES)),) * (graph.k + 1))
    vectors = packed_size(terms.lanes, terms.width) + SCALAR_BYTES * (1 + len(terms.scalars))
    return (
        PhaseBytes("advertise", len(advertisement.write()), 0),
        PhaseBytes("share", len(shares.write()), len(Roster((advertisement,) * count).write())),
        PhaseBytes("masked", vectors, len(delivery.write())),
        PhaseBytes("agree", len(signature), len(Survivors(everybody).write())),
        PhaseBytes("unmask", len(disclosure.write()), len(Agreements(((1, signature),) * count).write())),
    )
