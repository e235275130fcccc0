"""Exactly once, on the device's side: pure steps from one state to the next (design, section 6).

An answer is in the outbox from its commit until a verdict on it comes; one that holds no change of a model (what was
measured, or a run's first model) until the other end has it, for nothing here depends on what becomes of it. Sent again
it is the same bytes under the same `update_id`, so the aggregator can tell. folded: forget it. dropped: what was sent
goes back into the residual, and into nothing else. unknown: keep it. Law: at any moment `residual + what may still be
folded + what was folded` is the sum of all changes that were given, up to rounding; a verdict that is told twice
changes nothing the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from thinwire.client.disk.state import NOT_KNOWN, Entry, RunState
from thinwire.core.types import ReplyHead, UpdateId, Verdict

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
