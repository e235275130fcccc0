"""A client's side of one secure round: requests of the aggregator in, messages or `Withdraw` out. No I/O.

    state       request                 answer                           next state
    new         (the assignment)        `advertise`: Advertisement       advertised
    advertised  Roster                  `share`: Shares                  shared
    shared      Delivery                `prepare`: seed of the rotation  ready
    ready       (training has ended)    `mask`: two masked vectors       masked
    masked      Survivors               `agree`: a signature             agreed
    agreed      Agreements              `unmask`: Disclosure             unmasked
    any         another request         raises `Withdraw`                withdrawn

The same request again gets the same bytes; only `mask` works once, because the client keeps the masked vectors in its
outbox. Answers and secrets are in memory alone, so a new process of the client cannot answer a second time. A
withdrawn participant has erased its secrets, and raises `Withdraw` for every call.

Invariant: a client discloses at most one of the two shares of each peer, and never a share of its own root in clear.

Bonawitz et al. 2017 (figure 4); the checks are listed in docs/explain/secure-aggregation.md.
"""

from __future__ import annotations

import contextlib
import operator
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import PlanError, ThinwireError
from thinwire.core.prng import SecretRng
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
from thinwire.privacy.keys import BadKey, BadSeal, PairKeys, PublicKeys, encapsulate, has_ml_kem, hkdf, seal, unseal
from thinwire.privacy.masks import add_masks, mask_key, pack, packed_size
from thinwire.privacy.messages import (
    PROCESS_BYTES,
    SECRET_BYTES,
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
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.shamir import SHARE_BYTES, split

Reason = Literal[
    "terms", "message", "roster", "signature", "too-few", "shares", "survivors", "another-request", "order"
]
State = Literal["new", "advertised", "shared", "ready", "masked", "agreed", "unmasked", "withdrawn"]
MODULUS = 1 << 64  # of the scalars
ROSTER_HINT = (
    "thinwire client start --roster SIGNED.json with a roster that has it, if the holder of the offline key knows it"
)


class Withdraw(ThinwireError):
    """The participant leaves the round for a reason; its device sends nothing more in this round."""

    def __init__(self, reason: Reason, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what, why, hint or "the next round needs nothing; if it recurs, contact the operator")
        self.reason: Reason = reason


@dataclass(frozen=True)
class SecureIdentity:
    """Holds what a device needs for secure rounds.

    `public_key` is its identity key in DER, and `sign` makes the key's ECDSA-SHA256 signature. `pinned` maps device
    names to the identity keys that its owner trusts. Without a roster it is None: the device then accepts the keys
    that the aggregator sends, which `malicious` terms do not allow. Only tests replace `rng`.
    """

    public_key: bytes
    sign: Callable[[bytes], bytes]
    pinned: Mapping[str, bytes] | None = None
    rng: Callable[[], SecretRng] = SystemRng
    process: bytes = field(default_factory=lambda: os.urandom(PROCESS_BYTES))

    @property
    def carries(self) -> frozenset[str]:
        """Return which parts of a plan's [secure] table this device can carry out; the owner's policy reads it.

        `secure.post_quantum` needs ML-KEM in the package cryptography, `secure.malicious` a pinned roster.
        """
        parts = {"secure": True, "secure.post_quantum": has_ml_kem(), "secure.malicious": self.pinned is not None}
        return frozenset(name for name, is_here in parts.items() if is_here)


@dataclass(frozen=True)
class MaskedVectors:
    """The packed update (uint8) and the 64-bit scalars, both under masks."""

    update: NDArray[np.uint8]
    scalars: bytes


def pair_secret(own: PairKeys, peer: PublicKeys, low_to_high: bytes, high_to_low: bytes) -> bytes:
    """Return the secret that two clients share for their masks: X25519, then the secrets of ML-KEM if there are any.

    `peer` are the other client's public mask keys.
    """
    return own.exchange(peer) + low_to_high + high_to_low


class Participant:
    """The state of one client in one secure round.

    `name` is the device's. `min_cohort` and `min_survivors` are the owner's own limits.
    """

    def __init__(
        self,
        name: str,
        identity: SecureIdentity,
        terms: SecureTerms,
        context0: bytes,
        min_cohort: int = 0,
        min_survivors: int = 0,
    ) -> None:
        self.terms, self.state = terms, "new"
        self._name, self._identity, self._context0 = name, identity, terms.bound(context0)
        self._min_cohort, self._min_survivors = min_cohort, min_survivors
        self._rng = rng = identity.rng()
        self._answers: dict[str, tuple[bytes, bytes]] = {}  # method -> (digest of the request, answer)
        self._root, self._self_seed, self._nonce = (rng.random_bytes(SECRET_BYTES) for _ in range(3))
        self._seal_keys = PairKeys.generate(rng, terms.post_quantum)
        self._mask_keys = PairKeys.from_root(self._root, "mask", terms.post_quantum)
        self._advertisement = Advertisement(
            name, identity.public_key, identity.process, self._seal_keys.public, self._mask_keys.public,
            commitment("nonce", self._context0, self._nonce),
            commitment("self mask", self._context0, self._self_seed),
        )  # fmt: skip
        # Neighbour -> the secret of ML-KEM that this client encapsulated for its mask.
        self._encapsulated: dict[int, bytes] = {}
        self._received_shares: dict[int, tuple[bytes, bytes]] = {}  # dealer -> its shares of root and self mask
        if terms.adversary == "malicious" and identity.pinned is None:
            raise self._withdraw("terms", "a malicious aggregator is withstood only with a pinned roster")

    def advertise(self) -> bytes:
        """Return the signed advertisement of this client's keys."""
        return self._answer_once("advertise", "new", b"", self._advertise)

    def _advertise(self) -> bytes:
        signature = self._identity.sign(self._advertisement.signed_bytes(self._context0))
        self._advertisement = replace(self._advertisement, signature=signature)
        self.state = "advertised"
        return self._advertisement.write()

    def share(self, roster: bytes) -> bytes:
        """Check the roster, and return the shares of this client's two secrets for each of its holders."""
        return self._answer_once("share", "advertised", roster, lambda: self._share(roster))

    def _share(self, raw: bytes) -> bytes:
        terms, pq = self.terms, self.terms.post_quantum
        found = Roster.read(raw, pq).clients
        graph = terms.graph_of(len(found))  # first: it bounds the number of signatures that are checked
        self._clients = self._check_roster(found)
        self._context1 = context_of_roster(self._context0, raw)
        self._index = [one.name for one in self._clients].index(self._name) + 1
        self._threshold, self._min_survivors = graph.t, max(self._min_survivors, terms.min_survivors_of(graph))
        holders = self._holders = holders_of(graph, self._context1)[self._index]
        roots = split(self._root, graph.t, holders, self._rng)
        selves = split(self._self_seed, graph.t, holders, self._rng)
        rows = [self._deal_shares(holder, roots[holder], selves[holder]) for holder in holders]
        self._received_shares[self._index] = b"", selves[self._index]  # its share of its own root is never needed
        escrow = b""
        if pq:
            kept = b"".join(self._encapsulated[holder] for holder in holders if holder != self._index)
            escrow = seal(hkdf(self._root, "escrow", self._context1), kept, self._context1)
        self.state = "shared"
        return Shares(self._nonce, tuple(rows), escrow).write()

    def _check_roster(self, clients: tuple[Advertisement, ...]) -> tuple[Advertisement, ...]:
        """Return the roster's clients, after every check that needs no key agreement."""
        if len(clients) < self._min_cohort:
            raise self._withdraw(
                "too-few", f"a roster of {len(clients)} clients", f"the owner wants {self._min_cohort}"
            )
        if self._advertisement not in clients:
            raise self._withdraw("roster", "a roster without this client's own advertisement")
        keys, pinned = [key for one in clients for key in (one.enc.x25519, one.mask.x25519)], self._identity.pinned
        if len(set(keys)) < len(keys) or len({one.identity for one in clients}) < len(clients):
            raise self._withdraw("roster", "a roster in which two clients have one key")
        for one in clients:
            one.enc.check(self.terms.post_quantum)
            one.mask.check(self.terms.post_quantum)
            if pinned is not None and pinned.get(one.name) != one.identity:
                what = f"{one.name} is not in the pinned roster with this identity key"
                why = "an aggregator that invents a client can take this device's update out of the sum"
                raise self._withdraw("roster", what, why, ROSTER_HINT)
            if not signed_by(one.identity, one.signature, one.signed_bytes(self._context0)):
                raise self._withdraw(
                    "signature", f"the advertisement of {one.name} is not signed for this round",
                    "it was told another plan, model or round, or the message was altered",
                )  # fmt: skip
        return clients

    def _deal_shares(self, holder: int, root: bytes, own: bytes) -> HolderShares:
        """Return the entry of one holder; the shares are sealed for it."""
        committed = [self._share_commitment(self._index, holder, *one) for one in (("root", root), ("self", own))]
        made = HolderShares(holder, *committed)
        if holder == self._index:
            return made
        peer = self._clients[holder - 1]
        enc_ciphertext, enc_secret = encapsulate(peer.enc)
        mask_ciphertext, self._encapsulated[holder] = encapsulate(peer.mask)
        made = replace(made, enc_ciphertext=enc_ciphertext, mask_ciphertext=mask_ciphertext)
        key = self._seal_key(self._index, holder, self._seal_keys.exchange(peer.enc) + enc_secret)
        return replace(made, sealed=seal(key, root + own, made.associated(self._context1, self._index)))

    def _seal_key(self, dealer: int, holder: int, secret: bytes) -> bytes:
        return hkdf(secret, "seal", self._context1 + struct.pack("<HH", dealer, holder))

    def _share_commitment(self, dealer: int, holder: int, kind: str, share: bytes) -> bytes:
        return commitment(f"{kind} share", self._context1, struct.pack("<HH", dealer, holder), share)

    def prepare(self, delivery: bytes) -> bytes:
        """Check and open the delivered shares; return the seed of the rotation (32 bytes), the same for all clients."""
        return self._answer_once("prepare", "shared", delivery, lambda: self._prepare(delivery))

    def _prepare(self, raw: bytes) -> bytes:
        found = Delivery.read(raw, self._index, len(self._clients), self.terms.post_quantum)
        if len(found.sharers) < self._min_survivors or self._index not in found.sharers:
            raise self._withdraw(
                "too-few", f"shares of {len(found.sharers)} clients", f"{self._min_survivors} are needed"
            )
        for index, nonce in zip(found.sharers, found.nonces, strict=True):
            if commitment("nonce", self._context0, nonce) != self._clients[index - 1].nonce_commitment:
                raise self._withdraw(
                    "shares", f"the nonce of {self._clients[index - 1].name} is not the one it committed to"
                )
        dealers = [index for index in self._holders if index in set(found.sharers) and index != self._index]
        if [dealer for dealer, _ in found.dealt] != dealers:
            raise self._withdraw("shares", "a delivery of shares by other clients than those that it lists")
        self._context2 = context_of_sharers(self._context1, found.sharers, found.nonces)
        self._sharers = found.sharers
        self._pair_secrets = {dealer: self._open_shares(dealer, entry) for dealer, entry in found.dealt}
        self.state = "ready"
        return digest("thinwire secure rotation", self._context2, *found.nonces)

    def _open_shares(self, dealer: int, entry: HolderShares) -> bytes:
        """Keep the shares that a dealer sealed for this client, and return the secret of the pair for their masks.

        If the shares are wrong, the client drops them and stays in the round. Otherwise one corrupt dealer could choose
        which honest clients leave the sum. The client then has no share of this dealer to disclose.
        """
        peer, me = self._clients[dealer - 1], self._index
        secret = self._seal_keys.exchange(peer.enc) + self._seal_keys.decapsulate(entry.enc_ciphertext)
        with contextlib.suppress(BadSeal):
            plain = unseal(self._seal_key(dealer, me, secret), entry.sealed, entry.associated(self._context1, dealer))
            root, own = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
            if (entry.root_commitment, entry.self_commitment) == (
                self._share_commitment(dealer, me, "root", root), self._share_commitment(dealer, me, "self", own),
            ):  # fmt: skip
                self._received_shares[dealer] = root, own
        incoming, outgoing = self._mask_keys.decapsulate(entry.mask_ciphertext), self._encapsulated[dealer]
        first, second = (outgoing, incoming) if me < dealer else (incoming, outgoing)
        return pair_secret(self._mask_keys, peer.mask, first, second)

    def mask(self, lanes: NDArray[Any], scalars: Sequence[int]) -> MaskedVectors:
        """Return the masked update and scalars; `lanes` (uint16 or uint32, `terms.lanes` of them) is overwritten.

        `scalars` are the values of `terms.scalars`; their sums over all clients stay within [-2^63, 2^63). The secrets
        that made the masks are erased.
        """
        self._require_state("ready")
        if lanes.size != self.terms.lanes or len(scalars) != len(self.terms.scalars):
            raise ValueError(f"{lanes.size} lanes and {len(scalars)} scalars do not fit the terms of the round")
        counted = np.array([1, *(operator.index(value) % MODULUS for value in scalars)], np.uint64)
        self.state = "masked"  # first: whatever fails below, no second vector is ever masked
        update, own = self._signed_mask_keys("update"), self._signed_mask_keys("scalars")
        self._erase()
        add_masks(counted, own)
        add_masks(lanes, update)
        packed = np.empty(packed_size(lanes.size, self.terms.width), np.uint8)
        pack(lanes, self.terms.width, packed)
        return MaskedVectors(packed, counted.astype("<u8").tobytes())

    def _signed_mask_keys(self, vector: str) -> list[tuple[bytes, int]]:
        """Return the keys of all masks of a vector with their signs."""
        pairs = [
            (mask_key(secret, self._context2, vector), 1 if self._index < peer else -1)
            for peer, secret in self._pair_secrets.items()
        ]
        return [(mask_key(self._self_seed, self._context2, vector), 1), *pairs]

    def agree(self, survivors: bytes) -> bytes:
        """Check the list of survivors, and return this client's signature over it."""
        return self._answer_once("agree", "masked", survivors, lambda: self._agree(survivors))

    def _agree(self, raw: bytes) -> bytes:
        found = Survivors.read(raw, len(self._clients)).clients
        if self._index not in found or not set(found) <= set(self._sharers):
            raise self._withdraw(
                "survivors", "a list of survivors without this client, or with clients that sent no shares"
            )
        if len(found) < self._min_survivors:
            raise self._withdraw("too-few", f"{len(found)} survivors", f"{self._min_survivors} are needed")
        self._survivors, self.state = found, "agreed"
        return self._identity.sign(agreed_bytes(self._context2, found))

    def unmask(self, agreements: bytes) -> bytes:
        """Check the signatures of the other survivors, and return one share of each peer."""
        return self._answer_once("unmask", "agreed", agreements, lambda: self._unmask(agreements))

    def _unmask(self, raw: bytes) -> bytes:
        agreed = Agreements.read(raw, len(self._clients)).signatures
        valid = valid_agreements(self._clients, self._context2, self._survivors, agreed)
        if valid < self._threshold:
            raise self._withdraw("signature", f"{valid} valid signatures of survivors", f"{self._threshold} are needed")
        survivors, rows = set(self._survivors), list[tuple[int, bool, bytes]]()
        for dealer, (root, own) in sorted(self._received_shares.items()):
            rows.append((dealer, dealer not in survivors, own if dealer in survivors else root))
        self._received_shares, self.state = {}, "unmasked"
        return Disclosure(tuple(rows)).write()

    def _answer_once(self, method: str, state: State, request: bytes, make: Callable[[], bytes]) -> bytes:
        """Return the answer to a request, the first time by `make`, later the same bytes."""
        wanted = digest("request", request)
        if method in self._answers and self.state != "withdrawn":
            known, answer = self._answers[method]
            if known != wanted:
                raise self._withdraw("another-request", f"a second request to {method} differs from the first")
            return answer
        self._require_state(state)
        try:
            answer = make()
        except BadMessage as error:
            raise self._withdraw("message", error.what, error.why) from None
        except PlanError as error:  # no graph has so few clients, or so many
            raise self._withdraw("too-few", error.what, error.why) from None
        except (BadKey, BadSeal) as error:
            raise self._withdraw("roster" if method == "share" else "shares", str(error)) from None
        self._answers[method] = wanted, answer
        return answer

    def _require_state(self, state: State) -> None:
        if self.state != state:
            raise self._withdraw("order", f"a request for a client that is {state}", f"this one is {self.state}")

    def _withdraw(self, reason: Reason, what: str, why: str = "", hint: str = "") -> Withdraw:
        self.state, self._received_shares, self._answers = "withdrawn", {}, {}
        self._erase()
        return Withdraw(reason, what, why, hint)

    def _erase(self) -> None:
        """Forget the secrets of this round's keys; Python may have made copies of them, which stay in memory."""
        for name in ("_root", "_self_seed", "_nonce", "_pair_secrets", "_encapsulated", "_seal_keys", "_mask_keys"):
            self.__dict__.pop(name, None)


def valid_agreements(
    clients: Sequence[Advertisement], context2: bytes, survivors: Sequence[int], agreed: Sequence[tuple[int, bytes]]
) -> int:
    """Return how many distinct survivors have signed this list of survivors."""
    signed, among = agreed_bytes(context2, survivors), set(survivors)
    return sum(
        index in among and signed_by(clients[index - 1].identity, signature, signed) for index, signature in agreed
    )
