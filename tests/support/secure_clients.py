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
from thinwire.client.admission import AdmissionController
from thinwire.client.execute import Begun, Trained
from thinwire.client.handler import AssignmentHandler
from thinwire.client.policy import Policy
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
from thinwire.privacy.participant import SecureIdentity
from thinwire.privacy.secure_round import MaskedSum, SecureRound

PHASES = ("share", "masked", "agree", "unmask")


def secure_plan(secure: str = "", run: str = 'evaluate = "off"', local: str = "", uplink: str = "") -> RunPlan:
    """A plan of four clients under masks; a line of `secure` replaces the usual one of its key."""
    usual = "max_corrupt = 0.25\nmax_dropout = 0.25\nclip = 1.0"
    table = {line.partition(" = ")[0]: line for line in f"{usual}\n{secure}".splitlines() if line}
    local = local if "buffers" in local else f'{local}\nbuffers = "local"'
    return RunPlan.parse(
        f'[run]\ntask = "small"\nrounds = 4\n{run}\n'
        '[cohort]\nclients = 4\ndeadline_s = 60\nlate = "drop"\nmax_weight = "none"\n'
        f"[local]\nlr = 0.1\nbatch = 8\nsteps = 3\n{local}\n[uplink]\n{uplink}\n"
        "[secure]\nenabled = true\n" + "\n".join(table.values())
    )


def secure_identity(number: int, **more: Any) -> SecureIdentity:
    key = identity_key(number)
    return SecureIdentity(identity(number), lambda data: key.sign(data, _ECDSA), **more)


def name_of(number: int) -> str:
    return f"pi-{number:02}"


def trained_of(begun: Begun) -> Trained:
    assert isinstance(begun.outcome, Trained)
    return begun.outcome


def changed_of(begun: Begun) -> np.ndarray[Any, Any]:
    """What a client has learned, before anything is encoded."""
    change = trained_of(begun).raw_update
    assert change is not None
    return change.copy()


def message_of(reply: Reply | None) -> bytes:
    assert isinstance(reply, PhaseReply), reply
    return base64.b64decode(reply.message)


def failure_of(clients: SecureClients, name: str) -> tuple[str, str]:
    """The kind and the text with which a client's training assignment ended."""
    found = clients.replies[name]
    assert isinstance(found, Failure), found
    assert found.assignment_id.endswith(f".{name}")
    return found.kind, found.text


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
    headers: dict[str, ReplyHeader] = field(default_factory=dict)  # of masked updates
    bodies: dict[str, bytes] = field(default_factory=dict)
    number: int = 0
    identities: Mapping[int, SecureIdentity] = field(default_factory=dict)
    owner: Policy | None = None
    windows: int = 1
    clip: float = 1.0
    run_identity: str = "run-identity"
    requests: dict[str, bytes] = field(default_factory=dict)  # of the open phase
    requested: dict[str, dict[str, bytes]] = field(default_factory=dict)  # phase -> requests
    answered: dict[str, dict[str, Reply | None]] = field(default_factory=dict)  # phase -> what the clients said

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
        admission = AdmissionController(self.owner, folder, carries=identity.carries)
        return AssignmentHandler(
            self.task(number), folder, ClientInfo(name), **{"secure": identity, "admission": admission, **options}
        )

    def assignment(self, name: str, **changed: Any) -> Delivery:
        work = SecureWork(self.clients, (self.number - 1) % self.windows, self.clip)
        made = self.aggregator.assign(
            self.number, params=self.params, assignment_id=assignment_id_of(RUN, self.number, name), codec="lattice",
            secure=work, identity=self.run_identity, deadline_s=60.0,
        )  # fmt: skip
        return replace(made, assignment=replace(made.assignment, **changed))

    def open(self, away: Collection[str] = (), **changed: Any) -> None:
        """Send the assignments of the next round, and have all clients advertise and train."""
        self.number += 1
        self.replies.clear()
        self.begun.clear()
        assignment = self.assignment("pi-00").assignment
        self.work = assignment.secure
        assert self.work is not None
        self.lattice: Lattice = lattice_of(self.plan, self.aggregator.first.layout.size, self.work, self.run_identity)
        self.terms: SecureTerms = terms_of(
            self.plan, self.work, self.lattice.lanes, self.lattice.width, self.lattice.grid
        )
        context = context_of_assignment(
            assignment, model_digest(assignment.base_digest, self.aggregator.first.buffers), self.terms
        )
        self.server = SecureRound(self.terms, context, {name_of(n): identity(n) for n in range(self.clients)})
        for name in self.handlers:
            if name not in away:
                self.begin(name, **changed)

    def begin(self, name: str, **changed: Any) -> Any:
        """Have one client advertise and train; its advertisement is given to the aggregator."""

        sent = list[PhaseReply]()
        begun = self.handlers[name].begin(
            self.assignment(name, **changed), lambda: False, self.said.append, send=sent.append
        )
        if isinstance(begun, Begun):
            self.begun[name] = begun
        else:
            self.replies[name] = begun[0]
        for reply in sent:
            self.server.receive(name, message_of(reply))
        return begun

    def request(self, name: str, phase: str, request: bytes) -> Delivery:
        path = self.folder / "request"
        path.write_bytes(request)
        training = self.assignment(name).assignment
        part = Part("request", len(request), hashlib.sha256(request).hexdigest())
        return Delivery(
            Assignment(
                phase_id(training.assignment_id, phase), RUN, "small", "secure", self.plan.digest, self.number,
                parts=(part,), identity=self.run_identity,
            ),
            path,
        )  # fmt: skip

    def phase(self, name: str, phase: str, request: bytes) -> Reply | None:
        """What a client answers to a request."""
        return self.handlers[name].handle_phase(self.request(name, phase, request), self.said.append)

    def finish(self, name: str) -> ReplyHeader:
        """Have a client encode and mask its update; its vectors are kept for `sum`."""
        assert self.handlers[name].rounds.is_ready(self.begun[name].job.assignment.assignment_id)
        header, body = self.handlers[name].finish(self.begun[name])
        assert isinstance(header, ReplyHeader), self.said
        assert body is not None
        self.replies[name] = self.headers[name] = header
        self.bodies[name] = body.read_bytes()
        return header

    def run(self, lost: Mapping[str, Collection[str]] | None = None, until: str = "unmask") -> None:
        """Pass the messages of all phases; clients in `lost` send no message from their phase on."""
        self.requests = self.server.close()
        self.resume("share", lost, until)

    def resume(self, phase: str, lost: Mapping[str, Collection[str]] | None = None, until: str = "unmask") -> None:
        """Go on with the requests of a phase."""
        away = set[str]()
        for step in PHASES[PHASES.index(phase) : PHASES.index(until) + 1]:
            away |= set((lost or {}).get(step, ()))
            self.requested[step], self.answered[step] = self.requests, {}
            for name, request in self.requests.items():
                if name not in away:
                    self._pass(step, name, request)
            if not self.server.outstanding and len(self.server.dropped) == self.clients:
                return
            self.requests = self.server.close()

    def _pass(self, phase: str, name: str, request: bytes) -> None:
        reply = self.answered[phase][name] = self.phase(name, phase, request)
        if isinstance(reply, Failure):
            self.replies[name] = reply
            self.server.drop(name)
        elif phase == "masked":
            assert reply is None
            self.finish(name)
            self.server.receive(name)
        else:
            self.server.receive(name, message_of(reply))

    def sum(self) -> tuple[np.ndarray[Any, Any], dict[str, int]]:
        """The mean update that the aggregator decodes, and the sums of the scalars."""
        total = MaskedSum(self.terms)
        for name in self.server.survivors:
            total.add(*self.vectors(name))
        lanes, scalars = total.unmask(self.server.unmasking_keys())
        assert self.work is not None
        seed = rotation_key(self.server.rotation_seed)
        count = len(self.server.survivors)
        return self.lattice.decode_sum(lanes, count, scalars["weight"], self.work.window, seed), scalars

    def vectors(self, name: str) -> tuple[bytes, bytes]:
        """The masked update and the scalars of a client, as they left it."""
        length = len(self.bodies[name]) - 8 * (1 + len(self.server.terms.scalars))
        return self.bodies[name][:length], self.bodies[name][length:]

    def residual(self, name: str) -> Any:
        return self.handlers[name].runs[RUN][1].residual
