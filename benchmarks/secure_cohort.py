"""Our side of `benchmarks.secure_sum`: one secure round in one process, with one real client and the aggregator.

All clients are real participants: they advertise, share, open their shares, agree and unmask. Only the first one masks
a vector of the model's size, from the float32 update on. The others mask a vector of one lane, because n vectors take
n^2 streams. Instead of theirs, the aggregator adds one packed vector of random integers again and again, and one last
vector, which is such that the sum is the first client's lattice point times the number of survivors, under the
masks that the disclosed secrets remove. So `decode_sum` has to accept it, and its mean has to be what the first client
encoded. To the aggregator a vector costs the same whatever its integers are.

The client encodes and masks as a device does: it masks a copy of its lanes, because it may have to take its update back
until it knows the outcome.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from benchmarks.secure_case import CORRUPT, DROPOUT, WEIGHT, WEIGHT_MAX, Case, Meter, row_of
from thinwire.aggregation.lattice import Lattice, LatticeTerms, Points
from thinwire.core import Key
from thinwire.core.types import PHASES
from thinwire.privacy.contexts import SecureTerms, context_of_round
from thinwire.privacy.masks import add_masks, add_packed, lane_dtype, pack, packed_size
from thinwire.privacy.participant import MaskedVectors, Participant, SecureIdentity
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.secure_round import MaskedSum, SecureRound, UnmaskingKeys

WALK = Key(19)
WINDOW = 0
_ECDSA = ec.ECDSA(hashes.SHA256())


def threshold_of(case: Case) -> int:
    """The shares that reveal a secret, which the terms of the round decide."""
    return _terms(case, 1, 12).graph_of(case.clients).t


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run the round of a case; `folder` takes the vectors, as the aggregator's spool does."""
    cohort = _Cohort(case)
    first, *_ = cohort.names
    requests = dict.fromkeys(cohort.names, b"")
    for phase in PHASES[:-1]:
        if phase == "masked":
            cohort.mask(requests, folder)
            lost = set(cohort.names[case.clients - case.lost :])
            requests = {name: b"" for name in requests if name not in lost}
        answers = {name: cohort.answer(phase, name, request) for name, request in requests.items()}
        for name, message in answers.items():
            cohort.server.receive(name, message)
        requests = cohort.server.close()
    cohort.unmask(requests, folder)
    assert cohort.server.survivors[0] == first
    return row_of(case, cohort.keys, cohort.vector, cohort.aggregator, cohort.uplink, cohort.server.graph.t)


class _Cohort:
    """The participants of a round, the aggregator's state, and the meters of both."""

    def __init__(self, case: Case) -> None:
        self.case, self.uplink, self.keys, self.vector, self.aggregator = case, 0, Meter(), Meter(), Meter()
        self.names = [f"client-{number:03}" for number in range(case.clients)]
        lattice = self._lattice()
        self.terms = _terms(case, lattice.lanes, lattice.width)
        self.signers = {name: ec.generate_private_key(ec.SECP256R1()) for name in self.names}
        self.context0 = context_of_round("benchmark", {})
        self.server = SecureRound(self.terms, self.context0, {name: self._identity(name) for name in self.names})
        self.participants = {name: self._participant(name) for name in self.names[1:]}
        with self.keys:
            self.participants[self.names[0]] = self._participant(self.names[0])

    def _lattice(self) -> Lattice:
        case = self.case
        terms = LatticeTerms(case.params, case.bits, case.support, case.rotate, case.clients, WEIGHT_MAX, clip=1.0)
        return Lattice(terms, WALK)

    def _identity(self, name: str) -> bytes:
        return self.signers[name].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def _participant(self, name: str) -> Participant:
        signer = self.signers[name]
        identity = SecureIdentity(self._identity(name), lambda data: signer.sign(data, _ECDSA), process=bytes(16))
        return Participant(name, identity, self.terms, self.context0)

    def answer(self, phase: str, name: str, request: bytes) -> bytes:
        """A client's message; the first client's is measured."""
        if phase == "masked":
            return b""
        one = self.participants[name]
        made: dict[str, Callable[[], bytes]] = {"advertise": one.advertise, "share": lambda: one.share(request)}
        made |= {"agree": lambda: one.agree(request), "unmask": lambda: one.unmask(request)}
        if name != self.names[0]:
            return made[phase]()
        with self.keys:
            message = made[phase]()
        self.uplink += len(message)
        return message

    def mask(self, deliveries: Mapping[str, bytes], folder: Path) -> None:
        """Have each client mask its vector; the first one's goes into the folder and to `self.sent`."""
        for name in self.names[1:]:
            other = self.participants[name]
            other.prepare(deliveries[name])
            other.terms = replace(self.terms, lanes=1)  # the contexts are made: from here on only its masks are short
            other.mask(np.zeros(1, lane_dtype(self.terms.width)), [WEIGHT])
        first = self.participants[self.names[0]]
        with self.keys:
            seed = first.prepare(deliveries[self.names[0]])
        self.rotation = Key(*struct.unpack("<QQ", seed[:16]))
        self.vector.base()
        x = self.case.vector()
        with self.vector:
            self.points, sent = self._masked(first, x)
        sent.update.tofile(folder / "first")
        self.scalars = sent.scalars
        self.uplink += len(sent.update) + len(sent.scalars)

    def _masked(self, first: Participant, x: NDArray[np.float32]) -> tuple[Points, MaskedVectors]:
        points = self._lattice().encode(x, WEIGHT, WINDOW, self.rotation, SystemRng())
        return points, first.mask(points.lanes.copy(), [points.weight])

    def unmask(self, requests: Mapping[str, bytes], folder: Path) -> None:
        """Measure the aggregator: disclosures, vectors, masks, decoding."""
        disclosures = {name: self.answer("unmask", name, request) for name, request in requests.items()}
        with self.aggregator:
            for name, message in disclosures.items():
                self.server.receive(name, message)
            self.server.close()
        survivors = len(self.server.survivors)
        scalars = self._others(folder, survivors, self.server.unmasking_keys())
        wanted = self._lattice().represented(self.points)
        vectors = ["first", *["random"] * (survivors - 2), "last"]
        self.aggregator.base()
        with self.aggregator:
            mean, sums = self._unmasked([(folder / name, scalars[name]) for name in vectors])
        np.testing.assert_allclose(mean, wanted, rtol=1e-5, atol=1e-12)
        assert sums == {"weight": survivors * WEIGHT}

    def _unmasked(self, vectors: list[tuple[Path, bytes]]) -> tuple[NDArray[np.float32], dict[str, int]]:
        total = MaskedSum(self.terms)
        for path, scalars in vectors:
            total.add(np.memmap(path, np.uint8, "r"), scalars)
        lanes, sums = total.unmask(self.server.unmasking_keys())
        return self._lattice().decode_sum(lanes, total.clients, sums["weight"], WINDOW, self.rotation), sums

    def _others(self, folder: Path, survivors: int, keys: UnmaskingKeys) -> dict[str, bytes]:
        """Write the vectors that stand for the other clients', and return the scalars of all by the vector's name."""
        rng, width = np.random.default_rng(2), self.terms.width
        random = rng.integers(0, 1 << width, self.terms.lanes, lane_dtype(width))
        last = self.points.lanes * self.points.lanes.dtype.type(survivors)
        add_masks(last, [(key, -sign) for key, sign in keys.update])
        first = np.zeros_like(last)
        add_packed(np.memmap(folder / "first", np.uint8, "r"), width, first)
        last -= first
        for _ in range(survivors - 2):
            last -= random
        for name, lanes in (("random", random), ("last", last)):
            packed = np.empty(packed_size(lanes.size, width), np.uint8)
            pack(lanes, width, packed)
            packed.tofile(folder / name)
        counted = np.array([survivors, survivors * WEIGHT], np.uint64)
        add_masks(counted, [(key, -sign) for key, sign in keys.scalars])
        counted -= np.frombuffer(self.scalars, "<u8")
        nothing = np.zeros(2, "<u8").tobytes()
        return {"first": self.scalars, "random": nothing, "last": counted.astype("<u8").tobytes()}


def _terms(case: Case, lanes: int, width: int) -> SecureTerms:
    return SecureTerms(case.clients, CORRUPT, DROPOUT, lanes, width, graph="complete", post_quantum=case.post_quantum)
