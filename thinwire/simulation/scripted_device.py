"""Simulates a device that follows a script: its timing, its failures, and its state that survives a crash.

A script returns a `Behavior` for each assignment: how long each stage takes on the virtual clock, and what goes wrong.
`RandomScript` samples the behaviors. A `Work` makes the replies. `SyntheticUpdates` makes replies without training:
their frames are small but real, so that journal, spool and aggregation do all of their work.

`Training` makes replies by training: with a real client's handler, outbox, residual and partial work. It trains when
the assignment is delivered, on a virtual clock of its own that only steps advance. The reply is made once that time has
passed on the fleet's clock. So replies arrive in the order of the scripted speeds, on any machine.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from thinwire.client.admission import AdmissionController
from thinwire.client.assignment_context import HandlerEnvironment
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import BaseModelCache
from thinwire.client.task import LoadedTask
from thinwire.client.train.runtime import use_threads
from thinwire.compression import parse
from thinwire.core.fleet import Delivery
from thinwire.core.layout import Layout
from thinwire.core.plan import digest_of
from thinwire.core.plan_values import MAX_DELAY
from thinwire.core.prng import Key, derive, seed63
from thinwire.core.types import (
    Assignment,
    Metrics,
    Part,
    Reply,
    ReplyHeader,
    UpdateId,
    UpdateOutcome,
    Vector,
    within_run,
)
from thinwire.simulation.client_pool import ClientPopulation, VirtualClockExecutor
from thinwire.simulation.local_fleet import LocalLink
from thinwire.simulation.storage import CachedRunFolder


@dataclass
class OutboxEntry:
    """A reply in a device's outbox, where it stays until the outcome of its update is known."""

    delivery: Delivery
    behavior: Behavior
    header: ReplyHeader
    body: bytes
    pushed: bool = False

    @property
    def assignment_id(self) -> str:
        """Return the id of the assignment that the reply answers."""
        return self.delivery.assignment.assignment_id

    @property
    def upload_s(self) -> float:
        """Return the seconds of the reply's upload."""
        return self.behavior.sending_s(len(self.body))


@dataclass
class ScriptedDevice:
    """Simulates a device that does `work` as its `script` says, one assignment after the other.

    `offline` lists the spans (from, until), in seconds, in which the device is offline. It connects at the first poll,
    unless a span begins at 0. A device that goes offline crashes: its outbox survives, and work in progress begins
    again. With `overlaps`, the device works on its next assignment while it uploads; it uploads one reply at a time.
    """

    name: str
    work: Work
    script: Script = field(default=lambda assignment: Behavior())
    offline: Sequence[tuple[float, float]] = ()
    overlaps: bool = False
    outbox: dict[str, OutboxEntry] = field(default_factory=dict)  # by id of the assignment
    plans: set[str] = field(default_factory=set)  # digests of the plans that it has
    restarts: int = 0  # events that were scheduled before the last restart do not happen
    link: LocalLink | None = None  # while it is connected
    busy: bool = False
    uploads_end_at: float = 0.0  # when all its uploads will have ended
    _delivered: deque[str] = field(default_factory=lambda: deque(maxlen=1 + MAX_DELAY))  # ids of the last assignments

    def choose_behavior(self, assignment: Assignment) -> Behavior:
        """Return the script's behavior for an assignment. Only the first delivery is lost: the next one arrives."""
        behavior = self.script(assignment)
        if assignment.assignment_id in self._delivered:
            return replace(behavior, lost="")
        self._delivered.append(assignment.assignment_id)
        return behavior

    def receive(self, assignment: Assignment) -> bool:
        """Apply an assignment's outcomes and keep its plan; return False if only a digest came of an unknown plan."""
        settled = {one.update_id for one in assignment.outcomes if one.outcome != "unknown"}
        self.outbox = {a: entry for a, entry in self.outbox.items() if entry.header.update_id not in settled}
        if isinstance(assignment.plan, str):
            return assignment.plan in self.plans
        self.plans.add(digest_of(assignment.plan))
        return True


@dataclass(frozen=True)
class Behavior:
    """The behavior of a device on one assignment: the seconds of each stage, and what goes wrong.

    `upload_s` may be a function of the reply's bytes. `lost` names the message that does not arrive until the device
    has reconnected: the assignment, which is then delivered again, or the reply, which is then sent again. `failure` is
    the (kind, text) of a failure that the device sends instead of an update.
    """

    download_s: float = 0.0
    compute_s: float = 1.0
    encode_s: float = 0.0
    upload_s: float | Callable[[int], float] = 0.0
    lost: Literal["", "assignment", "reply"] = ""
    failure: tuple[str, str] | None = None

    def sending_s(self, size: int) -> float:
        """Return how many seconds the upload of `size` bytes takes."""
        return self.upload_s(size) if callable(self.upload_s) else self.upload_s


Script = Callable[[Assignment], Behavior]


@dataclass(frozen=True)
class LogNormal:
    """Samples seconds whose logarithm is normally distributed: half of the samples are below `median_s`.

    >>> LogNormal(10.0, sigma=0.0).at(Key(1))
    10.0
    """

    median_s: float
    sigma: float

    def at(self, key: Key) -> float:
        """Return the sample that this key gives."""
        return self.median_s * math.exp(self.sigma * random.Random(seed63(key)).gauss(0.0, 1.0))


Duration = float | LogNormal


@dataclass(frozen=True)
class RandomScript:
    """A script that samples a behavior for each assignment, from the seed, the round and the device's name.

    A download and an upload also take the time of their bytes, at `down_bytes_s` and `up_bytes_s` bytes per second
    (0: no limit). `lost_assignments`, `lost_replies` and `failing` are probabilities.
    """

    seed: int = 0
    download: Duration = 0.0
    compute: Duration = 1.0
    encode: Duration = 0.0
    upload: Duration = 0.0
    down_bytes_s: float = 0.0
    up_bytes_s: float = 0.0
    lost_assignments: float = 0.0
    lost_replies: float = 0.0
    failing: float = 0.0

    def __call__(self, assignment: Assignment) -> Behavior:
        key = derive(Key(self.seed), "turn", within_run(assignment.assignment_id))
        upload_s = _sample(self.upload, derive(key, "upload"))
        draw = random.Random(seed63(derive(key, "luck"))).random()
        return Behavior(
            download_s=_sample(self.download, derive(key, "download"))
            + transfer_s(self.down_bytes_s, sum(part.length for part in assignment.parts)),
            compute_s=_sample(self.compute, derive(key, "compute")),
            encode_s=_sample(self.encode, derive(key, "encode")),
            upload_s=lambda size: upload_s + transfer_s(self.up_bytes_s, size),
            lost="assignment"
            if draw < self.lost_assignments
            else "reply"
            if draw < self.lost_assignments + self.lost_replies
            else "",
            failure=("task-error", "scripted") if draw >= 1.0 - self.failing else None,
        )


def transfer_s(bytes_s: float, size: int) -> float:
    """Return the seconds for `size` bytes on a link of `bytes_s` bytes per second; 0 means no limit."""
    return size / bytes_s if bytes_s else 0.0


def _sample(duration: Duration, key: Key) -> float:
    return duration.at(key) if isinstance(duration, LogNormal) else duration


ReplyWithParts = tuple[Reply, bytes]  # header, and the parts one after the other


class Work(Protocol):
    """Makes the replies of a scripted device.

    Each assignment begins once, unless the device crashes before its work is done.
    """

    def begin(self, delivery: Delivery, behavior: Behavior) -> Behavior:
        """Begin to work on a delivered assignment, and return the behavior, whose times the work may change."""

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        """Return the reply. The fleet calls this when the work is done on its clock, in the order of the clock."""


@dataclass
class SyntheticUpdates:
    """Makes replies without training: the update is a constant, or what `update` returns for an assignment.

    It is encoded in the assignment's codec, without error feedback. The device makes `steps` steps, or fewer if the
    assignment says so. Each reply also evaluates the model: its loss is `loss` of the assignment.
    """

    name: str
    layout: Layout
    update: float | Callable[[Assignment], Vector] = 0.0
    examples: int = 10
    steps: int = 1
    loss: Callable[[Assignment], float] = lambda assignment: 1.0 / (1.0 + assignment.base_version)
    sequence: int = 0
    _payloads: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def begin(self, delivery: Delivery, behavior: Behavior) -> Behavior:
        """Return the behavior unchanged."""
        return behavior

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        """Return a reply with one frame for each segment, or with an evaluation alone."""
        assignment = delivery.assignment
        self.sequence += 1
        update_id = UpdateId(assignment.run, self.name, self.sequence)
        measures = assignment.evaluates and not assignment.is_follow_up
        metrics: Metrics = {"eval/loss": (self.loss(assignment), 1.0)} if measures else {}
        if assignment.kind != "train":
            header = ReplyHeader(
                assignment.assignment_id, update_id, assignment.base_version, self.examples, metrics=metrics
            )
            return replace(header, identity=assignment.identity), b""
        frames = [self._frame(assignment, segment.index) for segment in self.layout.segments]
        steps = min(self.steps, assignment.work.steps or self.steps)
        header = ReplyHeader(
            assignment.assignment_id, update_id, assignment.base_version, self.examples, steps, float(steps),
            metrics=metrics,
            parts=parts_of(frames), codec=assignment.codec, identity=assignment.identity,
        )  # fmt: skip
        return header, b"".join(frames)

    def _frame(self, assignment: Assignment, segment: int) -> bytes:
        span = self.layout.segments[segment].span
        if callable(self.update):
            return self.encoded(assignment, segment, self.update(assignment)[span])
        if (assignment.codec, segment) not in self._payloads:
            constant = np.full(span.stop - span.start, self.update, np.float32)
            self._payloads[assignment.codec, segment] = self.encoded(assignment, segment, constant)
        return self._payloads[assignment.codec, segment]

    def encoded(self, assignment: Assignment, segment: int, update: Vector) -> bytes:
        """Return the frame of a segment. Subclasses override it for a device with memory, or one that trains from what
        it gets.
        """
        codec = parse(assignment.codec).bind(self.layout)
        key = derive(Key(0), self.name, within_run(assignment.assignment_id))
        return codec.encode(update.copy(), codec.init(segment), key, segment).payload


def parts_of(frames: list[bytes]) -> tuple[Part, ...]:
    """Return frames as the parts of a reply, with their digests."""
    return tuple(
        Part(f"frame/{index}", len(frame), hashlib.sha256(frame).hexdigest()) for index, frame in enumerate(frames)
    )


StepSeconds = Callable[[Assignment], float]


@dataclass(frozen=True)
class PendingReply:
    """A reply that was made and that the fleet has not taken yet."""

    assignment_id: str
    reply: Reply
    body: bytes
    duration_s: float


@dataclass
class TrainingWork:
    """The work of one client that really trains; `step_s` returns the seconds of each step for an assignment.

    If an assignment is withdrawn, its update is restored into the residual, as after a dropped update. The seconds of
    encoding and upload are recorded when the reply leaves, so that partial work leaves time for both.
    """

    handler: AssignmentHandler
    executor: VirtualClockExecutor
    step_s: StepSeconds
    _pending: PendingReply | None = field(init=False, default=None)
    _withdrawn: list[UpdateId] = field(init=False, default_factory=list)

    def begin(self, delivery: Delivery, behavior: Behavior) -> Behavior:
        """Train for an assignment; return the behavior with the seconds that the training took."""
        if self._pending is None or self._pending.assignment_id != delivery.assignment.assignment_id:
            self._withdraw()
            self._pending = self._train(delivery, behavior.download_s)
        return replace(behavior, compute_s=self._pending.duration_s)

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        """Return the reply to an assignment, and record how long its encoding and upload take."""
        self.begin(delivery, behavior)
        pending, self._pending = self._pending, None
        assert pending is not None
        self.handler.mark_delivered(pending.reply, behavior.encode_s + behavior.sending_s(len(pending.body)))
        return pending.reply, pending.body

    def _train(self, delivery: Delivery, download_s: float) -> PendingReply:
        assignment, began = delivery.assignment, self.executor.clock.now()
        dropped = tuple(UpdateOutcome(update_id, "dropped") for update_id in self._withdrawn)
        self.executor.step_s = self.step_s(assignment)
        with_outcomes = replace(
            delivery, assignment=replace(assignment, outcomes=(*assignment.outcomes, *dropped)), download_s=download_s
        )
        reply, file = self.handler.handle(with_outcomes, lambda: False, lambda line: None)
        body = self.handler.runs[assignment.run][0].body(file) if file else b""
        self._withdrawn = []
        return PendingReply(
            assignment.assignment_id, reply, body if isinstance(body, bytes) else b"", self.executor.clock.now() - began
        )

    def _withdraw(self) -> None:
        if self._pending is not None and isinstance(self._pending.reply, ReplyHeader):
            self._withdrawn.append(self._pending.reply.update_id)
        self._pending = None


class Training:
    """Makes the work of the clients of a population, which share the task's module, the plan and the last model.

    If the population has `debug`, an exception of the task's code is raised where it happens. Otherwise the client
    replies with a failure.
    """

    def __init__(self, task: LoadedTask, population: ClientPopulation) -> None:
        self.population, self.executor = population, InProcessExecutor(task, population.client.device)
        use_threads(0, self.executor.layout.size)
        self._admission, self._bases = AdmissionController(), BaseModelCache()

    def client(self, index: int, step_s: StepSeconds) -> TrainingWork:
        """Return the work of client `index`."""
        population, name, executor = self.population, self.population.name(index), VirtualClockExecutor(self.executor)
        environment = HandlerEnvironment(
            folders=CachedRunFolder,
            update_replica=self._bases.update_replica,
            clock=executor.clock,
            debug=population.debug,
        )
        folder, client = population.folder / name, population.client_info(index)
        handler = AssignmentHandler(executor, folder, client, self._admission, environment=environment)
        return TrainingWork(handler, executor, step_s)
