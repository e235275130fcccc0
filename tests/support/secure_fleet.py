"""A scripted fleet whose devices take part in secure rounds, on a virtual clock and with keys that a seed decides."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.faulty_fleet import AttentiveDevice, FaultyFleet
from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation.lattice import Lattice
from thinwire.aggregation.plan_codecs import lattice_of, rotation_key
from thinwire.core import Layout, RunPlan
from thinwire.core.fleet import Delivery
from thinwire.core.types import (
    Assignment,
    Phase,
    PhaseReply,
    ReplyHeader,
    UpdateId,
    Vector,
    phase_of,
    training_id,
)
from thinwire.privacy.contexts import (
    context_of_assignment,
    identity_of,
    model_digest,
    simulated_key,
    terms_of,
)
from thinwire.privacy.participant import Participant, SecureIdentity, Withdraw
from thinwire.server.secure_sum import PARTS
from thinwire.simulation import Behavior, ScriptedFleet
from thinwire.simulation.scripted_device import OutboxEntry, parts_of

_ECDSA = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def toy_plan(
    secure: str = "", *, rounds: int = 3, clients: int = 5, run: str = 'evaluate = "off"', cohort: str = ""
) -> str:
    """The text of a small plan under masks; `secure`, `run` and `cohort` are more lines of these tables."""
    return (
        f'[run]\ntask = "toy"\nrounds = {rounds}\n{run}\n'
        f"[cohort]\nclients = {clients}\nwait_for = {clients}\nmin_updates = 3\ndeadline_s = 40\n"
        f'late = "drop"\n{cohort}\n[local]\nlr = 1.0\nsteps = 1\nbuffers = "local"\n'
        f"[secure]\nenabled = true\n{secure}\n"
    )


@dataclass(frozen=True)
class SecureBehavior(Behavior):
    """The behavior of a device that leaves a secure round.

    It is silent from the phase `silent` on, or dead in `dies`, or it fails right after its message of `fails_after`.
    """

    silent: Phase | None = None
    dies: Phase | None = None
    fails_after: Phase | None = None


@dataclass
class Taking:
    """One device in one round."""

    delivery: Delivery
    behavior: SecureBehavior
    participant: Participant
    lattice: Lattice
    seed: bytes = b""
    trained: bool = False


@dataclass
class SecureDevice(AttentiveDevice):
    """A scripted device with the secrets of its open rounds in memory: they are gone when it dies."""

    plan: RunPlan = field(kw_only=True)
    layout: Layout = field(kw_only=True)
    change: Callable[[Assignment], Vector] = field(kw_only=True)
    sequence: int = 0
    pinned: Mapping[str, bytes] | None = None
    open: dict[str, Taking] = field(default_factory=dict)
    sent: dict[str, Vector] = field(default_factory=dict)  # assignment -> what its points represent

    def begin(self, delivery: Delivery, behavior: SecureBehavior) -> Taking:
        """Make the participant of a training assignment; one that came again goes on as it is."""
        assignment = delivery.assignment
        if (known := self.open.get(assignment.assignment_id)) is not None:
            return known
        assert assignment.secure is not None
        lattice = lattice_of(self.plan, self.layout.model_size, assignment.secure, assignment.identity)
        terms = terms_of(self.plan, assignment.secure, lattice.lanes, lattice.width, lattice.grid)
        context0 = context_of_assignment(assignment, model_digest(assignment.base_digest, None), terms)
        key, number = simulated_key(self.name), assignment.round * 100 + self.restarts
        identity = SecureIdentity(
            identity_of(key), lambda data: key.sign(data, _ECDSA), self.pinned,
            lambda: ScriptedRng(int.from_bytes(f"{self.name}-{number}".encode(), "big")), number.to_bytes(16, "big"),
        )  # fmt: skip
        participant = Participant(self.name, identity, terms, context0)
        self.open = {assignment.assignment_id: Taking(delivery, behavior, participant, lattice)}
        return self.open[assignment.assignment_id]

    def masked(self, taking: Taking) -> OutboxEntry:
        """Encode and mask the update of a round; the reply lies in the outbox from now on."""
        assignment, lattice = taking.delivery.assignment, taking.lattice
        assert assignment.secure is not None
        x = self.change(assignment).copy()
        window, rotation = assignment.secure.window, rotation_key(taking.seed)
        again = ScriptedRng(assignment.round * 1000 + ord(self.name))  # the same draws also in another process
        points = lattice.encode(x, 1, window, rotation, again)
        self.sent[assignment.assignment_id] = lattice.represented(points)
        values = {"weight": 1, "fits": lattice.fits(points, ScriptedRng(assignment.round * 2000 + ord(self.name)))}
        vectors = taking.participant.mask(points.lanes, [values[name] for name in taking.participant.terms.scalars])
        body = vectors.update.tobytes() + vectors.scalars
        self.sequence += 1
        header = ReplyHeader(
            assignment.assignment_id, UpdateId(assignment.run, self.name, self.sequence), assignment.base_version, 0,
            parts=tuple(replace(part, name=name) for part, name in zip(parts_of([body]), PARTS, strict=True)),
            codec="lattice", identity=assignment.identity,
        )  # fmt: skip
        kept = self.outbox[assignment.assignment_id] = OutboxEntry(taking.delivery, taking.behavior, header, body)
        return kept


class SecureFleet(FaultyFleet):
    """A scripted fleet of secure devices. A device answers requests of phases while it trains."""

    def _after(self, seconds: float, step: Callable[..., None], device: Any, *given: Any) -> None:
        own = {ScriptedFleet._pull: SecureFleet._pull, ScriptedFleet._crash: SecureFleet._crash}
        super()._after(seconds, own.get(step, step), device, *given)

    def _pull(self, device: Any) -> None:
        if device.link is None or (delivery := device.link.pull(0.0)) is None:
            return
        assignment = delivery.assignment
        if assignment.kind == "stop":
            device.receive(assignment)
            device.outbox.clear()
        elif assignment.kind == "secure":
            self._answer(device, delivery)
        elif assignment.assignment_id in device.outbox:
            self._upload(device, device.outbox[assignment.assignment_id])
        elif not device.receive(assignment):
            self._fail(device, assignment, "need-plan", "")
        else:
            self._train(device, delivery)
        self._after(0.0, ScriptedFleet._pull, device)

    def _crash(self, device: Any) -> None:
        super()._crash(device)
        device.open = {}

    def _train(self, device: SecureDevice, delivery: Delivery) -> None:
        behavior = device.choose_behavior(delivery.assignment)
        assert isinstance(behavior, SecureBehavior)
        taking = device.begin(delivery, behavior)
        self._say(device, delivery.assignment, "advertise", taking.participant.advertise)
        self._after(behavior.compute_s, SecureFleet._trained, device, delivery.assignment.assignment_id)

    def _trained(self, device: SecureDevice, assignment_id: str) -> None:
        if (taking := device.open.get(assignment_id)) is not None:
            taking.trained = True
            self._send_masked(device, taking)

    def _answer(self, device: SecureDevice, delivery: Delivery) -> None:
        assignment = delivery.assignment
        phase, taking = phase_of(assignment.assignment_id), device.open.get(training_id(assignment.assignment_id))
        assert delivery.bundle is not None
        request = delivery.bundle.read_bytes()
        if phase == "advertise":
            if taking is not None:
                self._say(device, assignment, phase, taking.participant.advertise)
        elif taking is None:  # another process of this device began the round, or it has failed
            training = training_id(assignment.assignment_id)
            self._fail(device, replace(assignment, assignment_id=training), "failed", "withdrawn")
        elif phase == "masked":
            taking.seed = taking.participant.prepare(request)
            self._send_masked(device, taking)
        else:
            self._say(device, assignment, phase, lambda: getattr(taking.participant, phase)(request))

    def _say(self, device: SecureDevice, assignment: Assignment, phase: str, make: Callable[[], bytes]) -> None:
        training = training_id(assignment.assignment_id)
        behavior = device.open[training].behavior
        if self._leaves(device, behavior, phase):
            return
        assert device.link is not None
        try:
            message = base64.b64encode(make()).decode()
        except Withdraw as withdrawn:
            self._fail(device, replace(assignment, assignment_id=training), "failed", withdrawn.reason)
            return
        self.receive(device.link, PhaseReply(assignment.assignment_id, message, identity=assignment.identity), None)
        if behavior.fails_after == phase:
            del device.open[training]
            self._fail(device, replace(assignment, assignment_id=training), "failed", "withdrawn")

    def _send_masked(self, device: SecureDevice, taking: Taking) -> None:
        if not (taking.seed and taking.trained) or taking.participant.state != "ready":
            return
        if not self._leaves(device, taking.behavior, "masked"):
            self._upload(device, device.masked(taking))

    def _leaves(self, device: SecureDevice, behavior: SecureBehavior, phase: str) -> bool:
        if behavior.dies == phase:
            self._after(0.0, ScriptedFleet._crash, device)
        return phase in (behavior.dies, behavior.silent)
