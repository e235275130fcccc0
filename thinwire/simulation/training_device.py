"""Simulates a scripted device that trains: a real client's session, for as many seconds as a script decides.

The session is that of a device, with its outbox, residual and partial work. It trains when the assignment is delivered,
on a clock of its own that only steps move. Its reply exists once that time has passed on the fleet's clock. So replies
arrive in the order of the scripted speeds, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinwire.client.admission import AdmissionController
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import BaseModelCache
from thinwire.client.run_store import Reply
from thinwire.client.task import LoadedTask
from thinwire.client.train.runtime import use_threads
from thinwire.client.train.schedule import Clock
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery
from thinwire.core.types import Ask, ReplyHeader, UpdateId, Verdict
from thinwire.simulation.client_pool import CachedRunFolder, ClientPopulation
from thinwire.simulation.scripted_device import Answer, Turn

StepSeconds = Callable[[Ask], float]


@dataclass(frozen=True)
class Made:
    """Holds a reply that the fleet has not fetched yet."""

    ask_id: str
    reply: Reply
    bundle: Path | None
    took_s: float


@dataclass
class Trained:
    """Does the work of one client. `step_s` returns the seconds of each step for an assignment.

    If an assignment is withdrawn, its update returns to the residual, as if it had not been made. The time for encoding
    and upload is measured when the reply leaves, so that partial work leaves time for both.
    """

    session: AssignmentHandler
    clock: VirtualClock
    step_s: StepSeconds
    _made: Made | None = field(init=False, default=None)
    _withdrawn: list[UpdateId] = field(init=False, default_factory=list)

    def begin(self, delivery: Delivery, turn: Turn) -> Turn:
        """Train for an assignment; return its turn with the seconds that the training took."""
        if self._made is None or self._made.ask_id != delivery.ask.ask_id:
            self._withdraw()
            self._made = self._worked(delivery, turn.download_s)
        return replace(turn, compute_s=self._made.took_s)

    def answer(self, delivery: Delivery, turn: Turn) -> Answer:
        """Return the reply to an assignment, and record how long its encoding and upload take."""
        self.begin(delivery, turn)
        made, self._made = self._made, None
        assert made is not None
        body = made.bundle.read_bytes() if made.bundle else b""
        self.session.delivered(made.reply, turn.encode_s + turn.sending_s(len(body)))
        return made.reply, body

    def _worked(self, delivery: Delivery, download_s: float) -> Made:
        ask, began = delivery.ask, self.clock.now()
        back = tuple(Verdict(update_id, "dropped") for update_id in self._withdrawn)
        self.session.slow_step_s = self.step_s(ask)
        asked = replace(delivery, ask=replace(ask, verdicts=(*ask.verdicts, *back)), download_s=download_s)
        reply, bundle = self.session.answer(asked, lambda: False, lambda line: None)
        self._withdrawn = []
        return Made(ask.ask_id, reply, bundle, self.clock.now() - began)

    def _withdraw(self) -> None:
        if self._made is not None and isinstance(self._made.reply, ReplyHeader):
            self._withdrawn.append(self._made.reply.update_id)
        self._made = None


class Training:
    """Makes the work of a crowd's clients, which share the task's module, the plan and the last model.

    With the crowd's `debug`, an exception of the task is raised where it happens. Without, it is that client's failure.
    """

    def __init__(self, task: LoadedTask, crowd: ClientPopulation) -> None:
        self.crowd, self.bench = crowd, InProcessExecutor(task, crowd.site.device)
        use_threads(0, self.bench.layout.size)
        self._gate, self._bases = AdmissionController(), BaseModelCache()

    def client(self, index: int, step_s: StepSeconds) -> Trained:
        """Return the work of client `index`."""
        crowd, virtual = self.crowd, VirtualClock()
        name, clock = crowd.name(index), Clock(virtual.now, virtual.advance)
        session = AssignmentHandler(
            name, self.bench.at(clock), crowd.folder / name, crowd.place(index), debug=crowd.debug, gate=self._gate,
            folders=CachedRunFolder, take_base=self._bases.take, clock=clock,
        )  # fmt: skip
        return Trained(session, virtual, step_s)
