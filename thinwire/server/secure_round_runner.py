"""Driver of a secure round: messages of its phases become events, and its actions become requests and one sum.

The messages of `advertise`, `share` and `agree` are kept in files until the round ends, and the journal has their
digests, so a restart replays the phases that were closed. Messages of an open phase are not kept: after a restart the
clients get the requests again, and send the same bytes. The messages of `unmask` are never stored, because together
they are the secrets of the round.

Invariant: a closed phase is journalled before a request of the next one leaves. So the survivors of a round are durable
before a client is shown them, and after a crash they are the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from thinwire.aggregation.lattice import BadSum
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.events import NO_STEP, Evaluated, Event, RoundOpened
from thinwire.core.fleet import Envelope
from thinwire.core.run_events import PhaseClosed
from thinwire.core.score_histogram import MEASURED
from thinwire.core.statedir import disk_error, patiently, private_folder, private_opener, write_atomically
from thinwire.core.types import (
    Assignment,
    Part,
    Phase,
    PhaseReply,
    UpdateId,
    phase_id,
    phase_of,
    training_id,
)
from thinwire.privacy.messages import max_bytes
from thinwire.privacy.secure_round import Aborted, UnmaskingKeys
from thinwire.server import round_events
from thinwire.server.context import RunContext
from thinwire.server.evaluation import summed_evaluation
from thinwire.server.round_runner import RoundRunner
from thinwire.server.secure_mode import SecureRoundMachine
from thinwire.server.secure_sum import SecureAggregator

SIMULATED_SECRETS_LOST = "the secrets of its simulated clients were in the memory of a process that ended"
STORED_PHASES: tuple[Phase, ...] = ("advertise", "share", "agree")  # their messages are kept until the round ends


class SecureRoundRunner(RoundRunner):
    """Runs one secure round from its opening, or after a restart, until it closes."""

    machine: SecureRoundMachine
    aggregator: SecureAggregator

    def __init__(self, running: RunContext, opened: RoundOpened) -> None:
        super().__init__(running, opened)
        self._files = PhaseFiles(running.home.messages(running.run_id), opened.round, running.simulated)
        self._unreadable = SIMULATED_SECRETS_LOST if running.simulated else ""  # why a resumed round is aborted, or ""
        self._messages: dict[str, bytes] = {}  # device -> its message of the open phase, in the order of arrival

    def abort_inputs(self) -> Iterator[tuple[round_events.Input, float]]:
        """Yield the input that aborts the open round of a simulation whose process was killed."""
        if self._unreadable:
            yield round_events.MasksRemoved(self._unreadable), self.machine.config.opened_s

    def phase_inputs(self, event: PhaseClosed) -> Iterator[tuple[round_events.Input, float]]:
        """Yield the inputs that replay a closed phase: its messages in their order of arrival, and its end.

        They abort the round if the file of its messages is damaged, or missing because the store is a restored backup.
        """
        now, messages = self.machine.config.opened_s + event.elapsed_s, dict[str, bytes]()
        try:
            messages = self._files.read(event) if event.messages and not self._unreadable else {}
        except DataLost as error:
            self._unreadable = error.what
        if self._unreadable:
            yield round_events.MasksRemoved(self._unreadable), now
            return
        for device, message in messages.items():
            yield round_events.PhaseMessage(device, event.phase, message), now
        if event.phase != "unmask":  # its messages were not stored, and are requested again
            yield round_events.PhaseEnded(event.reason), now

    def sum_events(self) -> list[Event]:
        """Return the event about the sum, if the round has one."""
        return [self.aggregator.summed] if self.aggregator.summed is not None else []

    def evaluation_events(self, now: float) -> list[Evaluated]:
        """Return the evaluation of the base model by the summed metrics, if it was not evaluated before."""
        base, running = self.opened.base_version, self.running
        metrics = {name: pair for name, pair in self.aggregator.metrics.items() if name.startswith(MEASURED)}
        if not metrics or base in running.run_state.scores.evaluated:
            return []
        return [summed_evaluation(running, base, metrics, self.aggregator.total.clients, now)]

    def _outstanding(self) -> list[tuple[str, str]]:
        """Return the training assignments to send; after `advertise` every device in the round has its own."""
        if self.machine.shut or self.machine.secure.phase != "advertise":
            return []
        due = self.machine.secure.outstanding
        return [(device, assignment_id) for device, assignment_id in super()._outstanding() if device in due]

    def run(self) -> None:
        """Send the requests of the open phase, which a restart may have lost, then run the round.

        A device whose advertisement was lost has its training assignment, so only the advertisement is requested.
        """
        if self.resumed and not self.machine.shut and self.machine.secure.phase == "advertise":
            self._request(dict.fromkeys(self.machine.secure.outstanding, b""))
        self._request(self.machine.requests if not self.machine.shut else {})
        if self.resumed:  # no event tells of a device that was revoked while no aggregator was running
            for device in sorted(self.running.revoked() & self.machine.assignments.keys()):
                self.on(round_events.DeviceDisconnected(device, "revoked"))
        super().run()

    def _lose_absent(self, devices: Iterable[str]) -> None:
        """Count the devices of the round that did not reconnect after a restart as disconnected."""
        del devices
        super()._lose_absent(self.machine.assignments)

    def clean_up(self) -> None:
        """Delete the files of the round, and cancel the requests that need no answer any more."""
        closed = self.machine.closed
        no_sum = closed is not None and closed.reason in NO_STEP  # all clients forget the secrets of this round
        self._cancel(self.machine.assignments if no_sum else self.machine.secure.outstanding)
        own, dropped = self.machine.assignments, self.machine.secure.dropped  # offline devices lack its request
        self.running.fleet.cancel([phase_id(own[device], at) for device, at in dropped.items() if at != "advertise"])
        self._files.delete()

    def on_message(self, reply: PhaseReply) -> None:
        """Pass a device's message of a phase to the state machine; an unreadable message fails its assignment."""
        device, phase = reply.device, phase_of(reply.assignment_id) or "advertise"
        assignment_id = training_id(reply.assignment_id)
        if self.machine.closed or self.machine.assignments.get(device) != assignment_id:
            return
        try:
            message = _decode(
                reply.message, self.machine.secure.terms.selected, phase, self.aggregator.terms.post_quantum
            )
        except ValueError as error:
            self.on(round_events.AssignmentFailed(device, assignment_id, "protocol", str(error)))
            return
        if phase == self.machine.secure.phase and device in self.machine.secure.outstanding:
            self._messages[device] = message
        self.on(round_events.PhaseMessage(device, phase, message))

    def _carry_out(self, actions: Sequence[round_events.Action]) -> None:
        super()._carry_out(actions)
        for action in actions:
            match action:
                case round_events.MarkLost(device, _, kind) if kind != "offline":  # else it may be back in time
                    self._cancel([device])
                case round_events.ClosePhase("advertise", requests) if self.resumed:
                    own = self.machine.assignments.values()
                    self.running.fleet.cancel([phase_id(assignment_id, "advertise") for assignment_id in own])
                    self._request(requests)
                case round_events.ClosePhase(_, requests) if (
                    requests is self.machine.requests and not self.machine.shut
                ):
                    self._request(requests)  # else the next phase was closed at once, or a vector was damaged
                case round_events.RemoveVector(update_id):
                    self._sum_again_without(update_id)
                case round_events.RemoveMasks(keys):
                    self.on(round_events.MasksRemoved(self._unmask(keys)))

    def _cancel(self, devices: Iterable[str]) -> None:
        """Withdraw the assignments of these devices in this round: to train, and to answer the open phase."""
        own = [self.machine.assignments[device] for device in devices]
        phase = self.machine.secure.phase
        self.running.fleet.cancel([*own, *(phase_id(assignment_id, phase) for assignment_id in own)])

    def events_of(self, action: round_events.Action) -> list[Event]:
        match action:
            case round_events.ClosePhase(phase):
                return [self._phase_closed(phase)]
            case round_events.RemoveMasks():
                return [self._phase_closed("unmask")]
        return []

    def _phase_closed(self, phase: str) -> PhaseClosed:
        """Make the messages of a closed phase durable, and return its event."""
        running, machine = self.running, self.machine
        messages, self._messages = self._messages, {}
        dropped = sorted(device for device, at in machine.secure.dropped.items() if at == phase)
        if phase == "masked":
            received = {device: self.headers[update].payload_bytes for device, update in machine.vectors.items()}
        else:
            # The message of a device that left after it is one of those with which the phase was closed.
            messages = {device: message for device, message in messages.items() if device not in dropped}
            received = {device: len(message) for device, message in messages.items()}
        reason = machine.masked_close_reason if phase == "masked" else ""
        digest = self._files.write(phase, messages) if phase in STORED_PHASES else ""
        elapsed_s = running.elapsed - machine.config.opened_s
        now, number = running.clock.wall(), self.opened.round
        return PhaseClosed(now, number, phase, elapsed_s, received, dropped, reason, digest)

    def _request(self, requests: Mapping[str, bytes]) -> None:
        """Send the requests of the open phase to the devices that have not answered it."""
        due = self.machine.secure.outstanding
        self.running.fleet.send(
            [self._envelope(device, request) for device, request in requests.items() if device in due]
        )

    def _envelope(self, device: str, request: bytes) -> Envelope:
        running, phase = self.running, self.machine.secure.phase
        part = Part("request", len(request), hashlib.sha256(request).hexdigest())
        assignment = Assignment(
            assignment_id=phase_id(self.machine.assignments[device], phase),
            run=running.run_id,
            task=running.plan.run.task,
            kind="secure",
            plan=running.plan.digest,
            round=self.opened.round,
            base_version=self.opened.base_version,
            deadline_s=max(0.0, self.machine.deadline_at - running.elapsed),
            parts=(part,),
            identity=running.identity,
        )
        return Envelope(device, assignment, self._files.write_request(phase, part.sha256, request))

    def _sum_again_without(self, without: UpdateId) -> None:
        """Add all vectors of the sum but one to a new sum, before the survivors are shown.

        A vector whose file is damaged is left out too.
        """
        self.additions.settle()  # no addition may go on: it would go into the old sum
        added, damaged = self.aggregator.added, dict[UpdateId, BadPayload]()
        self.aggregator = cast(SecureAggregator, self.running.mode.aggregator(self.running, self.opened))
        for update_id in added:
            try:
                if update_id != without:
                    self.aggregator.add(self.headers[update_id], self.frames(update_id), 1.0)
            except BadPayload as error:
                damaged[update_id] = error
        for update_id, found in damaged.items():
            self.on(round_events.AggregationRejected(update_id, "bad-payload", str(found)))

    def _unmask(self, keys: UnmaskingKeys) -> str:
        """Remove the masks from the sum; return "" or why that is not possible."""
        running, seed = self.running, self.machine.secure.rotation_seed
        elapsed_s = running.elapsed - self.machine.config.opened_s
        try:
            self.aggregator.unmask(keys, seed, self.opened.round, running.clock.wall(), elapsed_s)
        except (Aborted, BadSum) as error:
            return str(error)
        return ""


def _decode(text: str, clients: int, phase: str, post_quantum: bool) -> bytes:
    """Return the bytes of a message in base64; raise ValueError if it is too long or no base64."""
    most = max_bytes(phase, clients, post_quantum)  # type: ignore[arg-type]  # another phase has no messages: 0
    if len(text) > 4 * (most + 3) // 3:
        raise ValueError(f"a message of {len(text)} characters in the phase {phase[:20]!r}, of at most {most} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("a message that is not base64") from error


class PhaseFiles:
    """The files of one secure round: the messages of its closed phases, and the requests on their way to devices.

    They are in `secure/ROUND` of the run's folder until the round ends, and no backup has them. A simulation keeps no
    messages, because its open round is never resumed.
    """

    def __init__(self, messages: Path, number: int, simulated: bool) -> None:
        self._all, self._folder, self._simulated = messages, messages / str(number), simulated
        self._written = set[Path]()

    def write(self, phase: str, messages: Mapping[str, bytes]) -> str:
        """Make the messages of a phase durable, and return the SHA-256 (hex) of their file."""
        if self._simulated:
            return ""
        data = json.dumps({name: base64.b64encode(message).decode() for name, message in messages.items()}).encode()
        write_atomically(patiently(lambda: private_folder(self._folder)) / phase, data)
        return hashlib.sha256(data).hexdigest()

    def read(self, event: PhaseClosed) -> dict[str, bytes]:
        """Return the messages of a closed phase, in the order in which they arrived; raise `DataLost`."""
        path = self._folder / event.phase
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataLost(
                f"the messages of the phase {event.phase} are not readable", str(error), "restore a backup"
            ) from error
        if hashlib.sha256(data).hexdigest() != event.messages:
            raise DataLost(f"the messages of the phase {event.phase} are damaged", f"{path} has another digest")
        return {device: base64.b64decode(message) for device, message in json.loads(data).items()}

    def write_request(self, phase: str, digest: str, request: bytes) -> Path:
        """Write a request, and return its file; devices with the same request share one."""
        path = self._folder / f"{phase}-{digest[:32]}"
        if path not in self._written:  # a restart writes it again: it is not synced
            patiently(lambda: _write(path, request))
            self._written.add(path)
        return path

    def delete(self) -> None:
        """Delete the files of this round, and of earlier ones that a crash has left."""
        shutil.rmtree(self._all, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    private_folder(path.parent)
    try:
        with open(path, "wb", opener=private_opener) as file:
            file.write(data)
    except OSError as error:
        raise disk_error(error, path) from error
