"""The contexts that bind each message of secure aggregation to one round, and the commitments and signatures on them.

A context is a SHA-256 of all that the clients of a round must have in common. It is in every key, seal and signature
that follows. So the masks of clients to which the aggregator sent different data do not cancel (Pasquini et al. 2022).

    ctx0   the plan, the model as loaded, the training order and the terms of the round; before the roster is known.
           `Participant` and `SecureRound` add the terms themselves (`SecureTerms.bound`)
    ctx1   ctx0 and the roster with all keys and commitments; for shares
    ctx2   ctx1 and the clients whose shares were delivered, with their opened nonces; for masks and agreement
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.core.plan import digest_of
from thinwire.core.secure_numbers import fewest_survivors
from thinwire.core.types import SecureWork
from thinwire.privacy.graph import Graph, find_graph, neighbours
from thinwire.privacy.keys import SUITE, SUITE_PQ
from thinwire.privacy.summed_metrics import scalar_names

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Assignment, Vector

_ECDSA = ec.ECDSA(hashes.SHA256())
_CURVES = (ec.SECP256R1, ec.SECP384R1)


@dataclass(frozen=True)
class SecureTerms:
    """The terms of a secure round, which all clients compute from the plan and which are part of ctx0.

    `selected` clients are in the round, over-selection included; `max_corrupt` and `max_dropout` are shares of them.
    `rounds` are those of the run, over which the bounds of a k-regular graph are added. An update has `lanes` lanes of
    `width` bits. `scalars` are the names of the 64-bit lanes of the second vector; a check lane before them holds the
    constant 1 of each client.
    """

    selected: int
    max_corrupt: float
    max_dropout: float
    lanes: int
    width: int
    min_survivors: int = 0
    adversary: Literal["curious", "malicious"] = "curious"
    graph: Literal["auto", "complete", "k-regular"] = "auto"
    rounds: int = 1
    scalars: tuple[str, ...] = ("weight",)
    post_quantum: bool = False
    grid: str = ""  # of a lattice with noise: its step and the noise of each client

    def bound(self, context0: bytes) -> bytes:
        """Return ctx0 with these terms in it, so that clients with other terms have another context."""
        values = astuple(self) if self.grid else astuple(self)[:-1]
        return digest("thinwire secure terms", context0, *(repr(value).encode() for value in values))

    def graph_of(self, clients: int) -> Graph:
        """Return the graph of a roster of so many clients; raise PlanError if they are too few."""
        return find_graph(
            self.selected, clients, self.max_corrupt, self.max_dropout, self.adversary, self.graph, self.rounds
        )

    def min_survivors_of(self, graph: Graph) -> int:
        """Return the fewest clients with which a phase may close: the graph's number, or the plan's if it is larger."""
        return max(graph.min_survivors, self.min_survivors)


def terms_of(plan: RunPlan, work: SecureWork, lanes: int, width: int, grid: str = "") -> SecureTerms:
    """Return the terms of a round, from its plan and from the work that all its clients share.

    `lanes`, `width` and `grid` are those of its `Lattice`.

    `weight` is the client's weight. `fits` is 1 if its update was not above the clip, and follows the automatic clip.
    The others are those of metrics and histograms (`scalar_names`).
    """
    secure = plan.secure
    scalars = ("weight", *(["fits"] if clip_follows(plan) else []), *scalar_names(secure))
    is_noised = plan.privacy.mode == "distributed"
    survivors = fewest_survivors(secure, work.selected, noised=True) if is_noised else secure.min_survivors
    return SecureTerms(
        work.selected, secure.max_corrupt, secure.max_dropout, lanes, width, survivors, secure.adversary,
        secure.graph, plan.run.rounds, scalars, secure.post_quantum, grid,
    )  # fmt: skip


def clip_follows(plan: RunPlan) -> bool:
    """Return True if the number of updates that fitted the last clip decides the clip of the next secure round.

    With privacy this holds only if the plan says adaptive, because then the number has noise.
    """
    return plan.privacy.adaptive if plan.privacy.mode != "off" else plan.secure.clip == "auto"


def model_digest(base_digest: str, buffers: Vector | None) -> bytes:
    """Return the digest (32 bytes) of a model as it was loaded, for ctx0.

    `base_digest` is the SHA-256 (hex) of its parameters, which the client has checked, with all vectors that clients
    share. `buffers` are the float buffers that came with it, None if the model has none.
    """
    held = buffers.astype("<f4", copy=False).tobytes() if buffers is not None else b""
    return digest("thinwire secure model", bytes.fromhex(base_digest), held)


def context_of_assignment(assignment: Assignment, model: bytes, terms: SecureTerms) -> bytes:
    """Return ctx0 (32 bytes) of a training assignment.

    `model` is the `model_digest` of the model as it was loaded. A client that was told another model, another amount of
    work or another deadline has another context. So has one that evaluates where others do not: the sum of the metrics
    would be its own.

    The plan counts as it was sent and the protocol version not at all, so that clients of two versions of Thinwire can
    be in one round: a later version may know more keys, and each client speaks its own version with the aggregator.
    """
    sent = assignment.plan if isinstance(assignment.plan, str) else digest_of(assignment.plan)
    work, secure = assignment.work, assignment.secure or SecureWork()
    return context_of_round(
        SUITE_PQ if terms.post_quantum else SUITE,
        {
            "plan": sent, "run": assignment.run, "task": assignment.task, "codec": assignment.codec,
            "further": assignment.is_follow_up, "identity": assignment.identity, "round": assignment.round,
            "layout": assignment.layout_digest, "version": assignment.base_version, "model": model,
            "references": assignment.references_from, "steps": work.steps, "batch": work.batch,
            "step clip": struct.pack("<d", work.clip), "deadline": struct.pack("<d", assignment.deadline_s),
            "evaluates": int(assignment.evaluates), "selected": secure.selected, "window": secure.window,
            "clip": struct.pack("<d", secure.clip), "lanes": terms.lanes, "width": terms.width,
            "scalars": "\n".join(terms.scalars),
        },
    )  # fmt: skip


def holders_of(graph: Graph, context1: bytes) -> dict[int, list[int]]:
    """Return for each index the rising indices of the clients that hold its shares: its neighbours and itself.

    In the complete graph all have one list, because a list for each of n clients would take n^2 numbers on a device.
    """
    if graph.is_complete:
        everybody = list(range(1, graph.clients + 1))
        return dict.fromkeys(everybody, everybody)
    others = neighbours(graph.clients, graph.k, context1)
    return {client + 1: sorted([client + 1, *(one + 1 for one in row)]) for client, row in enumerate(others)}


def digest(label: str, *fields: bytes) -> bytes:
    """Return the SHA-256 of a label and length-prefixed fields (32 bytes).

    >>> digest("a", b"b", b"c") == digest("a", b"bc", b"")
    False
    """
    made = hashlib.sha256()
    for field in (label.encode(), *fields):
        made.update(struct.pack("<Q", len(field)) + field)
    return made.digest()


def context_of_round(suite: str, facts: Mapping[str, bytes | str | int]) -> bytes:
    """Return ctx0 (32 bytes): the digest of the suite and of all named facts on which the clients must agree.

    The facts are sorted by name, and text and numbers differ: "1" is not 1.
    """
    fields = [suite.encode()]
    for name in sorted(facts):
        value = facts[name]
        kind = b"b" if isinstance(value, bytes) else b"s" if isinstance(value, str) else b"i"
        fields += [name.encode(), kind, value if isinstance(value, bytes) else str(value).encode()]
    return digest("thinwire secure context 0", *fields)


def context_of_roster(context0: bytes, roster: bytes) -> bytes:
    """Return ctx1 (32 bytes), from ctx0 and the bytes of the `Roster`."""
    return digest("thinwire secure context 1", context0, roster)


def context_of_sharers(context1: bytes, sharers: Sequence[int], nonces: Sequence[bytes]) -> bytes:
    """Return ctx2 (32 bytes), from ctx1, the indices in U2 and their opened nonces."""
    return digest("thinwire secure context 2", context1, index_list(sharers), *nonces)


def commitment(label: str, context: bytes, *fields: bytes) -> bytes:
    """Return a commitment to fields of which at least one is a secret of 32 random bytes or more."""
    return digest(f"thinwire secure commitment {label}", context, *fields)


def signed_by(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Return True if this is the ECDSA-SHA256 signature of `data` by a P-256 or P-384 key, given in DER."""
    try:
        key = load_der_public_key(public_key)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
            return False
        key.verify(signature, data, _ECDSA)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def simulated_key(device: str) -> ec.EllipticCurvePrivateKey:
    """Return the identity key (P-256) of a simulated client. Its name decides it, so it protects nothing."""
    number = int.from_bytes(digest("thinwire simulated identity", device.encode()), "big")
    return ec.derive_private_key(1 + number % (2**255), ec.SECP256R1())


def identity_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a device's identity: its public key in DER (SubjectPublicKeyInfo)."""
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def agreed_bytes(context2: bytes, survivors: Sequence[int]) -> bytes:
    """Return the bytes that a client signs in `agree`: ctx2 and the hash of the survivors' indices."""
    return digest("thinwire secure agree", context2, digest("survivors", index_list(survivors)))


def index_list(clients: Iterable[int]) -> bytes:
    """Return the bytes of a list of indices: their number, then each in 16 bits."""
    listed = tuple(clients)
    return struct.pack(f"<{len(listed) + 1}H", len(listed), *listed)
