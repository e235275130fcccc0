"""Driver of one round: arrivals become events, and actions go to the journal, the aggregation and the fleet.

Invariant: an assignment is journalled before it is sent. A reply is journalled before its update is aggregated, and
acknowledged only after its round is closed. After a crash each assignment that left is therefore in the journal. Each
update is in the journal, in the spool or on its device; updates in the journal are aggregated again from the spool, in
the same order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from thinwire.aggregation.mean import Frames
from thinwire.core.events import (
    ClientReconnected,
    ClientSelected,
    DropReason,
    Evaluated,
    Event,
    RoundOpened,
    StateLost,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected
from thinwire.core.protocol import without_digests
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Failure, PhaseReply, ReplyHeader, UpdateId, assignment_round
from thinwire.server import round_events
from thinwire.server.context import POLL_S, RunContext
from thinwire.server.device_terms import Replacements, invalid_reply, own_terms
from thinwire.server.round_close import AGGREGATION_WAIT_S, AggregationQueue
from thinwire.server.round_events import AggregateUpdate, no_replacements
from thinwire.store import MeasureRow


@dataclass(frozen=True)
class ReplyDecision:
    """Holds the decision about a reply that is made before the state machine sees it.

    `kind` and `text` are those of a failure, and `reason` is that of a drop.
    """

    action: Literal["ignore", "acknowledge", "fail", "defer", "drop", "take"]
    kind: str = ""
    text: str = ""
    reason: DropReason | None = None


class RoundRunner:
    """Runs one round from its opening, or from `recovery.rebuild_round` after a restart, until it closes."""

    def __init__(self, running: RunContext, opened: RoundOpened) -> None:
        self.running, self.opened, self.plan = running, opened, running.plan
        self.machine = running.mode.machine(opened, running)
        self.headers: dict[UpdateId, ReplyHeader] = {}
        self.reply_counts: Counter[str] = Counter()  # assignment_id -> replies to it that were not deferred
        others = Replacements(running, opened, self.machine.assignments)
        self.replacements = others.in_time if running.mode.replaces else no_replacements
        self.resumed = False  # True if the round opened earlier, perhaps in a process that was killed
        self.absent_counted = False  # True once devices that did not reconnect count as lost
        self.aggregator = running.mode.aggregator(running, opened)
        self.aggregator.reserve(opened.target_updates)
        self.additions = AggregationQueue(at_once=running.simulated)
        self.adding_s = 0.0  # seconds in which updates were added to the sum
        self.began_at = running.clock.wall()
        self.receive_s: dict[UpdateId, float] = {}  # from a reply's arrival, or its round's begin, until it is handled
        self._handled_at: dict[UpdateId, float] = {}  # by the stopwatch, until the update is in the sum
        self.aggregate_s: dict[UpdateId, float] = {}  # from there until the update is in the sum
        self.unwritten_events: list[Event] = []  # events that decide nothing: recorded with the next decision
        # Replies of this poll: recorded before any other event.
        self.accepted: list[tuple[ReplyHeader, AggregateUpdate]] = []

    def run(self) -> None:
        """Send the outstanding assignments, then handle arrivals until the round closes.

        `round_close.finish` ends a closed round. The round stays open if the service closes meanwhile.
        """
        running, outstanding = self.running, self._outstanding()
        waited_for = {*self.machine.outstanding, *(device for device, _ in outstanding)}
        running.assign(running.mode.envelopes_at_start(running, [assignment_id for _, assignment_id in outstanding]))
        self._take_deferred()
        try:
            while not self.machine.closed:
                self._take(running.poll(self._poll_wait_s()))
                self._report_additions(AGGREGATION_WAIT_S)
                self._lose_absent(waited_for)
                if not self.machine.closed:
                    stopping = running.must_stop()
                    if running.stopped == "service":
                        break  # the round stays open, and the next start resumes it
                    self.on(round_events.Stop() if stopping else round_events.Tick())
        finally:
            self.additions.close()

    def _outstanding(self) -> list[tuple[str, str]]:
        """Return (device, `assignment_id`) of this round's outstanding assignments, in the order of selection.

        After a restart these include assignments that were committed and never sent; in a buffered round also overdue
        ones.
        """
        ledger, number = self.running.run_state.ledger, self.opened.round
        every = (assigned for device in ledger.busy for assigned in ledger.outstanding(device))
        return [(assigned.device, assigned.assignment_id) for assigned in every if assigned.round == number]

    def _take_deferred(self) -> None:
        """Handle the deferred replies, in the order of their arrival."""
        self.absent_counted = False  # a deferred reply may make a disconnected device outstanding again
        self._take(self.running.take_deferred())

    def _lose_absent(self, devices: Iterable[str]) -> None:
        """Count the devices that did not reconnect after a restart as lost; later the fleet reports them itself."""
        if not self.absent_counted and self.running.elapsed >= self.running.reconnect_until_s:
            self.absent_counted = True
            for device in sorted(set(devices) - set(self.running.online.hellos)):
                self.on(round_events.DeviceDisconnected(device, "did not come back"))

    def _poll_wait_s(self) -> float:
        """Return the seconds that the next poll may wait. A round that only sums wants its devices for the next one."""
        if self.additions.running:
            if not self.running.run_state.ledger.busy:
                self.running.leases.want(self.running.run_id, self.machine.assignments)
            return 0.0
        return max(0.0, min(POLL_S, self.machine.deadline_at - self.running.elapsed))

    def _take(self, arrivals: Iterable[Arrival]) -> None:
        """Handle the arrivals of one poll: all accepted replies share one commit, then their updates are aggregated."""
        for arrival in arrivals:
            match arrival:
                case ReplyHeader():
                    self._on_reply(arrival)
                case PhaseReply():
                    self.on_message(arrival)
                case Failure(kind, text, assignment_id, device):
                    self._fail_in_other_rounds(device, kind, text, assignment_id)
                    self.on(round_events.AssignmentFailed(device, assignment_id, kind, text))
                case ClientConnected(device):
                    self.on(round_events.DeviceConnected(device))
                case ClientDisconnected(device, why):
                    if why == "revoked":
                        self._withdraw(device)
                    self._fail_in_other_rounds(device, "offline", why)
                    self.on(round_events.DeviceDisconnected(device, why))
        if self.accepted:
            self.record()

    def on_message(self, reply: PhaseReply) -> None:
        """Ignore a message of a phase: only a secure round requests one."""

    def _withdraw(self, device: str) -> None:
        """Drop the updates of a revoked device that are not aggregated yet; aggregated ones stay, and the
        journal says so.
        """
        self._report_additions(0.0)
        for update_id in [own for own in self.machine.aggregating if own.device == device]:
            if self.additions.withdraw(update_id):
                self.on(round_events.AggregationRejected(update_id, "revoked"))
        self.running.forget(device)
        if self.unwritten_events:
            self.record()
        self._take_deferred()

    def _fail_in_other_rounds(self, device: str, kind: str, text: str, assignment_id: str = "") -> None:
        """Record that the device will not reply to its assignments of other rounds.

        This concerns the assignment `assignment_id` if it is named, otherwise all up to this round. The assignment that
        the state machine knows is left to it, and one whose reply is deferred stays answered.
        """
        if self.accepted:
            self.record()
        here = {self.machine.assignments.get(device), *self.running.deferred}
        for assigned in self.running.run_state.ledger.outstanding(device):
            named = assignment_id == assigned.assignment_id or (
                not assignment_id and assigned.round <= self.opened.round
            )
            if named and assigned.assignment_id not in here:
                self.running.lose(device, kind, text, assigned.assignment_id)

    def _on_reply(self, header: ReplyHeader) -> None:
        """Carry out what `_decide` decides about one reply."""
        running, update_id = self.running, header.update_id
        decision = self._decide(header)
        match decision.action:
            case "acknowledge":
                running.fleet.ack([update_id])
            case "fail":
                self._fail_in_other_rounds(update_id.device, decision.kind, decision.text, header.assignment_id)
                failed = round_events.AssignmentFailed(
                    update_id.device, header.assignment_id, decision.kind, decision.text
                )
                self.on(failed)
                running.fleet.ack([update_id])
            case "defer":
                running.defer(header)
            case "drop":
                self._note_arrival(header)
                self.machine.dropped.append(update_id)
                assert decision.reason is not None, "a drop has a reason"
                self.record(*self.drop_events(update_id, decision.reason))
            case "take":
                self._note_arrival(header)
                came_late = running.came_late.get(header.assignment_id)
                self._act(
                    round_events.UpdateArrived(
                        update_id, header.assignment_id, update_id.device, header.base_version, came_late=came_late
                    )
                )

    def _decide(self, header: ReplyHeader) -> ReplyDecision:
        """Decide about a reply before the state machine sees it; this changes nothing.

        The machine drops what is late, stale or a duplicate among the assignments that it knows. Here are the others.
        """
        state, number = self.running.run_state, assignment_round(header.assignment_id)
        if header.update_id in self.headers:
            return ReplyDecision("ignore")  # repeated after a restart; the round acknowledges it when it closes
        if header.update_id.run != self.running.run_id or state.ledger.is_decided(header.update_id):
            return ReplyDecision("acknowledge")  # it belongs to another run, or its outcome is recorded already
        if wrong := invalid_reply(self.running, header):
            return ReplyDecision("fail", *wrong)
        if self.reply_counts[header.assignment_id] > 1:
            return ReplyDecision("acknowledge")  # a device that repeats its replies must not fill the journal
        if self.machine.closed or number > self.opened.round:
            return ReplyDecision("defer")
        if state.ledger.is_answered(header.assignment_id) and header.assignment_id not in self.machine.replied:
            return ReplyDecision("drop", reason="duplicate")
        if state.ledger.is_forgotten(header.assignment_id) or number < state.references_from:
            return ReplyDecision("drop", reason="stale")  # too old, or a difference to a state that no longer counts
        return ReplyDecision("take")

    def _note_arrival(self, header: ReplyHeader) -> None:
        """Count a reply that this round decides about, and start its stopwatch."""
        self.headers[header.update_id] = header
        self.reply_counts[header.assignment_id] += 1
        self._handled_at[header.update_id] = time.perf_counter()
        if header.transfer is not None:
            since = max(header.transfer.arrived_at, self.began_at)
            self.receive_s[header.update_id] = max(0.0, self.running.clock.wall() - since)

    def on(self, event: round_events.Input) -> None:
        """Pass an event to the state machine, unless the round is closed; record and carry out the actions
        that follow.
        """
        if not self.machine.closed:
            self._act(event)

    def _act(self, event: round_events.Input) -> None:
        """Pass an event to the state machine and carry out its actions."""
        self.running.leases.want(self.running.run_id, ())  # until the machine seeks devices again
        self._carry_out(self.machine.on(event, self.running.elapsed, self.replacements))

    def _carry_out(self, actions: Sequence[round_events.Action]) -> None:
        """Carry out the actions that one event causes; all of them are recorded together.

        Accepted updates are collected instead, so that one poll makes one commit.
        """
        running, number = self.running, self.opened.round
        now, elapsed = running.clock.wall(), running.elapsed
        facts, assigned = list[Event](), list[str]()
        for action in actions:
            match action:
                case round_events.AggregateUpdate(update_id):
                    self.accepted.append((self.headers[update_id], action))
                case round_events.DropUpdate(update_id, reason, detail):
                    facts += self.drop_events(update_id, reason, detail)
                case round_events.DeferUpdate(update_id):
                    deferred = self.headers.pop(update_id)
                    self.reply_counts[deferred.assignment_id] -= 1
                    running.defer(deferred)
                case round_events.MarkLost(device, assignment_id, kind, text) if assignment_id not in running.deferred:
                    facts.append(running.failure_event(number, device, assignment_id, kind, text))
                case round_events.Reinstate(device, assignment_id):
                    facts.append(ClientReconnected(now, number, device, assignment_id, elapsed))
                    if running.sent.find(device, assignment_id) is None:
                        assigned.append(assignment_id)
                case round_events.SelectReplacement(device, assignment_id):
                    size, left_s = running.distributor.payload_for(device).size, action.deadline_s
                    own = own_terms(running, number, device, size, left_s)
                    base, why, instead_of = action.base_version, action.why, action.instead_of
                    facts.append(
                        ClientSelected(
                            now, number, device, assignment_id, size, elapsed_s=elapsed, base_version=base,
                            deadline_s=left_s, why=why, instead_of=instead_of, **own,
                        )
                    )  # fmt: skip
                    assigned.append(assignment_id)
                case _:
                    facts += self.events_of(action)
        if facts:
            self.record(*facts)
        if assigned:
            running.assign([running.mode.assignment(running, assignment_id) for assignment_id in assigned])

    def events_of(self, action: round_events.Action) -> list[Event]:
        """Return the events of an action that only other modes have."""
        return []

    def clean_up(self) -> None:
        """Delete and withdraw what a closed round leaves behind; only a secure round leaves something."""

    def drop_events(self, update_id: UpdateId, reason: DropReason, detail: str = "") -> list[UpdateDropped]:
        """Return the event that an update is dropped; none if the journal has it already, as after a second
        aggregation.
        """
        if self.running.run_state.ledger.is_dropped(update_id):
            return []
        return [UpdateDropped(**self._fields(self.headers[update_id]), reason=reason, detail=detail)]

    def _acceptance_events(self, header: ReplyHeader, action: AggregateUpdate) -> list[Event]:
        """Return the event that an update counts for this round, and the loss of the device's state that it reports."""
        fields, update_id = self._fields(header), header.update_id
        counts = UpdateAccepted(
            **fields, staleness=action.staleness, discount=action.discount, late=action.late,
            ignored=len(header.metrics) - len(fields["header"]["metrics"]),
        )  # fmt: skip
        if not header.lost:
            return [counts]
        return [counts, StateLost(counts.at, counts.round, update_id.device, counts.update_id, header.lost)]

    def _fields(self, header: ReplyHeader) -> dict[str, Any]:
        """Return the fields of an event about a reply; of its metrics the event has those that the run records."""
        header = without_digests(header) if self.plan.is_protected else header
        admitted = self.running.run_state.scores.admitted(header.metrics)
        return {
            "at": self.running.clock.wall(),
            "round": self.opened.round,
            "assignment_round": assignment_round(header.assignment_id),
            "device": header.update_id.device,
            "assignment_id": header.assignment_id,
            "update_id": str(header.update_id),
            "elapsed_s": self.running.elapsed,
            "header": reply_to_json(header if admitted == header.metrics else replace(header, metrics=admitted)),
        }

    def begin(self, header: ReplyHeader, discount: float) -> None:
        """Start to aggregate an update that is recorded as accepted."""
        frames = self.frames(header.update_id)
        self.additions.begin(header.update_id, lambda: self.aggregator.add(header, frames, discount))

    def _report_additions(self, wait_s: float) -> None:
        """Report aggregated and rejected updates to the state machine; wait up to `wait_s` s for the next one."""
        for outcome in self.additions.finished(wait_s):
            self.adding_s += outcome.seconds
            if handled_at := self._handled_at.pop(outcome.update_id, 0.0):  # else by an earlier process
                self.aggregate_s[outcome.update_id] = time.perf_counter() - handled_at
            if outcome.error is not None:
                self.on(round_events.AggregationRejected(outcome.update_id, "bad-payload", str(outcome.error)))
                self._take_deferred()  # the round may accept replies again
            else:
                self.unwritten_events.append(
                    UpdateAggregated(
                        self.running.clock.wall(), self.opened.round, str(outcome.update_id), outcome.seconds
                    )
                )
                self.on(round_events.AggregationDone(outcome.update_id))

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Record events in the order in which they happened: first the updates that were accepted before them.

        After the commit the accepted updates go to the aggregation.
        """
        unwritten, self.unwritten_events = self.unwritten_events, []
        accepted, self.accepted = self.accepted, []
        facts = [event for header, action in accepted for event in self._acceptance_events(header, action)]
        self.running.record(*unwritten, *facts, *events, measured=measured)
        for header, action in accepted:
            self.begin(header, action.discount)

    def sum_events(self) -> list[Event]:
        """Return the event about the sum of a secure round; other rounds have none."""
        return []

    def evaluation_events(self, now: float) -> list[Evaluated]:
        """Return the evaluations that are final when the round closes."""
        in_time = [header for update_id, header in self.headers.items() if update_id in self.machine.in_time]
        return self.running.mode.evaluate(self.running, self.opened, in_time, now)

    def frames(self, update_id: UpdateId) -> Frames:
        """Return a function that opens the payload of an update in the spool."""
        return lambda: self.running.fleet.open(update_id)
