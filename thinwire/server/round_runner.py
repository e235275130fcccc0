"""Driver of one round: arrivals become events, and actions go to the journal, the aggregation and the fleet.

Invariant: a reply is journalled before its update is aggregated, and acknowledged only after its round is closed. After
a crash each update is therefore either in the journal, or still in the spool or on its device. Updates in the journal
are aggregated again from the spool, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from thinwire.core.events import (
    ClientAsked,
    ClientBack,
    Event,
    RoundOpened,
    StateLost,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
)
from thinwire.core.fleet import Arrival, Envelope, NodeJoined, NodeLeft
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Failure, Metrics, ReplyHeader, UpdateId, asked_round
from thinwire.server import round_events
from thinwire.server.aggregator import FoldQueue, Frames, RoundAggregator
from thinwire.server.context import POLL_S, RunContext
from thinwire.server.dispatch import ReplacementSource, envelope, envelope_again
from thinwire.server.policy.local_work import WeightCaps
from thinwire.server.round_events import FoldUpdate, SelectReplacement
from thinwire.server.round_open import machine_of, open_round, own_codec, own_work
from thinwire.store import MeasureRow

FOLD_WAIT_S = 0.01  # small updates are aggregated within this; longer ones must not block the poll


class RoundRunner:
    """Runs one round from its opening, or from `recovery.take_up` after a restart, until it closes."""

    def __init__(self, running: RunContext, opened: RoundOpened) -> None:
        self.running, self.opened, self.plan = running, opened, running.plan
        self.machine = machine_of(opened, running)
        self.heads: dict[UpdateId, ReplyHeader] = {}
        self.heads_of: Counter[str] = Counter()  # ask_id -> replies to it that were not deferred
        self.others = ReplacementSource(running, opened, self.machine.asks)
        self.missed = False  # True once devices that did not reconnect count as lost
        self.fold = self.new_fold()
        self.folds = FoldQueue(at_once=running.simulated)
        self.fold_s = 0.0
        self.deadlines: dict[str, float] = {}  # ask_id -> seconds, of assignments after the opening
        self.later: list[Event] = []  # events that decide nothing: recorded with the next decision
        self.accepted: list[
            tuple[ReplyHeader, round_events.FoldUpdate]
        ] = []  # in this poll: recorded before any other event

    @classmethod
    def open(cls, running: RunContext) -> RoundRunner | None:
        """Open a round: decide and record it before any assignment is sent. Return None if no device can be
        selected now.
        """
        opened = open_round(running)
        return cls(running, opened) if opened else None

    def run(self) -> None:
        """Send the unanswered assignments, then handle arrivals until the round closes.

        Pipelined rounds (`pipelining.py`) sent their assignments when they opened. `round_close.finish` ends a closed
        round. The round stays open if the service closes meanwhile.
        """
        running, owing = self.running, self._owing()
        waited_for = {*self.machine.outstanding, *(device for device, _ in owing)}
        if not running.past.delay:
            running.ask([self._envelope(device, ask_id) for device, ask_id in owing])
        self._take_deferred()
        try:
            while not self.machine.closed:
                self._take(running.poll(self._wait()))
                self._folded(FOLD_WAIT_S)
                self._miss(waited_for)
                if not self.machine.closed:
                    stopping = running.stop_ordered()
                    if running.stopped == "service":
                        break  # the round stays open, and the next start resumes it
                    self.on(round_events.Stop() if stopping else round_events.Tick())
        finally:
            self.folds.close()

    def _owing(self) -> list[tuple[str, str]]:
        """Return (device, `ask_id`) of this round's unanswered assignments, in the order of selection.

        In a buffered round this includes overdue assignments.
        """
        owed, number = self.running.past.owed, self.opened.round
        return [(device, id_) for device in owed.busy for id_, asked in owed.of(device).items() if asked == number]

    def _take_deferred(self) -> None:
        """Handle the deferred replies, in the order of their arrival."""
        deferred, self.running.deferred = self.running.deferred, {}
        self.missed = False  # a deferred reply may make a disconnected device outstanding again: check once more
        self._take(deferred.values())

    def _miss(self, asked: Iterable[str]) -> None:
        """Count the devices that did not reconnect after a restart as lost, once `return_by` has passed.

        This happens once, because the fleet reports every later disconnection itself.
        """
        if not self.missed and self.running.elapsed >= self.running.return_by:
            self.missed = True
            for device in sorted(set(asked) - set(self.running.presence.hellos)):
                self.on(round_events.DeviceDisconnected(device, "did not come back"))

    def _wait(self) -> float:
        """Return the seconds that the next poll may wait."""
        if self.folds.running:
            return 0.0
        return max(0.0, min(POLL_S, self.machine.deadline_at - self.running.elapsed))

    def _take(self, arrivals: Iterable[Arrival]) -> None:
        """Handle the arrivals of one poll: all accepted replies share one commit, then their updates are aggregated."""
        for arrival in arrivals:
            match arrival:
                case ReplyHeader():
                    self._head(arrival)
                case Failure(kind, text, ask_id, device):
                    self._earlier(device, kind, text, ask_id)
                    self.on(round_events.AssignmentFailed(device, ask_id, kind, text))
                case NodeJoined(device):
                    self.on(round_events.DeviceConnected(device))
                case NodeLeft(device, why):
                    if why == "revoked":
                        self._withdraw(device)
                    self._earlier(device, "left", why)
                    self.on(round_events.DeviceDisconnected(device, why))
        if self.accepted:
            self.record()

    def _withdraw(self, device: str) -> None:
        """Drop the updates of a revoked device that are not aggregated yet; aggregated ones stay, and the
        journal says so.
        """
        self._folded(0.0)
        for update_id in [found for found in self.machine.folding if found.device == device]:
            if self.folds.withdraw(update_id):
                self.on(round_events.FoldRejected(update_id, "revoked"))
        self.running.forget(device)
        if self.later:
            self.record()
        self._take_deferred()  # the round may accept replies again

    def _earlier(self, device: str, kind: str, text: str, ask_id: str = "") -> None:
        """Record that the device will not reply to its assignments of other rounds.

        This concerns the assignment `ask_id` if it is named, otherwise all up to this round. The assignment that the
        state machine knows is left to it, and one whose reply is deferred stays answered.
        """
        if self.accepted:
            self.record()
        here = {self.machine.asks.get(device), *self.running.deferred}
        for busy_with, number in self.running.past.owed.of(device).items():
            named = ask_id == busy_with or (not ask_id and number <= self.opened.round)
            if named and busy_with not in here:
                self.running.lose(device, kind, text, busy_with)

    def _head(self, head: ReplyHeader) -> None:
        """Handle one reply: acknowledge it, reject it, defer it, drop it, or pass it to the state machine."""
        running, update_id = self.running, head.update_id
        if update_id in self.heads:
            return  # the fleet repeats it after a restart; the round acknowledges it when it closes
        if update_id.run != running.run_id or str(update_id) in running.past.decided:
            running.fleet.ack([update_id])  # it belongs to another run, or its outcome is recorded already
            return
        if wrong := running.wrong(head):
            kind, text = wrong
            self._earlier(update_id.device, kind, text, head.ask_id)
            self.on(round_events.AssignmentFailed(update_id.device, head.ask_id, kind, text))
            running.fleet.ack([update_id])
            return
        if self.heads_of[head.ask_id] > 1:
            running.fleet.ack([update_id])  # a device that repeats its replies must not fill the journal
            return
        if self.machine.closed or asked_round(head.ask_id) > self.opened.round:
            running.defer(head)
            return
        self.heads[update_id] = head
        self.heads_of[head.ask_id] += 1
        if head.ask_id in running.past.answered and head.ask_id not in self.machine.answered:
            self.drop(update_id, "duplicate")
            return
        if asked_round(head.ask_id) < running.past.references_from:
            self.drop(update_id, "stale")  # it is a difference to a state that no longer counts
            return
        came_late = running.came_late.get(head.ask_id)
        self._act(
            round_events.UpdateArrived(update_id, head.ask_id, update_id.device, head.base_version, came_late=came_late)
        )

    def on(self, event: round_events.Input) -> None:
        """Pass an event to the state machine, unless the round is closed; record and carry out the actions
        that follow.
        """
        if not self.machine.closed:
            self._act(event)

    def _act(self, event: round_events.Input) -> None:
        """Pass an event to the state machine and carry out its actions.

        All that one event causes is recorded together. Accepted updates are collected instead, so that one poll makes
        one commit.
        """
        running, number = self.running, self.opened.round
        now, elapsed = running.clock.wall(), running.elapsed
        facts, asked = list[Event](), list[tuple[str, str]]()
        for action in self.machine.on(event, elapsed, self.others.in_time):
            match action:
                case round_events.FoldUpdate(update_id):
                    self.accepted.append((self.heads[update_id], action))
                case round_events.DropUpdate(update_id, reason):
                    facts += self.dropped(update_id, reason)
                case round_events.DeferUpdate(update_id):
                    deferred = self.heads.pop(update_id)
                    self.heads_of[deferred.ask_id] -= 1
                    running.defer(deferred)
                case round_events.MarkLost(device, ask_id, kind, text) if ask_id not in running.deferred:
                    facts.append(running.failed(number, device, ask_id, kind, text))
                case round_events.Reinstate(device, ask_id):
                    facts.append(ClientBack(now, number, device, ask_id, elapsed))
                    if not running.holders.sent(device, ask_id):
                        asked.append((device, ask_id))
                case round_events.SelectReplacement(device, ask_id):
                    size, left_s = running.sending.parcel(device).size, action.deadline_s
                    own = {**own_work(running, device, left_s), **own_codec(running, number, device, size, left_s)}
                    facts.append(replace(asked_fact(now, number, elapsed, size, action), **own))
                    self.deadlines[ask_id] = action.deadline_s
                    asked.append((device, ask_id))
        if facts:
            self.record(*facts)
        if asked:
            running.ask([self._envelope(device, ask_id) for device, ask_id in asked])

    def _envelope(self, device: str, ask_id: str) -> Envelope:
        """Return the assignment as it is sent to the device now."""
        if self.running.past.delay:
            return envelope_again(self.running, device, ask_id)
        deadline_s = self.deadlines.get(ask_id, self.opened.deadline_s)
        return envelope(self.running, device, ask_id, "train", self.opened.round, deadline_s)

    def drop(self, update_id: UpdateId, reason: str) -> None:
        """Drop an update without passing it to the state machine, and record the reason."""
        self.machine.dropped.append(update_id)
        self.record(*self.dropped(update_id, reason))

    def dropped(self, update_id: UpdateId, reason: str) -> list[UpdateDropped]:
        """Return the event that an update is dropped; none if the journal has it already, as after a second
        aggregation.
        """
        if str(update_id) in self.running.past.dropped:
            return []
        now, head = self.running.clock.wall(), self.heads[update_id]
        admitted = self.running.past.scores.admitted(head.metrics)
        return [dropped_fact(now, self.opened.round, self.running.elapsed, head, reason, admitted)]

    def begin(self, head: ReplyHeader, discount: float) -> None:
        """Start to aggregate an update that is recorded as accepted."""
        frames = self.frames(head.update_id)
        self.folds.begin(head.update_id, lambda: self.fold.add(head, frames, discount))

    def _folded(self, wait_s: float) -> None:
        """Tell the state machine which updates were aggregated or rejected; wait at most `wait_s` seconds for the next
        one.
        """
        for outcome in self.folds.finished(wait_s):
            self.fold_s += outcome.seconds
            if outcome.refused:
                self.on(round_events.FoldRejected(outcome.update_id, outcome.refused))
                self._take_deferred()  # the round may accept replies again
            else:
                self.later.append(
                    UpdateFolded(self.running.clock.wall(), self.opened.round, str(outcome.update_id), outcome.seconds)
                )
                self.on(round_events.FoldDone(outcome.update_id))

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Record events in the order in which they happened: first the updates that were accepted before them.

        After the commit the accepted updates go to the aggregation.
        """
        later, self.later = self.later, []
        accepted, self.accepted = self.accepted, []
        now, elapsed = self.running.clock.wall(), self.running.elapsed
        number, facts = self.opened.round, list[Event]()
        for head, action in accepted:
            admitted = self.running.past.scores.admitted(head.metrics)
            facts += [accepted_fact(now, number, elapsed, head, action, admitted), *lost_fact(now, number, head)]
        self.running.record(*later, *facts, *events, measured=measured)
        for head, action in accepted:
            self.running.came_late.pop(head.ask_id, None)
            self.begin(head, action.discount)

    def new_fold(self, caps: WeightCaps | None = None) -> RoundAggregator:
        """Return an empty aggregator for this round, with the round's weights and these caps."""
        running, codec = self.running, self.opened.codec
        weights, counters = running.past.weights, running.model.counters
        return RoundAggregator(
            self.plan, running.layout, codec, weights, running.codec_of, counters, running.steps_of, caps
        )

    def frames(self, update_id: UpdateId) -> Frames:
        """Return a function that opens the payload of an update in the spool."""
        return lambda: self.running.fleet.open(update_id)


def asked_fact(
    at: float, round_number: int, elapsed_s: float, payload_bytes: int, action: SelectReplacement
) -> ClientAsked:
    """Return the event that a device is selected during the round; it is recorded before the assignment is sent."""
    return ClientAsked(
        at=at,
        round=round_number,
        device=action.device,
        ask_id=action.ask_id,
        payload_bytes=payload_bytes,
        elapsed_s=elapsed_s,
        base_version=action.base_version,
        deadline_s=action.deadline_s,
        why=action.why,
        instead_of=action.instead_of,
    )


def accepted_fact(
    at: float, round_number: int, elapsed_s: float, head: ReplyHeader, action: FoldUpdate, admitted: Metrics
) -> UpdateAccepted:
    """Return the event that an update counts for this round, with the `admitted` metrics of its reply.

    The order of these events is the order of aggregation.
    """
    return UpdateAccepted(
        at=at,
        round=round_number,
        asked_round=asked_round(head.ask_id),
        device=head.update_id.device,
        ask_id=head.ask_id,
        update_id=str(head.update_id),
        staleness=action.staleness,
        discount=action.discount,
        late=action.late,
        elapsed_s=elapsed_s,
        head=reply_to_json(replace(head, metrics=admitted)),
        ignored=len(head.metrics) - len(admitted),
    )


def lost_fact(at: float, round_number: int, head: ReplyHeader) -> list[StateLost]:
    """Return the event that a device lost its state and started again, if its reply says so; otherwise none."""
    update_id = head.update_id
    return [StateLost(at, round_number, update_id.device, str(update_id), head.lost)] if head.lost else []


def dropped_fact(
    at: float, round_number: int, elapsed_s: float, head: ReplyHeader, reason: str, admitted: Metrics
) -> UpdateDropped:
    """Return the event that an update does not count, with the reason."""
    return UpdateDropped(
        at=at,
        round=round_number,
        asked_round=asked_round(head.ask_id),
        device=head.update_id.device,
        ask_id=head.ask_id,
        update_id=str(head.update_id),
        reason=reason,
        elapsed_s=elapsed_s,
        head=reply_to_json(replace(head, metrics=admitted)),
    )
