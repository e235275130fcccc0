"""A cohort of participants and one aggregator in memory: the messages of a secure round, passed by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.scripted_rng import ScriptedRng
from thinwire.core.types import PHASES, Phase
from thinwire.privacy.contexts import SecureTerms, context_of_round
from thinwire.privacy.masks import centered, lane_dtype
from thinwire.privacy.participant import MaskedVectors, Participant, SecureIdentity, Withdraw
from thinwire.privacy.secure_round import MaskedSum, SecureRound

Tamper = Callable[[Phase, str, bytes], bytes]
_ECDSA = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


@cache
def identity_key(number: int) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(number + 1000, ec.SECP256R1())


def identity(number: int) -> bytes:
    return identity_key(number).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def name_of(number: int) -> str:
    return f"client-{number:03}"


def terms_of(clients: int, threshold: int, **more: Any) -> SecureTerms:
    """Terms whose complete graph has this threshold."""
    if more.get("adversary") == "malicious":
        corrupt, dropout = 2 * threshold - clients - 1, 0
    else:
        few = threshold <= clients // 2 + 1
        corrupt, dropout = (0, clients - max(threshold, 3)) if few else (threshold - 1, 0)
    made = SecureTerms(
        **{
            "selected": clients, "max_corrupt": corrupt / clients, "max_dropout": dropout / clients, "lanes": 21,
            "width": 12, "scalars": ("weight", "examples"), **more,
        }
    )  # fmt: skip
    assert more or made.graph_of(clients).t == threshold
    return made


@dataclass
class Cohort:
    """All clients of one round, their vectors, and what became of the round."""

    terms: SecureTerms
    clients: int
    seed: int = 0
    context0: bytes = b""
    pinned: dict[str, bytes] | None = None
    participants: dict[str, Participant] = field(default_factory=dict)
    vectors: dict[str, MaskedVectors] = field(default_factory=dict)
    points: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    sent: list[tuple[Phase, str, bytes]] = field(default_factory=list)
    requests: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context0 = self.context0 or context_of_round("test", {"round": self.seed})
        self.server = SecureRound(
            self.terms, self.context0, {name_of(number): identity(number) for number in range(self.clients)}
        )
        for number in range(self.clients):
            self.participants[name_of(number)] = self.participant(number)

    def participant(self, number: int, **more: Any) -> Participant:
        own = SecureIdentity(
            identity(number), lambda data: identity_key(number).sign(data, _ECDSA), self.pinned,
            lambda: ScriptedRng(self.seed * 1000 + number), bytes([number % 256]) * 16,
        )  # fmt: skip
        return Participant(name_of(number), own, self.terms, more.pop("context0", self.context0), **more)

    def point(self, name: str) -> np.ndarray[Any, Any]:
        """The integers that a client adds to the sum."""
        if name not in self.points:
            rng = np.random.default_rng([self.seed, int(name.rsplit("-", 1)[1])])
            most = (1 << self.terms.width - 1) // self.clients - 1
            self.points[name] = rng.integers(-most, most + 1, self.terms.lanes)
        return self.points[name]

    def scalars(self, name: str) -> list[int]:
        number = int(name.rsplit("-", 1)[1])
        return [number + 1, 10 * number][: len(self.terms.scalars)]

    def answer(self, phase: Phase, name: str, request: bytes) -> bytes:
        """What a participant answers to a request; its vectors are kept in `vectors`."""
        one = self.participants[name]
        match phase:
            case "advertise":
                return one.advertise()
            case "share":
                return one.share(request)
            case "masked":
                one.prepare(request)
                lanes = self.point(name).astype(np.int64).astype(lane_dtype(self.terms.width))
                self.vectors[name] = one.mask(lanes, self.scalars(name))
                return b""
            case "agree":
                return one.agree(request)
        return one.unmask(request)

    def run(
        self,
        lost: Mapping[Phase, Collection[str]] | None = None,
        tamper: Tamper = lambda phase, name, message: message,
        until: Phase = "unmask",
    ) -> None:
        """Pass the messages of all phases; `lost` clients send no message from their phase on."""
        requests = dict.fromkeys(self.participants, b"")
        away = set[str]()
        for phase in PHASES:
            away |= set((lost or {}).get(phase, ()))
            for name in sorted(requests):
                if name in away:
                    continue
                message = tamper(phase, name, self.answer(phase, name, requests[name]))
                self.sent.append((phase, name, message))
                self.server.receive(name, message)
            requests = self.requests = self.server.close()
            if phase == until:
                return

    def sum(self) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
        """The sum that the aggregator has after it has removed the masks."""
        total = MaskedSum(self.terms)
        for name in self.server.survivors:
            total.add(self.vectors[name].update, self.vectors[name].scalars)
        lanes, scalars = total.unmask(self.server.unmasking_keys())
        return centered(lanes, self.terms.width), scalars

    def wanted(self, names: Sequence[str]) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
        """The sum of these clients' points and scalars, in the clear."""
        scalars = [sum(values) for values in zip(*(self.scalars(name) for name in names), strict=True)]
        return (
            np.sum([self.point(name) for name in names], axis=0),
            dict(zip(self.terms.scalars, scalars, strict=True)),
        )


def cohort_at(phase: str, **more: Any) -> Cohort:
    """A cohort of 5 in which this phase's requests are ready."""
    before = {"share": "advertise", "masked": "share", "agree": "masked", "unmask": "agree"}
    cohort = Cohort(terms_of(5, 3, **more), 5)
    cohort.run(until=before[phase])  # type: ignore[arg-type]  # a literal by phase
    return cohort


def first(cohort: Cohort) -> Any:
    return cohort.participants[name_of(0)]


def reason_of(call: Callable[[], Any]) -> str:
    """Why the client withdraws in this call."""
    with pytest.raises(Withdraw) as raised:
        call()
    return raised.value.reason
