"""The phases of a round with secure aggregation: how long each lasted, what it waited for, and who dropped out in it.

They follow from the journalled phases. The threat model is in docs/explain/secure-aggregation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from thinwire.core.events import NO_STEP
from thinwire.core.formatting import duration
from thinwire.core.types import PHASES
from thinwire.store.read_models import PhaseRow, RoundRow, UpdateRow

WAITS_FOR: Final[Mapping[str, str]] = {
    "advertise": "keys", "share": "shares", "masked": "masked vectors", "agree": "signatures of the survivors",
    "unmask": "shares that remove the masks",
}  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """Holds a phase of a round. `seconds` is None while the phase is open.

    `is_closed` is False for the phase that is open, or in which the round ended without a sum. `received` is the number
    of clients whose message counts, and `received_bytes` are the bytes of these messages; both are None for a phase
    that was not closed. `last` is the client whose message came last. `dropped` maps each client that dropped out in
    this phase to the reason, "" if no reason is recorded.
    """

    phase: str
    begin_s: float
    seconds: float | None
    is_closed: bool
    received: int | None = None
    received_bytes: int | None = None
    last: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def waits_for(self) -> str:
        """Return what the clients send in this phase."""
        return WAITS_FOR[self.phase]


def phases_of(found: RoundRow, closed: Sequence[PhaseRow], assignments: Sequence[UpdateRow]) -> list[Phase]:
    """Return the phases of a secure round in order: those that were closed, then the open one or that of its end.

    `closed` and `assignments` are the round's own rows.
    """
    reasons = {one.device: one.reason for one in assignments if one.outcome in ("failed", "dropped")}
    shown = [
        Phase(
            row.phase, row.elapsed_s - row.seconds, row.seconds, True, len(row.received), row.received_bytes,
            next(reversed(row.received), ""), {device: reasons.get(device, "") for device in row.dropped},
        )
        for row in closed
    ]  # fmt: skip
    if len(closed) < len(PHASES) and (not found.reason or found.reason in NO_STEP):
        before = {device for row in closed for device in row.dropped}
        begin_s = closed[-1].elapsed_s if closed else 0.0
        seconds = None if found.seconds is None else max(0.0, found.seconds - found.missed_s - begin_s)
        lost = {device: reason for device, reason in reasons.items() if device not in before}
        if found.reason:  # the updates that its reason drops did not drop out
            lost = {device: reason for device, reason in lost.items() if reason != found.reason}
        shown.append(Phase(PHASES[len(closed)], begin_s, seconds, False, dropped=lost))
    return shown


def longest(phases: Sequence[Phase]) -> Phase | None:
    """Return the phase that lasted longest; None if no length is known."""
    return max((one for one in phases if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def waited_for(found: RoundRow, one: Phase) -> tuple[str, ...]:
    """Return the clients for whose message the phase waited until its deadline; none if enough vectors came before."""
    if one.phase == "masked" and found.reason == "enough":
        return ()
    return tuple(device for device, reason in one.dropped.items() if reason.startswith("stale"))


def waited_text(found: RoundRow, one: Phase) -> str:
    """Return what a phase waited for as a clause, with the clients that dropped out in it, or the last one to send."""
    silent = waited_for(found, one)
    said = f"the phase {one.phase} lasted {duration(one.seconds)}, waiting for {one.waits_for}"
    if silent:
        said += f" of {_names(silent)} until its deadline"
    elif one.last:
        said += f"; the last came from {one.last}"
    late = [device for device, reason in one.dropped.items() if reason.startswith("stale") and device not in silent]
    if late:
        said += f"; {_names(late)} {'were' if late[1:] else 'was'} not waited for"
    if others := [device for device in one.dropped if device not in (*silent, *late)]:
        kind = one.dropped[others[0]].partition(":")[0]
        said += f"; {_names(others)} dropped out" + (f" ({kind})" if kind and not others[1:] else "")
    return said


def open_text(found: RoundRow, phases: Sequence[Phase]) -> str:
    """Return the state of an open secure round as a sentence."""
    lost = sum(len(one.dropped) for one in phases)
    left = f"{len(found.selected) - lost} of {len(found.selected)} clients are in it"
    at = phases[-1]
    waits = f"the phase {at.phase} waits for {at.waits_for}" if not at.is_closed else "the sum is being made"
    return f"Round {found.round} is open: {waits}; {left}."


def _names(devices: Sequence[str]) -> str:
    """Return the first device, and the number of the others."""
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"
