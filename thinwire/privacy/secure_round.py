"""The aggregator's side of one secure round: messages of clients in, requests for the next phase out. No I/O.

    phase      a client's message      closes with                            the next request
    advertise  `Advertisement`         U1: clients with a valid message       Roster
    share      `Shares`                U2: clients with a valid message       Delivery
    masked     two masked vectors      U3: the survivors                      Survivors
    agree      a signature             the valid signatures                   Agreements
    unmask     `Disclosure`            every secret that the sum needs        (none: `unmasking_keys` are ready)

The caller feeds messages and drop-outs, and closes a phase when nobody is outstanding or the deadline demands it. It
makes the survivors durable before it shows them to a client. `TooFew` and `Aborted` end the round without a step.
Before `unmask` the aggregator cannot remove the masks. From then on, a threat model must assume that it has the sum.

Invariant: the same messages and closings in the same order give the same requests, so a journal replays a round.

Bonawitz et al. 2017 (figure 4), Bell et al. 2020 (algorithm 2).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import PlanError, ThinwireError
from thinwire.core.formatting import counted
from thinwire.core.types import PHASES, Phase
from thinwire.privacy.contexts import (
    SecureTerms,
    agreed_bytes,
    commitment,
    context_of_roster,
    context_of_sharers,
    digest,
    holders_of,
    signed_by,
)
from thinwire.privacy.keys import BadKey, BadSeal, PairKeys, hkdf, unseal
from thinwire.privacy.masks import add_masks, add_packed, lane_dtype, mask_key, packed_size
from thinwire.privacy.messages import (
    MAX_SIGNATURE_BYTES,
    SECRET_BYTES,
    Advertisement,
    Agreements,
    BadMessage,
    Delivery,
    Disclosure,
    Roster,
    Shares,
    Survivors,
)
from thinwire.privacy.participant import pair_secret
from thinwire.privacy.shamir import combine


class TooFew(ThinwireError):
    """A phase closed with fewer clients than the terms allow; the round ends without a sum."""

    exit_code = 6


class Aborted(ThinwireError):
    """The messages of a round contradict each other; the round ends without a sum."""


@dataclass(frozen=True)
class UnmaskingKeys:
    """The keys of the masks that are left in the sum, each with the sign that removes its mask."""

    update: tuple[tuple[bytes, int], ...] = field(repr=False)  # no log shows a key
    scalars: tuple[tuple[bytes, int], ...] = field(repr=False)


class MaskedSum:
    """The sum of masked vectors: one vector of lanes and one of scalars, whatever the number of clients.

    Invariant: a vector is checked before the sum changes.
    """

    def __init__(self, terms: SecureTerms) -> None:
        self.terms, self.clients = terms, 0
        self.update: NDArray[Any] = np.zeros(terms.lanes, lane_dtype(terms.width))
        self.scalars = np.zeros(1 + len(terms.scalars), np.uint64)

    def check(self, update: Any, scalars: bytes) -> None:
        """Raise `BadMessage` unless both masked vectors have the lengths of the terms."""
        wanted = packed_size(self.terms.lanes, self.terms.width), self.scalars.nbytes
        if (found := (len(memoryview(update).cast("B")), len(scalars))) != wanted:
            raise BadMessage(
                f"masked vectors of {found[0]} and {found[1]} bytes", why=f"{wanted[0]} and {wanted[1]} are due"
            )

    def add(self, update: Any, scalars: bytes) -> None:
        """Add a client's masked vectors: the packed update and the 64-bit scalars."""
        self.check(update, scalars)
        add_packed(np.frombuffer(update, np.uint8), self.terms.width, self.update)
        self.scalars += np.frombuffer(scalars, "<u8")
        self.clients += 1

    def unmask(self, keys: UnmaskingKeys) -> tuple[NDArray[Any], dict[str, int]]:
        """Remove the masks in place; return the lanes of the sum (mod 2^lane) and the sums of the scalars by name.

        Raise `Aborted` unless the check lane holds the number of clients. The update has check lanes of its own, which
        the lattice reads.
        """
        add_masks(self.update, keys.update)
        add_masks(self.scalars, keys.scalars)
        if int(self.scalars[0]) != self.clients:
            raise Aborted("the masks do not cancel", why="a client dealt wrong shares, or a masked vector is damaged")
        signed = self.scalars[1:].view(np.int64)
        return self.update, {name: int(value) for name, value in zip(self.terms.scalars, signed, strict=True)}


class SecureRound:
    """The state of one secure round at the aggregator.

    `identities` maps device names to the identity keys (DER) of the selected clients.
    """

    def __init__(self, terms: SecureTerms, context0: bytes, identities: Mapping[str, bytes]) -> None:
        self.terms, self.phase = terms, PHASES[0]
        self._context0, self._identities = terms.bound(context0), dict(identities)
        self.outstanding = set(identities)  # names whose message of this phase may still come
        self.dropped: dict[str, Phase] = {}  # name -> the phase in which the client was lost
        self._advertised: dict[str, Advertisement] = {}
        self._shares: dict[int, Shares] = {}
        self._masked, self._signatures = set[int](), dict[int, bytes]()
        self._disclosed: dict[tuple[int, bool], dict[int, bytes]] = {}  # (dealer, is root) -> holder -> share
        self.can_unmask = False  # True once every secret that the sum needs can be reconstructed

    @property
    def survivors(self) -> tuple[str, ...]:
        """Return the names in U3, or those so far while the phase `masked` is open."""
        return tuple(self._roster[index - 1].name for index in sorted(self._masked))

    def receive(self, name: str, message: bytes = b"") -> None:
        """Accept a client's message of the current phase; drop the client and raise `BadMessage` if it is not valid.

        In `masked` the caller checks and keeps the vectors itself (`MaskedSum`), and passes no message.
        """
        if name not in self.outstanding:
            raise BadMessage(f"a message of {name} that the phase {self.phase} does not wait for")
        try:
            getattr(self, f"_take_{self.phase}")(name, message)
        except BadMessage:
            self.drop(name)
            raise
        self.outstanding.discard(name)

    def drop(self, name: str) -> None:
        """Count a client as lost in the current phase; it sends no later message."""
        if name in self.outstanding:
            self.outstanding.discard(name)
            self.dropped[name] = self.phase

    def readmit(self, name: str) -> bool:
        """Wait again for a client that was lost in the open phase; return False if it was lost in another one."""
        if self.dropped.get(name) != self.phase:
            return False
        del self.dropped[name]
        self.outstanding.add(name)
        return True

    def close(self) -> dict[str, bytes]:
        """Close the phase; return the next request for each client by name, or nothing after `unmask`.

        Clients whose message has not come are dropped. Raise `TooFew` or `Aborted` if the round cannot go on.
        """
        for name in sorted(self.outstanding) if not self.can_unmask else ():  # no more shares are needed
            self.drop(name)
        requests: dict[str, bytes] = getattr(self, f"_close_{self.phase}")()
        if self.phase != PHASES[-1]:
            self.phase = PHASES[PHASES.index(self.phase) + 1]
            self.outstanding = set(requests)
        return requests

    # advertise

    def _take_advertise(self, name: str, message: bytes) -> None:
        found = Advertisement.read(message, self.terms.post_quantum)
        if found.name != name or found.identity != self._identities[name]:
            raise BadMessage(f"an advertisement of {found.name}", why=f"{name} sent it, with another identity key")
        if not signed_by(found.identity, found.signature, found.signed_bytes(self._context0)):
            raise BadMessage(
                f"the advertisement of {name} is not signed for this round",
                why="the device computed another context: its plan, its model or the terms differ",
            )
        try:
            found.enc.check(self.terms.post_quantum)
            found.mask.check(self.terms.post_quantum)
        except BadKey as error:
            raise BadMessage(f"{name} advertises a key that is not valid", why=str(error)) from None
        keys = {key for one in self._advertised.values() for key in (one.enc.x25519, one.mask.x25519)}
        if {found.enc.x25519, found.mask.x25519} & keys or found.enc.x25519 == found.mask.x25519:
            raise BadMessage(f"{name} advertises a key of another client, or one key for two purposes")
        if found.identity in {one.identity for one in self._advertised.values()}:
            raise BadMessage(f"{name} advertises with the identity key of another client")
        self._advertised[name] = found

    def _close_advertise(self) -> dict[str, bytes]:
        self._roster = tuple(self._advertised[name] for name in sorted(self._advertised))
        count = len(self._roster)
        try:
            self.graph = self.terms.graph_of(count)
        except PlanError as error:
            raise TooFew(f"{counted(count, 'client')} advertised keys", why=error.why) from None
        self._require_enough(count, "advertised keys")
        raw = Roster(self._roster).write()
        self._context1 = context_of_roster(self._context0, raw)
        self._index = {one.name: index for index, one in enumerate(self._roster, 1)}
        self._holders = holders_of(self.graph, self._context1)
        return dict.fromkeys(self._index, raw)

    # share

    def _take_share(self, name: str, message: bytes) -> None:
        index = self._index[name]
        found = Shares.read(message, index, self._holders[index], self.terms.post_quantum)
        if commitment("nonce", self._context0, found.nonce) != self._roster[index - 1].nonce_commitment:
            raise BadMessage(f"the nonce of {name} is not the one it committed to")
        self._shares[index] = found

    def _close_share(self) -> dict[str, bytes]:
        self._require_enough(len(self._shares), "sent shares")
        self._sharers = sorted(self._shares)
        nonces = tuple(self._shares[index].nonce for index in self._sharers)
        self._context2 = context_of_sharers(self._context1, self._sharers, nonces)
        entries = {index: {one.holder: one for one in self._shares[index].holders} for index in self._sharers}
        self._entries = entries  # dealer -> holder -> what was dealt
        dealers = {index: [one for one in self._holders[index] if one != index and one in entries] for index in entries}
        return {
            self._roster[index - 1].name: Delivery(
                tuple(self._sharers), nonces,
                tuple((dealer, entries[dealer][index]) for dealer in dealers[index]),
            ).write()
            for index in self._sharers
        }  # fmt: skip

    # masked

    def _take_masked(self, name: str, message: bytes) -> None:
        del message
        self._masked.add(self._index[name])

    def withdraw_vector(self, name: str) -> None:
        """Drop a client whose masked vector came, before the survivors are shown; raise RuntimeError afterwards."""
        if self.phase != "masked":
            raise RuntimeError(f"the survivors of the round were shown, and {name} is one of them")
        self._masked.discard(self._index[name])
        self.dropped[name] = "masked"

    def _close_masked(self) -> dict[str, bytes]:
        self._require_enough(len(self._masked), "sent masked vectors")
        self._survivors = sorted(self._masked)
        few = [i for i in self._sharers if len(self._masked & set(self._holders[i])) < self.graph.t]
        if few:
            name = self._roster[few[0] - 1].name
            raise TooFew(f"fewer than {self.graph.t} holders of the shares of {name} are left")
        return dict.fromkeys(self.survivors, Survivors(tuple(self._survivors)).write())

    # agree

    def _take_agree(self, name: str, message: bytes) -> None:
        signed = agreed_bytes(self._context2, self._survivors)
        if len(message) > MAX_SIGNATURE_BYTES or not signed_by(self._identities[name], message, signed):
            raise BadMessage(f"{name} has signed another list of survivors, or in another context")
        self._signatures[self._index[name]] = message

    def _close_agree(self) -> dict[str, bytes]:
        if len(self._signatures) < self.graph.t:
            raise TooFew(f"{len(self._signatures)} survivors signed", why=f"{self.graph.t} signatures are necessary")
        raw = Agreements(tuple(sorted(self._signatures.items()))).write()
        return {self._roster[index - 1].name: raw for index in sorted(self._signatures)}

    # unmask

    def _take_unmask(self, name: str, message: bytes) -> None:
        holder = self._index[name]
        found = Disclosure.read(message, len(self._roster)).shares
        due = {(dealer, is_root) for dealer, is_root in self._needed_secrets() if holder in self._holders[dealer]}
        if not {(dealer, is_root) for dealer, is_root, _ in found} <= due:  # fewer are valid: a dealer's may be wrong
            raise BadMessage(f"{name} disclosed shares of other clients, or of the other kind")
        for dealer, is_root, share in found:
            entry, ends = self._entries[dealer][holder], struct.pack("<HH", dealer, holder)
            committed = commitment(f"{'root' if is_root else 'self'} share", self._context1, ends, share)
            if committed != (entry.root_commitment if is_root else entry.self_commitment):
                raise BadMessage(f"{name} disclosed a share that {self._roster[dealer - 1].name} did not deal")
        for dealer, is_root, share in found:
            self._disclosed.setdefault((dealer, is_root), {})[holder] = share
        self.can_unmask = all(len(self._disclosed.get(secret, ())) >= self.graph.t for secret in self._needed_secrets())

    def _close_unmask(self) -> dict[str, bytes]:
        if not self.can_unmask:
            few, dealer = min((len(self._disclosed.get(secret, ())), secret[0]) for secret in self._needed_secrets())
            raise TooFew(
                f"{few} shares of a secret of {self._roster[dealer - 1].name}, which the sum needs",
                why=f"{self.graph.t} are necessary: clients left, or this one dealt wrong shares",
            )
        return {}

    def _needed_secrets(self) -> list[tuple[int, bool]]:
        """Return the secrets that the sum needs, each as its dealer and True for a root, False for a self mask."""
        return [(dealer, dealer not in self._masked) for dealer in self._sharers]

    def unmasking_keys(self) -> UnmaskingKeys:
        """Reconstruct the secrets that the sum needs, and return the keys of the masks that are left in it.

        Raise `Aborted` if a reconstructed secret is not the one that its client committed to.
        """
        if not self.can_unmask:
            raise RuntimeError("too few shares were disclosed for the secrets that the sum needs")
        survivors = set(self._survivors)
        seeds = [(self._self_seed(index), -1) for index in self._survivors]
        for index in self._sharers:
            if index not in survivors:
                seeds += self._pair_secrets_of(index, survivors)
        keys = {
            vector: tuple((mask_key(secret, self._context2, vector), sign) for secret, sign in seeds)
            for vector in ("update", "scalars")
        }
        return UnmaskingKeys(**keys)

    def _reconstruct(self, dealer: int, is_root: bool) -> bytes:
        try:
            return combine(self._disclosed[dealer, is_root], self.graph.t)
        except ValueError:
            raise self._inconsistent_shares(dealer) from None

    def _inconsistent_shares(self, dealer: int) -> Aborted:
        name = self._roster[dealer - 1].name
        return Aborted(
            f"{name} dealt shares of another secret than it committed to", hint=f"thinwire devices revoke {name}"
        )

    def _self_seed(self, index: int) -> bytes:
        seed = self._reconstruct(index, is_root=False)
        if commitment("self mask", self._context0, seed) != self._roster[index - 1].self_commitment:
            raise self._inconsistent_shares(index)
        return seed

    def _pair_secrets_of(self, lost: int, survivors: set[int]) -> list[tuple[bytes, int]]:
        """Return the secrets of a drop-out's pairs with survivors, with the signs that remove the survivors' masks."""
        root = self._reconstruct(lost, is_root=True)
        keys = PairKeys.from_root(root, "mask", self.terms.post_quantum)
        if keys.public != self._roster[lost - 1].mask:
            raise self._inconsistent_shares(lost)
        neighbours = [holder for holder in self._holders[lost] if holder != lost]
        outgoing = self._open_escrow(lost, root, neighbours)
        found = list[tuple[bytes, int]]()
        for peer in neighbours:
            if peer not in survivors:
                continue
            incoming = keys.decapsulate(self._entries[peer][lost].mask_ciphertext)
            first, second = (outgoing[peer], incoming) if lost < peer else (incoming, outgoing[peer])
            try:
                secret = pair_secret(keys, self._roster[peer - 1].mask, first, second)
            except BadKey:
                raise self._inconsistent_shares(peer) from None
            found.append((secret, -1 if peer < lost else 1))
        return found

    def _open_escrow(self, lost: int, root: bytes, neighbours: Sequence[int]) -> dict[int, bytes]:
        """Return the secrets of ML-KEM that a drop-out encapsulated for its neighbours; b"" in a classical suite."""
        if not self.terms.post_quantum:
            return dict.fromkeys(neighbours, b"")
        try:
            raw = unseal(hkdf(root, "escrow", self._context1), self._shares[lost].escrow, self._context1)
        except BadSeal:
            raise self._inconsistent_shares(lost) from None
        parts = [raw[at : at + SECRET_BYTES] for at in range(0, len(raw), SECRET_BYTES)]
        return dict(zip(neighbours, parts, strict=True))

    @property
    def rotation_seed(self) -> bytes:
        """Return the seed of the rotation (32 bytes), the same that the clients derived; known after `share` closed."""
        return digest(
            "thinwire secure rotation", self._context2, *(self._shares[index].nonce for index in self._sharers)
        )

    def _require_enough(self, found: int, did: str) -> None:
        if found < (least := self.terms.min_survivors_of(self.graph)):
            raise TooFew(f"{counted(found, 'client')} {did}", why=f"the sum needs {least}")
