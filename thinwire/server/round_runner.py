"""One round over a fleet: arrivals go into the state machine, its actions go to the journal, the fold and the fleet.

An answer is journalled before it is folded and acked only when its round is closed, so after a kill it is either
in the journal (and folded again from the spool, in the same order) or the spool or the device still has it.
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
from thinwire.core.types import Failure, Metrics, ReplyHead, UpdateId, asked_round
from thinwire.server import round_events
from thinwire.server.aggregator import Folds, Frames, RoundAggregator
from thinwire.server.context import POLL_S, Running
from thinwire.server.dispatch import Others, envelope, envelope_again
from thinwire.server.policy.local_work import Caps
from thinwire.server.round_events import AskNow, FoldUpdate
from thinwire.server.round_open import machine_of, open_round, own_codec, own_work
from thinwire.store import MeasureRow

FOLD_WAIT_S = 0.01  # small folds end within this; longer ones must not hold up the poll


class OneRound:
    """From `open`, or `taking_up.take_up`, to `run`, which returns when the round is closed and recorded."""

    def __init__(self, running: Running, opened: RoundOpened) -> None:
        self.running, self.opened, self.plan = running, opened, running.plan
        self.machine = machine_of(opened, running)
        self.heads: dict[UpdateId, ReplyHead] = {}
        self.heads_of: Counter[str] = Counter()  # ask_id -> how many
        self.others = Others(running, opened, self.machine.asks)
        self.missed = False  # whether who did not come back was counted as gone
        self.fold = self.new_fold()
        self.folds = Folds(at_once=running.simulated)
        self.fold_s = 0.0
        self.deadlines: dict[str, float] = {}  # ask_id -> seconds, of asks after the opening
        self.later: list[Event] = []  # facts that decide nothing: recorded with the next decision
        self.accepted: list[
            tuple[ReplyHead, round_events.FoldUpdate]
        ] = []  # of this poll: recorded before whatever follows

    @classmethod
    def open(cls, running: Running) -> OneRound | None:
        """A new round, decided and recorded before any ask leaves; None when nobody can be asked now."""
        opened = open_round(running)
        return cls(running, opened) if opened else None

    def run(self) -> None:
        """Send what is unanswered and was not sent ahead, and take what comes until one reason closes the round: then
        `closing.finish` ends it. It stays open where the service is closing.
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
                        break  # it stays open, and goes on at the next start
                    self.on(round_events.Stop() if stopping else round_events.Tick())
        finally:
            self.folds.close()

    def _owing(self) -> list[tuple[str, str]]:
        """Who has not answered what this round asked, in the order asked; in a buffer also whose time is up."""
        owed, number = self.running.past.owed, self.opened.round
        return [(device, id_) for device in owed.busy for id_, asked in owed.of(device).items() if asked == number]

    def _take_deferred(self) -> None:
        """What came when nothing was accepted, in its order."""
        deferred, self.running.deferred = self.running.deferred, {}
        self.missed = False  # it may be of somebody who is gone, and is waited for again
        self._take(deferred.values())

    def _miss(self, asked: Iterable[str]) -> None:
        """Count as gone who was asked before a restart and did not come back: once, since of others the fleet tells."""
        if not self.missed and self.running.elapsed >= self.running.return_by:
            self.missed = True
            for device in sorted(set(asked) - set(self.running.presence.hellos)):
                self.on(round_events.Left(device, "did not come back"))

    def _wait(self) -> float:
        if self.folds.running:
            return 0.0
        return max(0.0, min(POLL_S, self.machine.deadline_at - self.running.elapsed))

    def _take(self, arrivals: Iterable[Arrival]) -> None:
        """Everything that came in one poll: accepted answers share one commit, then they are folded."""
        for arrival in arrivals:
            match arrival:
                case ReplyHead():
                    self._head(arrival)
                case Failure(kind, text, ask_id, device):
                    self._earlier(device, kind, text, ask_id)
                    self.on(round_events.Failed(device, ask_id, kind, text))
                case NodeJoined(device):
                    self.on(round_events.Joined(device))
                case NodeLeft(device, why):
                    if why == "revoked":
                        self._withdraw(device)
                    self._earlier(device, "left", why)
                    self.on(round_events.Left(device, why))
        if self.accepted:
            self.record()

    def _withdraw(self, device: str) -> None:
        """Drop what a device that was shut out sent and nobody has folded; what is folded stays, and is recorded so."""
        self._folded(0.0)
        for update_id in [found for found in self.machine.folding if found.device == device]:
            if self.folds.withdraw(update_id):
                self.on(round_events.Refused(update_id, "revoked"))
        self.running.forget(device)
        if self.later:
            self.record()
        self._take_deferred()  # there may be room again

    def _earlier(self, device: str, kind: str, text: str, ask_id: str = "") -> None:
        """Another round's ask will not be answered either: the one that is named, else all of earlier rounds; but for
        those whose answer is here.
        """
        if self.accepted:
            self.record()
        here = {self.machine.asks.get(device), *self.running.deferred}
        for busy_with, number in self.running.past.owed.of(device).items():
            named = ask_id == busy_with or (not ask_id and number <= self.opened.round)
            if named and busy_with not in here:
                self.running.lose(device, kind, text, busy_with)

    def _head(self, head: ReplyHead) -> None:
        running, update_id = self.running, head.update_id
        if update_id in self.heads:
            return  # it comes again after a restart; it is acked when the round is closed
        if update_id.run != running.run_id or str(update_id) in running.past.decided:
            running.fleet.ack([update_id])  # of a run that is over, or decided already
            return
        if wrong := running.wrong(head):
            kind, text = wrong
            self._earlier(update_id.device, kind, text, head.ask_id)
            self.on(round_events.Failed(update_id.device, head.ask_id, kind, text))
            running.fleet.ack([update_id])
            return
        if self.heads_of[head.ask_id] > 1:
            running.fleet.ack([update_id])  # a device that answers one ask again and again fills no journal
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
            self.drop(update_id, "stale")  # it is a difference to what counts no more
            return
        came_late = running.came_late.get(head.ask_id)
        self._act(round_events.Head(update_id, head.ask_id, update_id.device, head.base_version, came_late=came_late))

    def on(self, event: round_events.Input) -> None:
        """Something has happened to the round: what follows from that is recorded and done."""
        if not self.machine.closed:
            self._act(event)

    def _act(self, event: round_events.Input) -> None:
        """Feed the machine and carry out what needs no batching: what one event led to is recorded together."""
        running, number = self.running, self.opened.round
        now, elapsed = running.clock.wall(), running.elapsed
        facts, asked = list[Event](), list[tuple[str, str]]()
        for action in self.machine.on(event, elapsed, self.others.in_time):
            match action:
                case round_events.FoldUpdate(update_id):
                    self.accepted.append((self.heads[update_id], action))
                case round_events.Drop(update_id, reason):
                    facts += self.dropped(update_id, reason)
                case round_events.Defer(update_id):
                    deferred = self.heads.pop(update_id)
                    self.heads_of[deferred.ask_id] -= 1
                    running.defer(deferred)
                case round_events.Lose(device, ask_id, kind, text) if ask_id not in running.deferred:
                    facts.append(running.failed(number, device, ask_id, kind, text))
                case round_events.Back(device, ask_id):
                    facts.append(ClientBack(now, number, device, ask_id, elapsed))
                    if not running.holders.sent(device, ask_id):
                        asked.append((device, ask_id))
                case round_events.AskNow(device, ask_id):
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
        if self.running.past.delay:
            return envelope_again(self.running, device, ask_id)
        deadline_s = self.deadlines.get(ask_id, self.opened.deadline_s)
        return envelope(self.running, device, ask_id, "train", self.opened.round, deadline_s)

    def drop(self, update_id: UpdateId, reason: str) -> None:
        """Of an answer that the machine does not hear of."""
        self.machine.dropped.append(update_id)
        self.record(*self.dropped(update_id, reason))

    def dropped(self, update_id: UpdateId, reason: str) -> list[UpdateDropped]:
        """The fact that an answer does not count; none where refolding found again what the journal knows."""
        if str(update_id) in self.running.past.dropped:
            return []
        now, head = self.running.clock.wall(), self.heads[update_id]
        admitted = self.running.past.scores.admitted(head.metrics)
        return [dropped_fact(now, self.opened.round, self.running.elapsed, head, reason, admitted)]

    def begin(self, head: ReplyHead, discount: float) -> None:
        """Fold an answer that is recorded as accepted."""
        frames = self.frames(head.update_id)
        self.folds.begin(head.update_id, lambda: self.fold.add(head, frames, discount))

    def _folded(self, wait_s: float) -> None:
        for outcome in self.folds.finished(wait_s):
            self.fold_s += outcome.seconds
            if outcome.refused:
                self.on(round_events.Refused(outcome.update_id, outcome.refused))
                self._take_deferred()  # it may accept again
            else:
                self.later.append(
                    UpdateFolded(self.running.clock.wall(), self.opened.round, str(outcome.update_id), outcome.seconds)
                )
                self.on(round_events.Folded(outcome.update_id))

    def record(self, *events: Event, measured: Sequence[MeasureRow] = ()) -> None:
        """Make facts durable in the order in which they came to be: first what was accepted before them."""
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

    def new_fold(self, caps: Caps | None = None) -> RoundAggregator:
        running, codec = self.running, self.opened.codec
        weights, counters = running.past.weights, running.model.counters
        return RoundAggregator(
            self.plan, running.layout, codec, weights, running.codec_of, counters, running.steps_of, caps
        )

    def frames(self, update_id: UpdateId) -> Frames:
        return lambda: self.running.fleet.open(update_id)


# What is journalled about one ask and its answer.


def asked_fact(at: float, round_number: int, elapsed_s: float, payload_bytes: int, action: AskNow) -> ClientAsked:
    """A device is asked in the middle of a round: recorded before the ask leaves."""
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
    at: float, round_number: int, elapsed_s: float, head: ReplyHead, action: FoldUpdate, admitted: Metrics
) -> UpdateAccepted:
    """An answer counts for this round; the order of these is the order of folding. Of its metrics some are recorded."""
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


def lost_fact(at: float, round_number: int, head: ReplyHead) -> list[StateLost]:
    """That a device began anew, where its answer says so."""
    update_id = head.update_id
    return [StateLost(at, round_number, update_id.device, str(update_id), head.lost)] if head.lost else []


def dropped_fact(
    at: float, round_number: int, elapsed_s: float, head: ReplyHead, reason: str, admitted: Metrics
) -> UpdateDropped:
    """An answer does not count, and why."""
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
