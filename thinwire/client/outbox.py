"""Apply exactly-once delivery on the device, as pure steps from one run state to the next.

A reply is in the outbox from its commit until the aggregator sends its outcome. A reply without an update
(metrics, or the first model of a run) has no outcome: it leaves the outbox when the aggregator has it. A reply that is
sent again has the same bytes and the same `update_id`, so the aggregator recognizes it.

Outcomes (`UpdateOutcome`):

- aggregated (`aggregated`): the device forgets the reply.
- dropped: with error feedback the device adds the decoded update to the residual, and to nothing else. Without
  feedback, and under masks, the work of that update is lost.
- unknown: the device keeps the reply.

Invariant, with error feedback and without masks: at any moment `residual + what may still be aggregated + what was
aggregated` is the sum of all raw updates, up to rounding. An outcome that arrives twice has no effect the second time.

`OutcomeHandler` applies the outcomes of one assignment to a run's state and decides what the plan makes of them.

Overlap is delayed averaging (Zhu, Lin et al. 2021): a device continues to train while its updates travel. Training
starts from the model

    w = x^_V + sum(pending)

where `x^_V` is the model version that the assignment names. `pending` are the device's own updates that no version up
to V contains, as they were trained and not as they were sent. What a codec left out is in the residual and is sent
later, but the device has learned it already.

An update is pending until an assignment brings its outcome: aggregated into a version up to the assignment's own, or
dropped. At most `max_delay` updates are pending, because the aggregator opens one round more than that
(server/pipelining.py). A lost outcome, or a reply that came when all rounds were closed, can leave more: then the
oldest are no longer counted.

Invariant: w is computed again for each assignment from values that are exact on both ends. Nothing is subtracted from a
model that was trained on, and no difference to a decoded update accumulates, so w does not drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.aggregation.control_variates import algorithm_of, own_segments, transmitted_layout
from thinwire.aggregation.plan_codecs import feedback_of
from thinwire.client import payload
from thinwire.client.errors import CannotReply
from thinwire.client.run_state import NOT_KNOWN, ClientRunState, Entry, RunFolder
from thinwire.core.errors import BadPayload
from thinwire.core.records import replace
from thinwire.core.types import ReplyHeader, UpdateId, UpdateOutcome

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Assignment, Vector


# (dropped reply, state) -> the state with its update restored
RestoreUpdate = Callable[[Entry, ClientRunState], ClientRunState]


def find(state: ClientRunState, assignment_id: str) -> Entry | None:
    """Return the reply that was already made to this assignment, None if there is none."""
    return next((entry for entry in state.outbox if entry.header.assignment_id == assignment_id), None)


def apply_outcomes(
    state: ClientRunState, outcomes: Iterable[UpdateOutcome], restore_update: RestoreUpdate
) -> ClientRunState:
    """Apply the outcomes of earlier replies. An outcome whose id is not in the outbox was applied before: skip it."""
    by_id = {outcome.update_id: outcome for outcome in outcomes}
    kept = []
    for entry in state.outbox:
        outcome = by_id.get(entry.header.update_id)
        if outcome is None or outcome.outcome == "unknown":
            kept.append(entry)
        elif outcome.outcome == "dropped" and entry.expects_outcome:
            state = restore_update(entry, state)
        elif outcome.outcome == "aggregated" and not state.counted_at:
            state = replace(state, counted_at=outcome.version)
    return state if len(kept) == len(state.outbox) else replace(state, outbox=tuple(kept))


def expire(state: ClientRunState, round_number: int, max_staleness: int) -> ClientRunState:
    """Remove replies that wait for an outcome for more than `max_staleness` rounds, at the second such assignment.

    A device that was offline may get the first one before its reply has arrived, and the outcome with the next one.
    The updates of removed replies are not restored, because one of them may have been aggregated.
    """
    kept = tuple(
        entry if round_number - entry.round <= max_staleness else replace(entry, is_overdue=True)
        for entry in state.outbox
        if round_number - entry.round <= max_staleness or not entry.is_overdue
    )
    return state if kept == state.outbox else replace(state, outbox=kept)


def restart(state: ClientRunState, references_from: int) -> ClientRunState:
    """Start again from zero if the aggregator's sum of what devices sent is 0 again since round `references_from`.

    Reference and control variate become None. Replies to earlier assignments leave the outbox, and a loss of state that
    concerned an earlier sum no longer matters. If it is not known which sum the loss concerned, `lost` stays: the loss
    may concern this sum, the first that the device learns of since. The round that was encoded last becomes 0, which
    `OutcomeHandler.apply` takes back for a plan with masks.
    """
    if references_from <= state.references_from:
        return state
    kept = tuple(entry for entry in state.outbox if entry.round >= references_from)
    lost = state.lost if state.references_from == NOT_KNOWN else ""
    return replace(
        state, outbox=kept, residual=None, own=None, counted_at=0, encoded_at=0, lost=lost,
        references_from=references_from,
    )  # fmt: skip


def append(state: ClientRunState, entry: Entry) -> ClientRunState:
    """Add a new reply to the outbox; its sequence becomes the state's.

    Raises ValueError if the sequence was used before.
    """
    if entry.header.update_id.sequence <= state.sequence:
        raise ValueError(f"sequence {entry.header.update_id.sequence} was used before")
    return replace(state, sequence=entry.header.update_id.sequence, outbox=(*state.outbox, entry))


def remove_delivered(state: ClientRunState, header: ReplyHeader) -> ClientRunState:
    """Remove a reply for which no outcome will come, now that the aggregator has it."""
    kept = tuple(entry for entry in state.outbox if entry.expects_outcome or entry.header.update_id != header.update_id)
    return state if len(kept) == len(state.outbox) else replace(state, outbox=kept)


def remove_unreadable(state: ClientRunState, header: ReplyHeader) -> ClientRunState:
    """Remove a reply that this disk has lost. What its update left in the state is not known."""
    lost = next((entry for entry in state.outbox if entry.header.update_id == header.update_id), None)
    if lost is None:
        return state
    kept = tuple(entry for entry in state.outbox if entry is not lost)
    return replace(state, outbox=kept, lost="damaged" if lost.expects_outcome else state.lost)


def end_run(state: ClientRunState) -> ClientRunState:
    """Return the state of a run that has ended: the sequence stays, so that no id is used twice.

    So does the round that was encoded last, so that no aggregator gets a second masked update of it by an end.
    """
    return ClientRunState(sequence=state.sequence, identity=state.identity, encoded_at=state.encoded_at)


def begin_again(state: ClientRunState, seen: int, lost: str) -> ClientRunState:
    """Return the state of a run of which the aggregator has seen `seen` replies, more than this disk knows of.

    The round that was encoded last stays, as in `end_run`: what an aggregator says it has seen proves nothing.
    """
    return ClientRunState(
        seen, lost=lost, references_from=NOT_KNOWN, identity=state.identity, encoded_at=state.encoded_at
    )


def next_id(state: ClientRunState, run: str, device: str, seen: int) -> UpdateId:
    """Return the id of the next update, above what this device and the aggregator (`seen`) have used."""
    return UpdateId(run, device, max(state.sequence, seen) + 1)


@dataclass(frozen=True)
class OutcomeHandler:
    """The outcomes of one assignment, applied to a run's state.

    `layout` is the model's, `device` is this device's name and `folder` holds the replies' files.

    Invariant: a plan by which both ends continue from what was sent (`plan.has_client_state`) never loses count of it.
    If the disk has lost a part of it, the device reports `state-lost`.
    """

    assignment: Assignment
    plan: RunPlan
    layout: Layout
    device: str
    folder: RunFolder
    say: Callable[[str], None]

    def apply(self, state: ClientRunState) -> ClientRunState:
        """Return the state after the assignment's outcomes, without replies that are too old for one.

        A state of another model layout is discarded, except its sequence. If the plan has client state, no reply
        expires, because the device must know the outcome of each update. An assignment whose plan has masks does not
        change which round was masked last; one in the clear may set it back.
        """
        assignment, encoded_at = self.assignment, state.encoded_at
        if state.layout_digest not in ("", self.layout.digest):
            self.say(f"{assignment.run}: the model has changed; what was not yet sent of the old one is lost")
            state = ClientRunState(sequence=state.sequence, identity=state.identity)
        after = apply_outcomes(restart(state, assignment.references_from), self.outcomes, self._restore)
        if self.plan.secure.enabled and after.encoded_at != encoded_at:  # a device masks one vector a round
            after = replace(after, encoded_at=encoded_at)
        if assignment.kind != "train" or self.plan.has_client_state:
            return after
        return expire(after, assignment.round, self.plan.cohort.max_staleness + self.plan.local.delay)

    @property
    def outcomes(self) -> list[UpdateOutcome]:
        """Return the assignment's outcomes that concern this device."""
        return [outcome for outcome in self.assignment.outcomes if outcome.update_id.device == self.device]

    def require_client_state(self, state: ClientRunState) -> None:
        """Raise `state-lost` if the plan needs state of earlier rounds that this device no longer has.

        That state is the EF21 reference, or the control variate of SCAFFOLD or FedDyn.
        """
        vector = state.residual if self.plan.uplink.feedback == "ef21" else state.own
        if state.lost or (state.encoded_at and vector is None):
            what = "ef21" if self.plan.uplink.feedback == "ef21" else self.plan.run.algorithm
            raise CannotReply(
                "state-lost",
                f"what {what} has sent of this device is not on its disk any more: join under another name",
            )

    def _restore(self, entry: Entry, state: ClientRunState) -> ClientRunState:
        """Return the state as if a dropped update had not been sent.

        A masked update is never restored. Once it may have left, the other clients can unmask a sum that holds it,
        without an answer of this one, and the aggregator's word that it was dropped proves nothing. Restored, it could
        be summed again in another cohort, and the two sums subtracted (Pasquini et al. 2022).
        """
        if self.plan.secure.enabled:
            self.say(f"round {entry.round}: its update was dropped; a masked update is never sent again")
            return state
        feedback, algorithm = feedback_of(self.plan.uplink), algorithm_of(self.plan)
        travels = transmitted_layout(algorithm, self.layout)
        try:
            if feedback != "none":
                sign = -1.0 if feedback == "ef21" else 1.0
                residual = self._add_decoded(entry, travels, travels.model_segments, state.residual, sign)
                state = replace(state, residual=residual)
            if algorithm is not None:
                state = replace(
                    state, own=self._add_decoded(entry, travels, own_segments(algorithm, travels), state.own, -1.0)
                )
        except (OSError, BadPayload) as error:
            if self.plan.has_client_state:
                raise CannotReply("state-lost", f"adding a dropped update to the residual failed: {error}") from error
            self.say(f"round {entry.round}: its update was dropped, and is damaged on this disk: {error}")
            return state
        restored = " and added to the residual" if feedback != "none" else ""
        self.say(f"round {entry.round}: its update was dropped{restored}")
        return state

    def _add_decoded(
        self, entry: Entry, travels: Layout, segments: tuple[Segment, ...], to: Vector | None, sign: float
    ) -> Vector:
        """Return the vector `to` plus `sign` times the decoded update of a reply on this disk."""
        header, body = entry.header, self.folder.body(self.folder.path(entry))
        return payload.restore_update(body, header.parts, header.codec, travels, to, sign, segments)


Pending = Mapping[str, "Vector"]  # sequence of the reply -> its raw update


def delay_of(plan: Mapping[str, Any] | str | None) -> int:
    """Return the number of updates that the plan allows in flight during training; 0 without overlap or if not known.

    >>> delay_of({"local": {"lr": 0.1, "overlap": {"max_delay": 2}}}), delay_of({"local": {"lr": 0.1}})
    (2, 0)
    """
    value: Any = plan  # as received: nothing has checked it yet
    for name in ("local", "overlap", "max_delay"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else 0


def with_update(pending: Pending, header: ReplyHeader, raw_update: Vector) -> Pending:
    """Return `pending` and the raw update of this reply, copied because encoding overwrites it."""
    return {**pending, str(header.update_id.sequence): raw_update.copy()}


def without(pending: Pending, sequences: Iterable[int]) -> Pending:
    """Return `pending` without the updates of these replies."""
    removed = {str(sequence) for sequence in sequences}
    return {name: raw_update for name, raw_update in pending.items() if name not in removed}


def still_pending(pending: Pending, outcomes: Iterable[UpdateOutcome], version: int, most: int) -> Pending:
    """Return the updates that are pending if training starts from `version`: the newest ones, at most `most`.

    >>> from thinwire.core.types import UpdateId, UpdateOutcome
    >>> ids = [UpdateId("run", "pi", 1), UpdateId("run", "pi", 2)]
    >>> told = [UpdateOutcome(ids[0], "aggregated", 4), UpdateOutcome(ids[1], "aggregated", 5)]
    >>> list(still_pending({"1": None, "2": None}, told, version=4, most=2))
    ['2']
    """
    settled = (
        outcome.update_id.sequence
        for outcome in outcomes
        if outcome.outcome == "dropped" or (outcome.outcome == "aggregated" and outcome.version <= version)
    )
    in_flight = _in_order(without(pending, settled))
    return dict(list(in_flight.items())[-most:])


def starting_vector(base: Vector, pending: Pending) -> Vector:
    """Return the vector from which training starts: `base` itself if nothing is pending, else a new vector."""
    if not pending:
        return base
    vector: Vector = base.copy()
    for raw_update in _in_order(pending).values():
        vector += raw_update
    return vector


def _in_order(pending: Pending) -> dict[str, Vector]:
    """Sort by sequence, which is the order of training; a file may give another order."""
    return dict(sorted(pending.items(), key=lambda item: int(item[0])))


@dataclass
class PipelineState:
    """The state from which a run's next training starts while earlier replies are still being encoded.

    `state` is None if no reply is being encoded: then the committed state is used. `unfinished` holds the ids of
    assignments that began and are not finished. `failed` holds the sequences of updates that failed to encode. The
    finishing thread replaces that set, so the training thread can read it at the same time. `follows` holds the
    sequences of the trainings that `state` continues and that may not be committed yet.
    """

    state: ClientRunState | None = None
    unfinished: set[str] = field(default_factory=set)
    failed: frozenset[int] = frozenset()
    follows: frozenset[int] = frozenset()

    def without_failed(self, state: ClientRunState, committed: ClientRunState) -> ClientRunState:
        """Return the state from which the next training continues, without the updates that failed to encode.

        If `state` continues the training of such an update, the values that stay on the device are reset to those of
        the `committed` state.
        """
        if self.follows & self.failed:
            self.follows, state = frozenset(), with_own_values(state, committed)
        self.follows = frozenset(sequence for sequence in self.follows if sequence > committed.sequence)
        return replace(state, pending=without(state.pending, self.failed))

    @property
    def sequence(self) -> int:
        """Return the highest sequence that was given out, 0 if there is none."""
        return self.state.sequence if self.state is not None else 0


def with_own_values(state: ClientRunState, other: ClientRunState) -> ClientRunState:
    """Return the state with the other's values that stay on the device.

    These are personal layers, `context.state`, local buffers and counters.
    """
    return replace(
        state, personal=other.personal, context=other.context, buffers=other.buffers, counters=other.counters
    )
