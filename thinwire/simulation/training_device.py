"""Simulates a scripted device that trains: a real client's session, for as many seconds as a script decides.

The session is that of a device, with its outbox, residual and partial work. It trains when the assignment is delivered,
on a clock of its own that only steps move. Its reply exists once that time has passed on the fleet's clock. So replies
arrive in the order of the scripted speeds, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from thinwire.client.admission import AdmissionController
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import BaseModelCache
from thinwire.client.task import LoadedTask
from thinwire.client.train.runtime import use_threads
from thinwire.core.fleet import Delivery
from thinwire.core.types import Assignment, Reply, ReplyHeader, UpdateId, UpdateOutcome
from thinwire.simulation.client_pool import ClientPopulation, PacedExecutor
from thinwire.simulation.kept import CachedRunFolder
from thinwire.simulation.scripted_device import Answer, Turn

StepSeconds = Callable[[Assignment], float]


@dataclass(frozen=True)
class Made:
    """Holds a reply that the fleet has not fetched yet."""

    assignment_id: str
    reply: Reply
    body: bytes
    took_s: float


@dataclass
class Trained:
    """Does the work of one client. `step_s` returns the seconds of each step for an assignment.

    If an assignment is withdrawn, its update returns to the residual, as if it had not been made. The time for encoding
    and upload is measured when the reply leaves, so that partial work leaves time for both.
    """

    session: AssignmentHandler
    bench: PacedExecutor
    step_s: StepSeconds
    _made: Made | None = field(init=False, default=None)
    _withdrawn: list[UpdateId] = field(init=False, default_factory=list)

    def begin(self, delivery: Delivery, turn: Turn) -> Turn:
        """Train for an assignment; return its turn with the seconds that the training took."""
        if self._made is None or self._made.assignment_id != delivery.assignment.assignment_id:
            self._withdraw()
            self._made = self._worked(delivery, turn.download_s)
        return replace(turn, compute_s=self._made.took_s)

    def answer(self, delivery: Delivery, turn: Turn) -> Answer:
        """Return the reply to an assignment, and record how long its encoding and upload take."""
        self.begin(delivery, turn)
        made, self._made = self._made, None
        assert made is not None
        self.session.delivered(made.reply, turn.encode_s + turn.sending_s(len(made.body)))
        return made.reply, made.body

    def _worked(self, delivery: Delivery, download_s: float) -> Made:
        assignment, began = delivery.assignment, self.bench.clock.now()
        back = tuple(UpdateOutcome(update_id, "dropped") for update_id in self._withdrawn)
        self.bench.step_s = self.step_s(assignment)
        assigned = replace(
            delivery, assignment=replace(assignment, outcomes=(*assignment.outcomes, *back)), download_s=download_s
        )
        reply, file = self.session.answer(assigned, lambda: False, lambda line: None)
        body = self.session.kept[assignment.run][0].body(file) if file else b""
        self._withdrawn = []
        return Made(
            assignment.assignment_id, reply, body if isinstance(body, bytes) else b"", self.bench.clock.now() - began
        )

    def _withdraw(self) -> None:
        if self._made is not None and isinstance(self._made.reply, ReplyHeader):
            self._withdrawn.append(self._made.reply.update_id)
        self._made = None


class Training:
    """Makes the work of a crowd's clients, which share the task's module, the plan and the last model.

    With the crowd's `debug`, an exception of the task is raised where it happens. Without, it is that client's failure.
    """

    def __init__(self, task: LoadedTask, crowd: ClientPopulation) -> None:
        self.crowd, self.bench = crowd, InProcessExecutor(task, crowd.client.device)
        use_threads(0, self.bench.layout.size)
        self._gate, self._bases = AdmissionController(), BaseModelCache()

    def client(self, index: int, step_s: StepSeconds) -> Trained:
        """Return the work of client `index`."""
        crowd, name, bench = self.crowd, self.crowd.name(index), PacedExecutor(self.bench)
        session = AssignmentHandler(
            name, bench, crowd.folder / name, crowd.place(index), debug=crowd.debug, gate=self._gate,
            folders=CachedRunFolder, take_base=self._bases.take, clock=bench.clock,
        )  # fmt: skip
        return Trained(session, bench, step_s)
