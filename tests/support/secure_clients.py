"""A secure round of real handlers with tiny tasks: their messages are passed to the aggregator's side by hand."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.secure_cohort import _ECDSA, identity, identity_key
from tests.support.small_task import RUN, Aggregator, cross_entropy, examples, linear, task_of
from thinwire.aggregation.lattice import Lattice
from thinwire.aggregation.plan_codecs import lattice_of, rotation_key
from thinwire.client.execute import Begun
from thinwire.client.handler import AssignmentHandler
from thinwire.client.secure import SecureIdentity
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.core.fleet import Delivery
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import private_folder
from thinwire.core.types import (
    Assignment,
    Failure,
    Part,
    PhaseReply,
    Reply,
    ReplyHeader,
    SecureWork,
    assignment_id_of,
    phase_id,
)
from thinwire.privacy.contexts import SecureTerms, context_of_assignment, model_digest, terms_of
from thinwire.privacy.secure_round import MaskedSum, SecureRound

PHASES = ("share", "masked", "agree", "unmask")


def secure_plan(secure: str = "", run: str = 'evaluate = "off"', local: str = "", uplink: str = "") -> RunPlan:
    """A plan of four clients under masks."""
    return RunPlan.parse(
        f'[run]\ntask = "small"\nrounds = 4\n{run}\n[cohort]\nclients = 4\ndeadline_s = 60\n'
        f"[local]\nlr = 0.1\nbatch = 8\nsteps = 3\n{local}\n[uplink]\n{uplink}\n"
        f"[secure]\nenabled = true\nmax_corrupt = 0.25\nmax_dropout = 0.25\nclip = 1.0\n{secure}"
    )


def secure_identity(number: int, **more: Any) -> SecureIdentity:
    key = identity_key(number)
    return SecureIdentity(identity(number), lambda data: key.sign(data, _ECDSA), **more)


def name_of(number: int) -> str:
    return f"pi-{number:02}"


def message_of(reply: Reply | None) -> bytes:
    assert isinstance(reply, PhaseReply), reply
    return base64.b64decode(reply.message)


@dataclass
class SecureClients:
    """The handlers of all devices of a run, and the aggregator's end of its current round."""

    folder: Path
    plan: RunPlan = field(default_factory=secure_plan)
    clients: int = 4
    functions: Mapping[str, Any] = field(default_factory=dict)
    handlers: dict[str, AssignmentHandler] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)  # device -> what ended its training assignment
    begun: dict[str, Begun] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)
    number: int = 0
    identities: Mapping[int, SecureIdentity] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aggregator = Aggregator(self.folder / "aggregator", self.task(0), self.plan)
        self.params = self.aggregator.first.vector
        for number in range(self.clients):
            self.handlers[name_of(number)] = self.handler(number)

    def task(self, number: int, **functions: Any) -> Any:
        def data(client: ClientInfo) -> Split:
            return Split(examples(24, seed=number + 3), examples(6 + number, 4))

        return task_of(**{"model": linear, "data": data, "loss": cross_entropy, **self.functions, **functions})

    def handler(self, number: int, **options: Any) -> AssignmentHandler:
        """A device as a new process would find it."""
        name = name_of(number)
        folder = private_folder(self.folder / name)
        identity = self.identities.get(number) or secure_identity(number)
        return AssignmentHandler(name, self.task(number), folder, ClientInfo(name), **{"secure": identity, **options})

    def assignment(self, name: str, **changed: Any) -> Delivery:
        made = self.aggregator.assign(
            self.number, params=self.params, assignment_id=assignment_id_of(RUN, self.number, name), codec="lattice",
            secure=SecureWork(self.clients, window=self.number - 1, clip=self.clip), identity="run-identity",
            deadline_s=60.0,
        )  # fmt: skip
        return replace(made, assignment=replace(made.assignment, **changed))

    @property
    def clip(self) -> float:
        return 1.0 if self.plan.secure.clip == "auto" else self.plan.secure.clip

    def open(self, away: Collection[str] = (), **changed: Any) -> None:
        """Send the assignments of the next round, and have all clients advertise and train."""
        self.number += 1
        self.replies.clear()
        self.begun.clear()
        assignment = self.assignment("pi-00").assignment
        self.work = assignment.secure
        assert self.work is not None
        self.lattice: Lattice = lattice_of(self.plan, self.aggregator.first.layout.size, self.work, "run-identity")
        self.terms: SecureTerms = terms_of(self.plan, self.work, self.lattice.lanes, self.lattice.width)
        context = context_of_assignment(
            assignment, self.plan, model_digest(assignment.base_digest, self.aggregator.first.buffers), self.terms
        )
        self.server = SecureRound(self.terms, context, {name_of(n): identity(n) for n in range(self.clients)})
        for name in self.handlers:
            if name not in away:
                self.begin(name, **changed)

    def begin(self, name: str, **changed: Any) -> Any:
        """Have one client advertise and train; its advertisement is given to the aggregator."""

        def send(reply: PhaseReply) -> None:
            self.server.receive(name, message_of(reply))

        begun = self.handlers[name].begin(self.assignment(name, **changed), lambda: False, self.said.append, send=send)
        if isinstance(begun, Begun):
            self.begun[name] = begun
        else:
            self.replies[name] = begun[0]
        return begun

    def request(self, name: str, phase: str, request: bytes) -> Delivery:
        path = self.folder / "request"
        path.write_bytes(request)
        training = self.assignment(name).assignment
        part = Part("request", len(request), hashlib.sha256(request).hexdigest())
        return Delivery(
            Assignment(
                phase_id(training.assignment_id, phase), RUN, "small", "secure", self.plan.digest, self.number,
                parts=(part,), identity="run-identity",
            ),
            path,
        )  # fmt: skip

    def phase(self, name: str, phase: str, request: bytes) -> Reply | None:
        """What a client answers to a request."""
        return self.handlers[name].answer_phase(self.request(name, phase, request), self.said.append)

    def finish(self, name: str) -> ReplyHeader:
        """Have a client encode and mask its update; its vectors are kept for `sum`."""
        assert self.handlers[name].rounds.is_ready(self.begun[name].job.assignment.assignment_id)
        header, body = self.handlers[name].finish(self.begun[name])
        assert isinstance(header, ReplyHeader), header
        assert body is not None
        self.replies[name], self.bodies[name] = header, body.read_bytes()
        return header

    def run(self, lost: Mapping[str, Collection[str]] | None = None, until: str = "unmask") -> None:
        """Pass the messages of all phases; clients in `lost` send no message from their phase on."""
        away = set[str]()
        requests = self.server.close()
        for phase in PHASES:
            away |= set((lost or {}).get(phase, ()))
            for name, request in requests.items():
                if name in away:
                    continue
                reply = self.phase(name, phase, request)
                if isinstance(reply, Failure):
                    self.replies[name] = reply
                    self.server.drop(name)
                elif phase == "masked":
                    assert reply is None
                    self.finish(name)
                    self.server.receive(name)
                else:
                    self.server.receive(name, message_of(reply))
            requests = self.server.close()
            if phase == until:
                return

    def sum(self) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
        """The mean update that the aggregator decodes, and the sums of the scalars."""
        total = MaskedSum(self.terms)
        for name in self.server.survivors:
            total.add(*self.vectors(name))
        lanes, scalars = total.unmasked(self.server.removal())
        assert self.work is not None
        seed = rotation_key(self.server.rotation_seed)
        count = len(self.server.survivors)
        return self.lattice.decode_sum(lanes, count, scalars["weight"], self.work.window, seed), scalars

    def vectors(self, name: str) -> tuple[bytes, bytes]:
        """The masked update and the scalars of a client, as they left it."""
        length = self.replies[name].parts[0].length
        return self.bodies[name][:length], self.bodies[name][length:]

    def residual(self, name: str) -> np.ndarray[Any, Any] | None:
        return self.handlers[name].kept[RUN][1].residual
