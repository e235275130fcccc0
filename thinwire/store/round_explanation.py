"""This module explains why a round took as long as it did, by the stages of the device that it waited for.

The explanation follows from the rows of the round and its assignments. The projection stores it when the round closes
(store/explaining.py). It stores the explanation again when the round had waited for a reply, and that reply comes late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.formatting import counted, duration, size, speed
from thinwire.core.types import is_follow_up
from thinwire.store import round_timing
from thinwire.store.read_models import PhaseRow, RoundRow, UpdateRow
from thinwire.store.round_timing import (
    AGGREGATOR_STAGES,
    ASSIGNMENT_STAGES,
    UNACCOUNTED,
    Phase,
    assignment_stages,
    clock_was_set,
    downtime_of,
    first_name_and_count,
    round_stages,
    settled_at,
)


@dataclass(frozen=True)
class RoundExplanation:
    """Holds a round explanation: seconds by stage (`STAGES`) and a sentence.

    `device` is the device whose reply the stages follow, "" if no reply came. `waited_for` are the devices that kept
    the round open after that reply: they failed or were dropped during the stage `waiting`, or had not replied at its
    end. All stages, with `UNACCOUNTED`, make up `seconds`.

    `requests` counts the requests of that device's exchange, 0 in a simulation; `rtt_s` is one round trip, None if it
    was not measured. `uncounted` is the aggregator's time in a simulation, whose clock stops meanwhile.
    """

    round: int
    seconds: float
    sentence: str
    device: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    waited_for: tuple[str, ...] = ()
    requests: int = 0
    rtt_s: float | None = None
    uncounted: Mapping[str, float] = field(default_factory=dict)

    @property
    def trips_s(self) -> float | None:
        """Return the seconds of all round trips; they are no stage, but a part of others and of the rest."""
        return None if self.rtt_s is None else self.requests * self.rtt_s

    def to_json(self) -> dict[str, Any]:
        """Return what is stored in the round's row, which has its number and seconds already."""
        return {
            "sentence": self.sentence, "device": self.device, "stages": dict(self.stages),
            "waited_for": list(self.waited_for), "requests": self.requests, "rtt_s": self.rtt_s,
            "uncounted": dict(self.uncounted),
        }  # fmt: skip


def stored(number: int, seconds: float | None, found: Mapping[str, Any]) -> RoundExplanation:
    """Return the explanation of a round from what `RoundExplanation.to_json` gave."""
    return RoundExplanation(number, seconds or 0.0, **{**found, "waited_for": tuple(found["waited_for"])})


def explain_round(
    found: RoundRow, assignments: Sequence[UpdateRow] = (), earlier: Sequence[UpdateRow] = (),
    turn_at: float | None = None, *, simulated: bool = False, rtts: Mapping[str, float] | None = None,
    phases: Sequence[PhaseRow] | None = None,
) -> RoundExplanation:  # fmt: skip
    """Return the explanation of a closed round, which knows less without the rows of assignments.

    `assignments` are the round's own rows. `earlier` are rows of earlier rounds whose updates were aggregated into this
    one. `turn_at` is the time at which the round began to accept replies (`turns`), None if it did so when it opened.
    `rtts` maps devices to seconds. `phases` are the closed phases of a round with secure aggregation, None for other
    rounds.
    """
    took = found.seconds or 0.0
    if phases is not None:
        return _secure(found, round_timing.phases_of(found, phases, assignments), simulated=simulated)
    if clock_was_set(found):
        return _unknown(found)
    slowest = _slowest(found, assignments, earlier)
    own = {name: found.spent[f"{name}_s"] for name in AGGREGATOR_STAGES if f"{name}_s" in found.spent}
    own, uncounted = ({}, own) if simulated else (own, {})
    begin = found.opened_at if turn_at is None else turn_at
    last_at = begin if slowest is None or slowest.arrived_at is None else max(begin, slowest.arrived_at)
    held = _kept_open_by(found, assignments, last_at)
    said = round_stages(found, begin, slowest, own, waits=bool(held))
    mine = _stages_of_slowest(found, slowest, begin, said)
    device, requests = (slowest.device, slowest.requests) if slowest else (found.slowest, 0)
    rtt_s = (rtts or {}).get(device) if requests else None
    if found.reason == "buffer":
        reason = _buffer_text(found, mine, slowest, earlier, rtt_s)
    elif found.reason == "deadline":
        reason = _deadline_text(found, assignments, [one.device for one in held])
    else:
        reason = _waiting_text(found, said, mine, slowest, held, rtt_s)
        reason += aggregator_text(took, {name: said[name] for name in AGGREGATOR_STAGES if name in said}, uncounted)
    told = f"Round {found.round} took {duration(took)}: {_with_downtime(found, said, reason)}."
    told += _weight_text(found, (*assignments, *earlier))
    waited_for = tuple(one.device for one in held)
    return RoundExplanation(found.round, took, told, device, said, waited_for, requests, rtt_s, uncounted)


def _stages_of_slowest(
    found: RoundRow, slowest: UpdateRow | None, begin: float, stages: Mapping[str, float]
) -> dict[str, float]:
    """Return the stages of the slowest device in the round, with the time between them that is unaccounted."""
    if slowest is None or slowest.arrived_at is None:
        return {name: stages[name] for name in ASSIGNMENT_STAGES if name in stages}
    known = assignment_stages(slowest, found.downtimes, begin)
    return {name: known[name] for name in (*ASSIGNMENT_STAGES, UNACCOUNTED) if name in known}


def _secure(found: RoundRow, phases: Sequence[Phase], *, simulated: bool) -> RoundExplanation:
    """Return the explanation of a secure round by its phases, which the run's clock measured, and its longest one.

    A round that was longer without an aggregator than in any phase is explained by its downtime alone.
    """
    took = found.seconds or 0.0
    own = {name: found.spent[f"{name}_s"] for name in ("step", "store") if f"{name}_s" in found.spent}
    own = {"masks": found.secure_sum.get("unmask_s", 0.0), **own}
    own, uncounted = ({}, own) if simulated else (own, {})
    stages = {one.phase: one.seconds for one in phases if one.seconds}
    stages |= {name: seconds for name, seconds in {"downtime": found.missed_s, **own}.items() if seconds}
    if (left := took - sum(stages.values())) > 0.0:
        stages[UNACCOUNTED] = left
    most = round_timing.longest_phase(phases)
    if downtime_text(found) and (most is None or (most.seconds or 0.0) < max(found.missed_s, downtime_of(found))):
        most, reason = None, downtime_text(found)
    else:
        reason = "no phase of it was closed" if most is None else round_timing.waited_text(most)
        reason = _with_downtime(found, stages, reason)
    silent = round_timing.waited_for(most) if most else ()
    device = most.last if most and not silent else ""
    said = f"Round {found.round} took {duration(took)}: {reason}{aggregator_text(took, own, uncounted)}."
    return RoundExplanation(found.round, took, said, device, stages, silent, uncounted=uncounted)


def _unknown(found: RoundRow) -> RoundExplanation:
    """Return the explanation of a round in which the wall clock was set: no stage between two moments is known."""
    took = found.seconds or 0.0
    told = f"Round {found.round} took {duration(took)}; {downtime_text(found, ' meanwhile')}."
    return RoundExplanation(found.round, took, told)


def _weight_text(found: RoundRow, assignments: Sequence[UpdateRow]) -> str:
    """Return a sentence about the first client whose update counts for less or was chosen, and the number of others.

    Return "" if there is no such client.
    """
    capped = [one for one in assignments if one.update_id in found.aggregated and one.weight_reason]
    if not capped:
        return ""
    more = f"; {counted(len(capped) - 1, 'more client')} too" if capped[1:] else ""
    return f" {capped[0].device}: {capped[0].weight_reason}{more}."


def _with_downtime(found: RoundRow, stages: Mapping[str, float], reason: str) -> str:
    """Return the reason with a clause about the aggregator's downtime, which comes first if no stage took longer."""
    if not downtime_text(found):
        return reason
    first = downtime_of(found) > 0.0 and stages.get("downtime", 0.0) >= max(stages.values(), default=0.0)
    return f"{downtime_text(found)}; {reason}" if first else f"{reason}; {downtime_text(found, ' meanwhile')}"


def _slowest(found: RoundRow, assignments: Sequence[UpdateRow], earlier: Sequence[UpdateRow]) -> UpdateRow | None:
    """Return the assignment that the round waited for last; one that filled a buffer may be older than the round."""
    own = next(
        (one for one in assignments if one.device == found.slowest and not is_follow_up(one.assignment_id)), None
    )
    if own is not None and found.reason != "buffer":
        return own
    came = [one for one in (*assignments, *earlier) if one.update_id in found.aggregated and one.arrived_at is not None]
    return max(came, key=lambda one: one.arrived_at or 0.0, default=own)


def _kept_open_by(found: RoundRow, assignments: Sequence[UpdateRow], since: float) -> list[UpdateRow]:
    """Return the assignments that kept the round open after `since`, the last reply that counted; the longest first.

    A round that ended by its deadline was kept open only by devices that had not replied then. A full buffer waits for
    no device, and no round waits for a follow-up, which belongs to the next buffer.
    """
    if found.reason == "buffer":
        return []
    over = [(one, settled_at(one, found)) for one in assignments if not is_follow_up(one.assignment_id)]
    out = [one for one, at in over if at is None]
    if found.reason == "deadline":
        return out
    after = [(at, one) for one, at in over if at is not None and at > since]
    return out + [one for _, one in sorted(after, key=lambda pair: -pair[0])]


def _waiting_text(
    found: RoundRow, stages: Mapping[str, float], device: Mapping[str, float], slowest: UpdateRow | None,
    held: Sequence[UpdateRow], rtt_s: float | None,
) -> str:  # fmt: skip
    """Return a clause about the device that the round waited for longest, with its longest stage or its outcome."""
    name, waiting = slowest.device if slowest else found.slowest, stages.get("waiting", 0.0)
    if held and waiting > sum(device.values()):
        last, others = held[0], len(held) - 1
        lost = last.failed_at is not None and (found.closed_at is None or last.failed_at <= found.closed_at)
        return f"waited {duration(waiting)} for {last.device}, {outcome_text(last, lost)}" + (
            f", and {others} more" if others else ""
        )
    if not name or not device:
        return "no update came to wait for" if not found.aggregated else "nothing of it is known"
    return (
        f"waited {duration(sum(device.values()))} for {name}, which {longest_stage_text(device, slowest, rtt_s)}"
        f"{_selection_text(stages, slowest)}{_redelivery_note(device)}"
    )


def _redelivery_note(device: Mapping[str, float]) -> str:
    """Return the second delivery of an assignment in parentheses, if another stage was the longest; else ""."""
    took_s = device.get("redelivery", 0.0)
    return f" (it {redelivery_text(took_s)})" if 0.0 < took_s < max(device.values()) else ""


def _selection_text(stages: Mapping[str, float], slowest: UpdateRow | None) -> str:
    """Return the time at which a replacement was selected, and the device that it replaced; "" for other devices."""
    if slowest is None or not slowest.selection_reason:
        return ""
    place = f" instead of {slowest.instead_of}" if slowest.instead_of else ""
    return f" (selected after {duration(stages.get('selection', 0.0))}{place})"


def _buffer_text(
    found: RoundRow, device: Mapping[str, float], last: UpdateRow | None, earlier: Sequence[UpdateRow],
    rtt_s: float | None,
) -> str:  # fmt: skip
    """Return a clause about the updates that filled the buffer, and about the longest stage of the last one."""
    said = f"its buffer was full with {counted(len(found.aggregated), 'update')}"
    if old := [one for one in earlier if one.update_id in found.aggregated]:
        said += f", {'all' if len(old) == len(found.aggregated) else f'{len(old)} of them'} assigned before it opened"
        behind = max(old, key=lambda one: one.staleness)
        if behind.staleness:
            said += f" ({behind.device}'s {counted(behind.staleness, 'version')} behind)"
    if last is None or not device:
        return said
    stage = longest_stage_text(device, last, rtt_s)
    return f"{said}; the last came from {last.device}, which then {stage}{_redelivery_note(device)}"


def _deadline_text(found: RoundRow, assignments: Sequence[UpdateRow], waited_for: Sequence[str]) -> str:
    """Return a clause about the devices that missed the deadline, with the stages of the first late reply."""
    if found.hides_sample:
        return f"it ended at its deadline of {duration(found.deadline_s)}, whoever was sampled"
    silent = f"{found.unanswered} of {len(found.selected)} had not replied"
    said = f"{silent} when its deadline of {duration(found.deadline_s)} passed"
    late = [one for one in assignments if one.device in waited_for and one.arrived_at is not None]
    if late:
        first = min(late, key=lambda one: one.arrived_at or 0.0)
        stages = {name: took for name, took in assignment_stages(first, found.downtimes).items() if name != "downtime"}
        return f"{said}; {first.device} took {duration(sum(stages.values()))} and {longest_stage_text(stages, first)}"
    here = {one.device: one for one in assignments if one.device in waited_for}
    if not here:
        return said
    pulled = [name for name, one in here.items() if one.pulled_at]
    if pulled:
        return f"{said}; {first_name_and_count(pulled)} got the assignment and {missing_reply_text(here[pulled[0]])}"
    return f"{said}; {first_name_and_count(list(here))} got no assignment that is known of"


MIN_DOWNTIME_S = 1.0  # shortest downtime that an explanation mentions
AGGREGATOR_SHARE = 0.2  # of a round's time, from which on an explanation mentions the aggregator's stages


def outcome_text(assignment: UpdateRow, lost: bool) -> str:
    """Return the outcome of an assignment whose update did not count, as a relative clause about its device.

    `lost` is True if the assignment failed while the round was open.
    """
    kind = assignment.reason.partition(":")[0]
    if lost:
        return (
            "which was lost" if kind in ("offline", "") or assignment.outcome != "failed" else f"which failed ({kind})"
        )
    if assignment.outcome == "dropped":
        return f"whose reply was dropped ({kind})" if kind else "whose reply was dropped"
    return "which had not replied"


def missing_reply_text(assignment: UpdateRow) -> str:
    """Return what is known of a reply that had not come at the deadline: that it still may, or never came."""
    over = "did not reply before the run's end" if assignment.outcome == "over" else "did not reply"
    return "has not replied yet" if assignment.outcome == "selected" else over


def aggregator_text(took: float, stages: Mapping[str, float], uncounted: Mapping[str, float]) -> str:
    """Return a clause about the aggregator's stages if they took a large share of the round; "" otherwise.

    `uncounted` are stages that the clock of a simulation does not count.
    """
    mine = uncounted or stages
    if not mine or sum(mine.values()) < AGGREGATOR_SHARE * took:
        return ""
    most = max(mine, key=lambda stage: mine[stage])
    said = f"; the aggregator took {duration(sum(mine.values()))} ({most} {duration(mine[most])})"
    return said + (", which a simulation's clock does not count" if uncounted else "")


def downtime_text(found: RoundRow, meanwhile: str = "") -> str:
    """Return a clause about the aggregator's downtime, with `meanwhile` at its end; "" if the downtime was short."""
    if clock_was_set(found):
        return f"the aggregator was offline{meanwhile} for an unknown time: the clock was set"
    took = downtime_of(found)
    return f"the aggregator was offline for {duration(took)}{meanwhile}" if took >= MIN_DOWNTIME_S else ""


def longest_stage_text(stages: Mapping[str, float], assignment: UpdateRow | None, rtt_s: float | None = None) -> str:
    """Return a clause about the longest stage, whose subject is the device."""
    name = max(stages, key=lambda stage: stages[stage])
    took = duration(stages[name])
    if name == "upload" and assignment and assignment.payload_up and stages[name] > 0:
        sent = assignment.payload_up if assignment.wire_up is None else assignment.wire_up
        return f"uploaded {size(sent)} at {speed(8 * sent / stages[name])} in {took}"
    if name == "download" and assignment and assignment.payload_down and stages[name] > 0:
        return (
            f"downloaded {size(assignment.payload_down)} at "
            f"{speed(8 * assignment.payload_down / stages[name])} in {took}"
        )
    if name == "train" and assignment and assignment.steps:
        return f"trained {counted(assignment.steps, 'step')} in {took}"
    if name == UNACCOUNTED and assignment and assignment.requests:
        of_it = ""
        if rtt_s and assignment.requests * rtt_s < stages[name] / 2:
            of_it = ": it was offline or busy"
        return f"spent {took} in no measured stage ({requests_text(assignment.requests, rtt_s)}){of_it}"
    return {
        "delivery": f"got the assignment after {took}", "redelivery": redelivery_text(stages[name]),
        "queue": f"did other work first for {took}",
        "evaluate": f"evaluated the model for {took}", "encode": f"encoded for {took}",
        "load": f"loaded the model for {took}", "commit": f"wrote its update to its disk for {took}",
        UNACCOUNTED: f"spent {took} in no measured stage", "upload": f"uploaded for {took}",
        "download": f"downloaded for {took}", "train": f"trained for {took}", "work": f"worked for {took}",
    }[name]  # fmt: skip


def redelivery_text(took_s: float) -> str:
    """Return a clause about the second delivery of an assignment, after the device lost its process or connection."""
    return f"got the assignment again after {duration(took_s)}: what it had begun was lost"


def requests_text(requests: int, rtt_s: float | None) -> str:
    """Return the requests times the round trip, and the product if it is known; "" without a request.

    >>> requests_text(2, 0.048), requests_text(1, None), requests_text(0, 0.048)
    ('2 requests x 48 ms = 96 ms', '1 request', '')
    """
    if not requests:
        return ""
    return counted(requests, "request") + (f" x {duration(rtt_s)} = {duration(requests * rtt_s)}" if rtt_s else "")
