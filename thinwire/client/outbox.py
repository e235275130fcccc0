"""Exactly once, on the device's side: pure steps from one state to the next (design, section 6).

An answer is in the outbox from its commit until a verdict on it comes; one that holds no change of a model (what was
measured, or a run's first model) until the other end has it, for nothing here depends on what becomes of it. Sent again
it is the same bytes under the same `update_id`, so the aggregator can tell. folded: forget it. dropped: what was sent
goes back into the residual, and into nothing else. unknown: keep it. Law: at any moment `residual + what may still be
folded + what was folded` is the sum of all changes that were given, up to rounding; a verdict that is told twice
changes nothing the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinwire.aggregation.control_variates import algorithm_of, carried, followed
from thinwire.client import payload
from thinwire.client.errors import CannotAnswer
from thinwire.client.run_state import NOT_KNOWN, Entry, RunFolder, RunState
from thinwire.core.errors import BadPayload
from thinwire.core.types import ReplyHead, UpdateId, Verdict

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Ask, Vector


Refund = Callable[[Entry, RunState], RunState]  # (dropped answer, state) -> the state with it taken back


def find(state: RunState, ask_id: str) -> Entry | None:
    """The answer that was made to this ask already."""
    return next((entry for entry in state.outbox if entry.head.ask_id == ask_id), None)


def settle(state: RunState, verdicts: Iterable[Verdict], refund: Refund) -> RunState:
    """Carry out what became of earlier answers; ids that are not in the outbox were settled before."""
    said = {verdict.update_id: verdict for verdict in verdicts}
    kept = []
    for entry in state.outbox:
        told = said.get(entry.head.update_id)
        if told is None or told.outcome == "unknown":
            kept.append(entry)
        elif told.outcome == "dropped" and entry.settles:
            state = refund(entry, state)
        elif told.outcome == "folded" and not state.counted_at:
            state = replace(state, counted_at=told.version)
    return state if len(kept) == len(state.outbox) else replace(state, outbox=tuple(kept))


def expire(state: RunState, round_number: int, max_staleness: int) -> RunState:
    """Discard answers on which no verdict came for so long that none will; not refunded: one may have been folded."""
    kept = tuple(entry for entry in state.outbox if round_number - entry.round <= max_staleness)
    return state if len(kept) == len(state.outbox) else replace(state, outbox=kept)


def begun_anew(state: RunState, references_from: int) -> RunState:
    """The aggregator's sum of what devices sent is 0 again: so is this device's, answers to earlier asks count no more,
    and what was lost of an earlier sum is missed no more.

    What was lost of no sum that is known may be missing in this one, which is the first that is heard of since.
    """
    if references_from <= state.references_from:
        return state
    kept = tuple(entry for entry in state.outbox if entry.round >= references_from)
    lost = state.lost if state.references_from == NOT_KNOWN else ""
    return replace(
        state, outbox=kept, residual=None, own=None, counted_at=0, encoded_at=0, lost=lost,
        references_from=references_from,
    )  # fmt: skip


def append(state: RunState, entry: Entry) -> RunState:
    """Put a new answer in; its sequence is the state's from now on."""
    if entry.head.update_id.sequence <= state.sequence:
        raise ValueError(f"sequence {entry.head.update_id.sequence} was used before")
    return replace(state, sequence=entry.head.update_id.sequence, outbox=(*state.outbox, entry))


def delivered(state: RunState, head: ReplyHead) -> RunState:
    """An answer that no verdict will come on is done with when the other end has it."""
    kept = tuple(entry for entry in state.outbox if entry.settles or entry.head.update_id != head.update_id)
    return state if len(kept) == len(state.outbox) else replace(state, outbox=kept)


def over(state: RunState) -> RunState:
    """The run has ended: only the sequence is kept, so that no id is ever used twice."""
    return RunState(sequence=state.sequence, identity=state.identity)


def next_id(state: RunState, run: str, device: str, seen: int) -> UpdateId:
    """The next update's id: above what this device knows and above what the aggregator has `seen`."""
    return UpdateId(run, device, max(state.sequence, seen) + 1)


# What the verdicts that come with an ask make of a run's state: what was dropped is taken back, from where it went.


@dataclass(frozen=True)
class Settling:
    """Applies the verdicts of one ask to a run's state. `layout` is the model's, `device` this one's name.

    Law: a plan by which both ends go on from what was sent (`plan.remembered`) never loses count of it: where the disk
    has lost some of it the device says `state-lost`.
    """

    ask: Ask
    plan: RunPlan
    layout: Layout
    device: str
    folder: RunFolder
    say: Callable[[str], None]

    def settled(self, state: RunState) -> RunState:
        """The state after the ask's verdicts, and without what is too old for one."""
        ask = self.ask
        if state.layout_digest not in ("", self.layout.digest):
            self.say(f"{ask.run}: the model has changed; what was not yet sent of the old one is lost")
            state = RunState(sequence=state.sequence, identity=state.identity)
        settled = settle(begun_anew(state, ask.references_from), self.verdicts, self._back)
        if ask.kind != "train" or self.plan.remembered:  # it has to know what became of each of its updates
            return settled
        return expire(settled, ask.round, self.plan.cohort.max_staleness + self.plan.local.delay)

    @property
    def verdicts(self) -> list[Verdict]:
        """Those of the ask that are on this device's answers."""
        return [verdict for verdict in self.ask.verdicts if verdict.update_id.device == self.device]

    def require_memory(self, state: RunState) -> None:
        """Where the aggregator's sum holds what this device sent before, it goes on from there, or not at all."""
        held = state.residual if self.plan.uplink.feedback == "ef21" else state.own
        if state.lost or (state.encoded_at and held is None):
            what = "ef21" if self.plan.uplink.feedback == "ef21" else self.plan.run.algorithm
            raise CannotAnswer(
                "state-lost",
                f"what {what} has sent of this device is not on its disk any more: join under another name",
            )

    def _back(self, entry: Entry, state: RunState) -> RunState:
        """The state as if a dropped update had not been sent."""
        feedback, algorithm = self.plan.uplink.feedback, algorithm_of(self.plan)
        travels = carried(algorithm, self.layout)
        try:
            if feedback != "none":
                sign = -1.0 if feedback == "ef21" else 1.0
                residual = self._added(entry, travels, travels.model_segments, state.residual, sign)
                state = replace(state, residual=residual)
            if algorithm is not None:
                state = replace(state, own=self._added(entry, travels, followed(algorithm, travels), state.own, -1.0))
        except (OSError, BadPayload) as error:
            if self.plan.remembered:
                raise CannotAnswer(
                    "state-lost", f"an update that was not used cannot be taken back: {error}"
                ) from error
            self.say(f"round {entry.round}: its update was not used, and is damaged on this disk: {error}")
            return state
        goes_on = ", it goes into the next one" if feedback != "none" else ""
        self.say(f"round {entry.round}: its update was not used{goes_on}")
        return state

    def _added(
        self, entry: Entry, travels: Layout, segments: tuple[Segment, ...], to: Vector | None, sign: float
    ) -> Vector:
        head = entry.head
        return payload.refund(self.folder.path(entry), head.parts, head.codec, travels, to, sign, segments)


# Delayed averaging: a device trains on while its updates travel (Zhu, Lin et al. 2021).
#
# The model is w = x^_V + sum(pending).
#
# `x^_V` is the version that an ask names; pending are the device's own changes that no version up to V holds, as they
# were trained, not as they were sent: what a codec left out is in the residual and comes later, and the device has it
# already. Law: w is computed anew for each ask from what is exact on both ends. Nothing is ever taken off a model that
# was trained on, and no difference to a decoded change is added up, so that nothing drifts.
#
# A change is pending until an ask brings the verdict on it: folded into a version up to the ask's own, or dropped,
# and then it goes back into the residual (client/outbox.py). At most `max_delay` of them are, since the aggregator
# sends no more asks ahead; of more, which a lost verdict can leave, or an answer that came when all rounds were
# closed, the oldest are not counted on any longer.


Pending = Mapping[str, "Vector"]  # sequence of the answer -> its change


def delay_of(plan: Mapping[str, Any] | str | None) -> int:
    """How many changes the plan lets be under way while training goes on; 0: none, or not known.

    >>> delay_of({"local": {"lr": 0.1, "overlap": {"max_delay": 2}}}), delay_of({"local": {"lr": 0.1}})
    (2, 0)
    """
    found: Any = plan  # as it came: nothing has checked it yet
    for name in ("local", "overlap", "max_delay"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else 0


def with_one(pending: Pending, head: ReplyHead, change: Vector) -> Pending:
    """With the change of this answer beside the others; it is copied, since it is about to be encoded."""
    return {**pending, str(head.update_id.sequence): change.copy()}


def without(pending: Pending, sequences: Iterable[int]) -> Pending:
    """Without these answers' changes."""
    gone = {str(sequence) for sequence in sequences}
    return {name: change for name, change in pending.items() if name not in gone}


def still_pending(pending: Pending, verdicts: Iterable[Verdict], version: int, most: int) -> Pending:
    """What is still under way where training starts from `version`, at most `most` changes: the newest.

    >>> from thinwire.core.types import UpdateId, Verdict
    >>> told = [Verdict(UpdateId("run", "pi", 1), "folded", 4), Verdict(UpdateId("run", "pi", 2), "folded", 5)]
    >>> list(still_pending({"1": None, "2": None}, told, version=4, most=2))
    ['2']
    """
    over = (
        verdict.update_id.sequence
        for verdict in verdicts
        if verdict.outcome == "dropped" or (verdict.outcome == "folded" and verdict.version <= version)
    )
    left = _in_order(without(pending, over))
    return dict(list(left.items())[-most:])


def start(base: Vector, pending: Pending) -> Vector:
    """Where training starts: `base` itself where nothing is pending, else a new vector."""
    if not pending:
        return base
    found: Vector = base.copy()
    for change in _in_order(pending).values():
        found += change
    return found


def _in_order(pending: Pending) -> dict[str, Vector]:
    """By sequence, which is the order of training, whatever order a file gave them in."""
    return dict(sorted(pending.items(), key=lambda item: int(item[0])))
