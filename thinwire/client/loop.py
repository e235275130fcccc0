"""Run the assignments that a client receives: one after the other, each reply pushed before the next assignment begins.

`Loop` works in the calling thread and pulls in a second one, which answers the phases of secure rounds at once. If the
plan has overlap or secure aggregation, a third thread finishes and pushes replies (`BackgroundSender` in calls.py).

Between two assignments the loop saves what is due, calls the `Reloader` (reloader.py), and reports changes of this
device.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from thinwire.client.calls import ENDING_CHECK_S, BackgroundSender, Handover, Retrier, ShuttingDown, sent_line
from thinwire.client.execute import Begun
from thinwire.client.handler import AssignmentHandler, ReplyWithFile
from thinwire.client.reloader import Reloader
from thinwire.client.train.errors import Cancelled
from thinwire.core.equipment import Equipment
from thinwire.core.errors import BadPayload, NotAccepted, NotOffered, ReplyUnreadable, ThinwireError
from thinwire.core.fleet import MAX_TENSORS, Delivery, Hello, Link, TaskReport
from thinwire.core.formatting import plain
from thinwire.core.types import Assignment, Failure, PhaseReply, Reply, ReplyHeader

T = TypeVar("T")
SAVE_S = 600.0  # longest time that state stays unsaved with `durability = "exit"`; a kill loses it
MAX_PULLED, MAX_PULLED_BYTES = 32, 2**20  # assignments that were pulled and not begun: none is pulled beyond that
# An honest aggregator returns a pull at once only with an assignment, or with a withdrawn one, of which there are few.
QUICK_S, MAX_QUICK, PAUSE_S = 0.05, 16, 1.0
ADVERTISE_S = 5.0  # longest delay of the next pull, until the model is loaded: no withdrawal arrives meanwhile
NO_TASK = "no such task on this device"
RECONNECT_WAIT_S = 1.0  # longest wait of the first pull after an outage, whose return ends the outage


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about the device that a hello reports, beside its tasks and runs.

    `versions` and `has` are called for each hello: versions, and memory, power and the like. `plans` are the digests of
    the plans that it keeps, `secure` is what it can do in secure rounds.
    """

    name: str
    versions: Callable[[], Mapping[str, str]]
    has: Callable[[], Equipment]
    plans: tuple[str, ...]
    secure: tuple[str, ...]


class Loop:
    """The loop of a client: it pulls, trains and pushes until `ending` is set.

    `run` works in the calling thread and pulls in another one. `calls` may give up only with `--once`; then the loop
    ends after a run.
    """

    def __init__(
        self,
        link: Link,
        handlers: Mapping[str, AssignmentHandler],
        facts: DeviceFacts,
        calls: Retrier,
        reloader: Reloader,
    ) -> None:
        self.link, self.handlers, self.facts, self.calls, self._reloader = link, handlers, facts, calls, reloader
        self.say, self.ending = calls.say, calls.ending
        self._run = ""  # of the last assignment
        self.inbox: queue.Queue[tuple[Delivery, float] | Exception] = queue.Queue()
        self.poll_s, self._saved_at, self._is_working = 25.0, time.monotonic(), False
        self._runs_seen: set[str] = set()  # runs of which this process received an assignment
        kept = {run: identity for task, one in handlers.items() for run, identity in one.runs.open_runs(task).items()}
        self.hello = Hello(
            facts.name, uuid.uuid4().hex, self._reports(), facts.versions(), plans=facts.plans, has=facts.has(),
            open_runs=kept, secure=facts.secure,
        )  # fmt: skip
        self._puller = threading.Thread(target=self._pull, name="pull", daemon=True)
        self._background_sender = BackgroundSender(self.inbox.put, self.ending)
        self._advertisements = Handover(self.ending)

    def run(self) -> int:
        """Run until the end and return 0.

        Raises `Refused`, and the error of a call that fails if `calls` may give up.
        """
        self._warn()
        self.say("connecting")
        with contextlib.suppress(ShuttingDown):
            welcome = self.calls.until_done(lambda: self._guarded(lambda: self.link.hello(self.hello)), give_up_s=0.0)
            self.poll_s = welcome.poll_s
            for handler in self.handlers.values():
                handler.name = welcome.name  # the aggregator's name for it: an operator may have renamed this device
                handler.continue_sequences(welcome.sequences, welcome.runs)
                for header, bundle in handler.unsent_replies(self.say):
                    self._push(handler, header, bundle)
            self._puller.start()
            self.say("idle")
            while not self.ending.is_set():
                self._maintain()
                with contextlib.suppress(queue.Empty):
                    item = self.inbox.get(timeout=ENDING_CHECK_S)
                    if isinstance(item, Exception):
                        raise item
                    if self._handle(*item) and self.calls.give_up:
                        break
        return 0

    def _reports(self) -> tuple[TaskReport, ...]:
        """Return a report for each task, with as many layouts as fit into a hello."""
        reports, letters = list[TaskReport](), 0
        for handler in self.handlers.values():
            report = handler.executor.report()
            letters += len(report.tensors)
            reports.append(report if letters <= MAX_TENSORS else replace(report, tensors=""))
        return tuple(reports)

    def _warn(self) -> None:
        for task in self.hello.tasks:
            if task.error:
                self.say(f"the task {task.name} is not usable: {task.error}")

    def save(self) -> None:
        """Make durable the state that plans allow to wait."""
        for handler in self.handlers.values():
            handler.save(self.say)

    def _maintain(self) -> None:
        """Save and reload if that is due between two assignments, and report changes of this device in a new hello."""
        if time.monotonic() - self._saved_at >= SAVE_S:
            self._saved_at = time.monotonic()
            self._after_replies(self.save)
        if self._reloader.requested.is_set():
            self._reloader.reload(self.say)
        if self._reloader.worker is not None:
            if self._reloader.worker.is_due():
                self._reloader.reload_tasks(self.say)
            self._reloader.worker.stop_if_idle()  # gives its memory back once it has been idle
        hello = replace(self.hello, tasks=self._reports(), versions=self.facts.versions(), has=self.facts.has())
        if hello != self.hello:
            self.hello = hello
            self._warn()
            self._after_replies(lambda: self.calls.until_done(lambda: self._guarded(lambda: self.link.hello(hello))))

    def _after_replies(self, job: Callable[[], object]) -> None:
        """Run a job now if no reply is being finished, else queue it in the background behind the replies.

        With overlap there may always be a reply that is being finished.
        """
        (job if self._background_sender.idle else lambda: self._background_sender.put(job))()

    def end_background_sender(self) -> None:
        """Stop the background thread: nothing is committed after this."""
        self._background_sender.close()

    def join(self) -> None:
        """Wait up to 5 s for the pulling thread to end."""
        if self._puller.is_alive():
            self._puller.join(timeout=5.0)

    def _pull(self) -> None:
        """Pull assignments into the inbox. An error that ends this thread is raised in the working thread."""
        quick = 0  # pulls in a row that returned nothing at once
        reply: PhaseReply | Failure | None = None  # the next call sends it
        try:
            while True:
                if reply is None:
                    self._wait_for_room()
                began = time.monotonic()
                delivery, reply = self._pulled(reply), None
                if delivery is not None and delivery.assignment.kind == "secure":
                    reply = self._handle_phase(delivery)
                elif delivery is not None:
                    reply = self._enqueue(delivery)
                quick = quick + 1 if delivery is None and time.monotonic() - began < QUICK_S else 0
                if quick > MAX_QUICK:
                    self.ending.wait(PAUSE_S)
        except ShuttingDown:
            return
        except Exception as error:  # an internal error must end the program, not this thread alone
            self.inbox.put(error)

    def _pulled(self, reply: PhaseReply | Failure | None) -> Delivery | None:
        """Return the next assignment, after the message of a phase was sent if there is one."""

        def call() -> Delivery | None:
            wait_s = self._pull_wait_s()
            return self.link.pull(wait_s) if reply is None else self.link.answer(reply, wait_s)

        try:
            return self.calls.until_done(lambda: self._guarded(call))
        except (NotOffered, NotAccepted) as error:  # the aggregator ends the round without this client
            self.say(error.text())
            if isinstance(reply, PhaseReply):
                for handler in self.handlers.values():
                    handler.rounds.forget(reply.assignment_id)
            return None

    def _enqueue(self, delivery: Delivery) -> PhaseReply | None:
        """Put an assignment into the inbox; return the advertisement if a secure round begins at once."""
        if delivery.assignment.secure is not None and not self._is_working and self.inbox.empty():
            self._advertisements.begin()
        self.inbox.put((delivery, time.monotonic()))
        return self._advertisements.take(ADVERTISE_S)

    def _handle_phase(self, delivery: Delivery) -> PhaseReply | Failure | None:
        """Return the reply to a phase of a secure round, at once: the working thread may train for a long time."""
        assignment = delivery.assignment
        try:
            if (handler := self.handlers.get(assignment.task)) is not None:
                return handler.handle_phase(delivery, self.say)
        finally:
            if delivery.bundle is not None:
                delivery.bundle.unlink(missing_ok=True)
        return Failure("task-missing", NO_TASK, assignment.assignment_id, self.facts.name, identity=assignment.identity)

    def _wait_for_room(self) -> None:
        """Wait until the inbox has room. A withdrawn assignment takes its place there until its turn comes."""
        while not self.ending.is_set():
            with self.inbox.mutex:
                waiting = [item[0].header_bytes for item in self.inbox.queue if isinstance(item, tuple)]
            if len(waiting) < MAX_PULLED and sum(waiting) < MAX_PULLED_BYTES:
                return
            self.ending.wait(ENDING_CHECK_S)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Return the result of a call; print an internal error in full, and raise it as `BadPayload`.

        An internal error is any exception but `ThinwireError`. The call is then tried again.
        """
        try:
            return call()
        except ThinwireError:
            raise
        except Exception as error:  # no message of an aggregator may end this program
            said = f"{traceback.format_exc()}a defect of Thinwire: {type(error).__name__}: {error}"
            if not self.ending.is_set():
                self.say(
                    "\n".join(map(plain, said.splitlines())) + "\ntry:   the lines above say where; please report them"
                )
            raise BadPayload("cannot read what the aggregator says", why=plain(str(error))) from error

    def _pull_wait_s(self) -> float:
        return min(RECONNECT_WAIT_S, self.poll_s) if self.calls.outage.outage_s else self.poll_s

    def _handle(self, delivery: Delivery, came_at: float) -> bool:
        """Handle one assignment. Return True if it ended a run that was active during the lifetime of this process."""
        self._is_working = True
        try:
            self._work_on(delivery, came_at)
        finally:
            self._is_working = False
            self._advertisements.end()
            if delivery.bundle is not None:
                delivery.bundle.unlink(missing_ok=True)
        if self.inbox.empty() and self._background_sender.idle and not self.ending.is_set():
            self.say("idle")
        if (assignment := delivery.assignment).kind != "stop":
            self._runs_seen.add(assignment.run)
            return False
        return not delivery.missed or assignment.run in self._runs_seen

    def _work_on(self, delivery: Delivery, came_at: float) -> None:
        assignment = delivery.assignment
        handler = self.handlers.get(assignment.task)
        if handler is not None:
            handler.name = delivery.device or handler.name
        overlaps = handler is not None and handler.overlaps(assignment)
        # A run that begins may give up an older one, whose last reply may still be on its way.
        begins = handler is not None and assignment.run not in handler.runs
        if (begins or not overlaps) and not self._background_sender.drained():
            return
        if assignment.kind == "stop":
            if handler is not None:
                handler.stop(assignment, self.say)
            return
        if handler is None:
            self.say(
                f"{assignment.run}: assignment for the task {assignment.task!r}; here is {', '.join(self.handlers)}"
            )
            identity = assignment.identity
            missing = Failure("task-missing", NO_TASK, assignment.assignment_id, self.facts.name, identity=identity)
            self._push(None, missing)
            return

        def cancelled() -> bool:
            return self.ending.is_set() or assignment.assignment_id in self.link.cancelled()

        def send(advertisement: PhaseReply) -> None:
            def push() -> None:
                if not self._push(handler, advertisement):  # the round goes on without this client
                    handler.rounds.forget(assignment.assignment_id)

            if not self._advertisements.offer(advertisement):
                self._background_sender.put(push)

        if assignment.run != self._run:
            self._run = assignment.run
            self.say(f"works on {assignment.run}")  # the lines that follow have the number of a round alone
        began_at = time.monotonic()
        try:
            begun = handler.begin(delivery, cancelled, self.say, began_at - came_at, send)
        except Cancelled:
            self._withdrawn(handler, assignment)
            return
        since = began_at if overlaps else came_at
        if overlaps or assignment.secure is not None:
            self._background_sender.put(lambda: self._finish(handler, begun, delivery, since))
        else:
            self._finish(handler, begun, delivery, since)

    def _withdrawn(self, handler: AssignmentHandler, assignment: Assignment) -> None:
        """End the work on an assignment without a reply."""
        if self.ending.is_set():
            self.say("stopping")
            return
        handler.mark_withdrawn(assignment)
        if assignment.assignment_id in self.link.cancelled():
            self.say(f"round {assignment.round}: withdrawn by the aggregator")

    def _finish(
        self, handler: AssignmentHandler, begun: ReplyWithFile | Begun, delivery: Delivery, since: float
    ) -> None:
        """Encode, commit and push what was trained; `since` is when the time of the deadline began."""
        try:
            reply, bundle = handler.finish(begun) if isinstance(begun, Begun) else begun
        except Cancelled:
            self._withdrawn(handler, delivery.assignment)
            return
        began = time.monotonic()
        if not self._push(handler, reply, bundle):
            self.say(f"round {delivery.assignment.round}: its reply was not accepted")
        elif isinstance(reply, ReplyHeader) and reply.parts:
            now = time.monotonic()
            self.say(sent_line(delivery.assignment, reply, now - began, delivery.download_s + now - since))

    def _push(self, handler: AssignmentHandler | None, reply: Reply, bundle: Path | None = None) -> bool:
        """Push a reply until the aggregator has it; return False if the aggregator refuses it or has no such run.

        The reply is on disk, so the next process would push it again. A refused one is lost. For one that the disk has
        lost a failure is pushed, so that no round waits for it.
        """
        begun: list[float] = []

        def push() -> None:
            begun.append(time.monotonic())
            self.link.push(reply, bundle)

        is_accepted = True
        try:
            self.calls.until_done(lambda: self._guarded(push))
        except NotOffered as error:  # the reply stays on disk, and other replies continue
            self.say(error.text())
            return False
        except ReplyUnreadable as error:
            self.say(error.text())
            if handler is not None and isinstance(reply, ReplyHeader):
                self._push(handler, handler.mark_unreadable(reply))
            return False
        except NotAccepted as error:  # this reply is lost, and the client continues
            is_accepted = False
            self.say(error.text())
        if handler is not None:  # an interrupted or refused upload does not show how long one takes
            handler.mark_delivered(reply, time.monotonic() - begun[0] if is_accepted and len(begun) == 1 else None)
        return is_accepted
