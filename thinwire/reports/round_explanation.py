"""This module explains why a round took as long as it did, by the stages of the device that it waited for.

The explanation is computed from the rows of the round and its assignments, so a late reply completes it. `whys`
explains all rounds of a run, `in_all` the run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.formatting import counted, duration
from thinwire.core.types import is_follow_up
from thinwire.reports import secure_rounds
from thinwire.reports.reason_text import again, did
from thinwire.reports.round_timing import (
    ALONG,
    OWN,
    STAGES,
    UNACCOUNTED,
    along,
    clock_was_set,
    down_s,
    of_round,
    over_at,
)
from thinwire.reports.secure_rounds import Phase
from thinwire.store.read_models import PhaseRow, RoundRow, RunRow, UpdateRow


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


def why(
    found: RoundRow, assignments: Sequence[UpdateRow] = (), earlier: Sequence[UpdateRow] = (),
    turn_at: float | None = None, *, simulated: bool = False, rtts: Mapping[str, float] | None = None,
    phases: Sequence[PhaseRow] | None = None,
) -> RoundExplanation:  # fmt: skip
    """Return the explanation of a closed round.

    `assignments` are the round's own rows. `earlier` are rows of earlier rounds whose updates were aggregated into this
    one. Without them the explanation has fewer facts. `turn_at` is when the round
    began to accept replies (`turns`), None if it did so when it opened. `rtts` are seconds by device. `phases` are the
    closed phases of a round with secure aggregation, None for other rounds.
    """
    took = found.seconds or 0.0
    if phases is not None:
        return _secure(found, secure_rounds.phases_of(found, phases, assignments), simulated=simulated)
    if clock_was_set(found):
        return _unknown(found)
    slowest = _slowest(found, assignments, earlier)
    own = {name: found.spent[f"{name}_s"] for name in OWN if f"{name}_s" in found.spent}
    own, uncounted = ({}, own) if simulated else (own, {})
    begin = found.opened_at if turn_at is None else turn_at
    last_at = begin if slowest is None or slowest.arrived_at is None else max(begin, slowest.arrived_at)
    held = _held_up_by(found, assignments, last_at)
    said = of_round(found, begin, slowest, own, waits=bool(held))
    mine = _of_device(found, slowest, begin, said)
    device, requests = (slowest.device, slowest.requests) if slowest else (found.slowest, 0)
    rtt_s = (rtts or {}).get(device) if requests else None
    if found.reason == "buffer":
        reason = _filled(found, mine, slowest, earlier, rtt_s)
    elif found.reason == "deadline":
        reason = _missed(found, assignments, [one.device for one in held])
    else:
        reason = _waited(found, said, mine, slowest, held, rtt_s)
        reason += own_part(took, {name: said[name] for name in OWN if name in said}, uncounted)
    told = f"Round {found.round} took {duration(took)}: {_blamed(found, said, reason)}."
    told += _capped(found, (*assignments, *earlier))
    waited_for = tuple(one.device for one in held)
    return RoundExplanation(found.round, took, told, device, said, waited_for, requests, rtt_s, uncounted)


def _of_device(
    found: RoundRow, slowest: UpdateRow | None, begin: float, stages: Mapping[str, float]
) -> dict[str, float]:
    """Return the stages of the slowest device in the round, with the time between them that is unaccounted."""
    known = stages if slowest is None or slowest.arrived_at is None else along(slowest, found.downtimes, begin)
    own = ALONG if known is stages else (*ALONG, UNACCOUNTED)
    return {name: known[name] for name in own if name in known}


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
    most = secure_rounds.longest(phases)
    if downtime_text(found) and (most is None or (most.seconds or 0.0) < max(found.missed_s, down_s(found))):
        most, reason = None, downtime_text(found)
    else:
        reason = "no phase of it was closed" if most is None else secure_rounds.waited_text(found, most)
        reason = _blamed(found, stages, reason)
    silent = secure_rounds.waited_for(found, most) if most else ()
    device = most.last if most and not silent else ""
    said = f"Round {found.round} took {duration(took)}: {reason}{own_part(took, own, uncounted)}."
    return RoundExplanation(found.round, took, said, device, stages, silent, uncounted=uncounted)


def _unknown(found: RoundRow) -> RoundExplanation:
    """Return the explanation of a round in which the wall clock was set: no stage between two moments is known."""
    took = found.seconds or 0.0
    told = f"Round {found.round} took {duration(took)}; {downtime_text(found, ' meanwhile')}."
    return RoundExplanation(found.round, took, told)


def _capped(found: RoundRow, assignments: Sequence[UpdateRow]) -> str:
    """Return a sentence about the first client with a reduced weight, and the number of the others, or ""."""
    capped = [one for one in assignments if one.update_id in found.aggregated and one.weight_reason]
    if not capped:
        return ""
    more = f"; {counted(len(capped) - 1, 'more client')} too" if capped[1:] else ""
    return f" {capped[0].device}: {capped[0].weight_reason}{more}."


def _blamed(found: RoundRow, stages: Mapping[str, float], reason: str) -> str:
    """Return the reason with the aggregator's downtime in the round, which comes first if no stage took longer."""
    if not downtime_text(found):
        return reason
    first = down_s(found) > 0.0 and stages.get("downtime", 0.0) >= max(stages.values(), default=0.0)
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


def _held_up_by(found: RoundRow, assignments: Sequence[UpdateRow], since: float) -> list[UpdateRow]:
    """Return the assignments that kept the round open after `since`, the last reply that counted; the longest first.

    A round that ended by its deadline was kept open only by devices that had not replied then. A full buffer waits for
    no device, and no round waits for a follow-up, which belongs to the next buffer.
    """
    if found.reason == "buffer":
        return []
    over = [(one, over_at(one, found)) for one in assignments if not is_follow_up(one.assignment_id)]
    out = [one for one, at in over if at is None]
    if found.reason == "deadline":
        return out
    after = [(at, one) for one, at in over if at is not None and at > since]
    return out + [one for _, one in sorted(after, key=lambda pair: -pair[0])]


def _waited(
    found: RoundRow, stages: Mapping[str, float], device: Mapping[str, float], slowest: UpdateRow | None,
    held: Sequence[UpdateRow], rtt_s: float | None,
) -> str:  # fmt: skip
    """Return the device that the round waited for and its longest stage, or the device without a reply that took
    longer.
    """
    name, waiting = slowest.device if slowest else found.slowest, stages.get("waiting", 0.0)
    if held and waiting > sum(device.values()):
        last, others = held[0], len(held) - 1
        lost = last.failed_at is not None and (found.closed_at is None or last.failed_at <= found.closed_at)
        return f"waited {duration(waiting)} for {last.device}, {became(last, lost)}" + (
            f", and {others} more" if others else ""
        )
    if not name or not device:
        return "no update came to wait for" if not found.aggregated else "nothing of it is known"
    return (
        f"waited {duration(sum(device.values()))} for {name}, which {did(device, slowest, rtt_s)}"
        f"{_assignments_sent(stages, slowest)}{_again(device)}"
    )


def _again(device: Mapping[str, float]) -> str:
    """Return the second delivery of the assignment in parentheses, if another stage took longer; else ""."""
    took_s = device.get("redelivery", 0.0)
    return f" (it {again(took_s)})" if 0.0 < took_s < max(device.values()) else ""


def _assignments_sent(stages: Mapping[str, float], slowest: UpdateRow | None) -> str:
    """Return when an assignment of a replacement was made, and which device it replaced; "" for the first ones."""
    if slowest is None or not slowest.selection_reason:
        return ""
    place = f" instead of {slowest.instead_of}" if slowest.instead_of else ""
    return f" (selected after {duration(stages.get('selection', 0.0))}{place})"


def _filled(
    found: RoundRow, device: Mapping[str, float], last: UpdateRow | None, earlier: Sequence[UpdateRow],
    rtt_s: float | None,
) -> str:  # fmt: skip
    """Return how many updates filled the buffer, how many of them were assigned earlier, and the last one's longest
    stage.
    """
    said = f"its buffer was full with {counted(len(found.aggregated), 'update')}"
    if old := [one for one in earlier if one.update_id in found.aggregated]:
        said += f", {'all' if len(old) == len(found.aggregated) else f'{len(old)} of them'} assigned before it opened"
        behind = max(old, key=lambda one: one.staleness)
        if behind.staleness:
            said += f" ({behind.device}'s {counted(behind.staleness, 'version')} behind)"
    if last is None or not device:
        return said
    return f"{said}; the last came from {last.device}, which then {did(device, last, rtt_s)}{_again(device)}"


def _missed(found: RoundRow, assignments: Sequence[UpdateRow], waited_for: Sequence[str]) -> str:
    """Return how many devices missed the deadline, and the facts about the first of those that replied later."""
    if found.hides_sample:
        return f"it ended at its deadline of {duration(found.deadline_s)}, whoever was sampled"
    silent = len(waited_for) or unanswered(found)
    said = (
        f"{silent} of {len(found.selected)} had not answered when its deadline of {duration(found.deadline_s)} passed"
    )
    late = [one for one in assignments if one.device in waited_for and one.arrived_at is not None]
    if late:
        first = min(late, key=lambda one: one.arrived_at or 0.0)
        stages = {name: took for name, took in along(first, found.downtimes).items() if name != "downtime"}
        return f"{said}; {first.device} took {duration(sum(stages.values()))} and {did(stages, first)}"
    here = {one.device: one for one in assignments if one.device in waited_for}
    if not here:
        return said
    pulled = [name for name, one in here.items() if one.pulled_at]
    if pulled:
        return f"{said}; {names(pulled)} got the assignment and {still_out(here[pulled[0]])}"
    return f"{said}; {names(list(here))} got no assignment that is known of"


TOLD_S = 1.0  # a shorter downtime is not mentioned
OWN_SHARE = 0.2  # share of a round's time from which the aggregator's part is mentioned


def became(assignment: UpdateRow, lost: bool) -> str:
    """Return the outcome of an assignment that the round waited for in vain; `lost`: it failed while the round was
    open.
    """
    kind = assignment.reason.partition(":")[0]
    if lost:
        return (
            "which was lost" if kind in ("offline", "") or assignment.outcome != "failed" else f"which failed ({kind})"
        )
    if assignment.outcome == "dropped":
        return f"whose answer was dropped ({kind})" if kind else "whose answer was dropped"
    return "which had not answered"


def still_out(assignment: UpdateRow) -> str:
    """Return the state of an assignment without a reply until the deadline and since."""
    over = "did not answer before the run's end" if assignment.outcome == "over" else "did not answer"
    return "has not answered yet" if assignment.outcome == "selected" else over


def own_part(took: float, stages: Mapping[str, float], uncounted: Mapping[str, float]) -> str:
    """Return the aggregator's time if it was a large part of the round; `uncounted` is time outside the run's clock."""
    mine = uncounted or stages
    if not mine or sum(mine.values()) < OWN_SHARE * took:
        return ""
    most = max(mine, key=lambda stage: mine[stage])
    said = f"; the aggregator took {duration(sum(mine.values()))} ({most} {duration(mine[most])})"
    return said + (", which a simulation's clock does not count" if uncounted else "")


def downtime_text(found: RoundRow, meanwhile: str = "") -> str:
    """Return the downtime in words, "" if it was short; `meanwhile` is appended."""
    if clock_was_set(found):
        return f"the aggregator was offline{meanwhile} for an unknown time: the clock was set"
    return f"the aggregator was offline for {duration(took)}{meanwhile}" if (took := down_s(found)) >= TOLD_S else ""


def unanswered(found: RoundRow) -> int:
    """Return the number of devices that had not replied when the round closed; late replies came after that."""
    return max(0, len(found.selected) - found.aggregated_count - found.dropped - found.failed)


def names(devices: Sequence[str]) -> str:
    """Return the first device, and the number of the others."""
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"


def whys(
    run: RunRow, rounds: Sequence[RoundRow], updates: Iterable[UpdateRow], since: Mapping[int, float | None],
    rtts: Mapping[str, float] | None = None, phases: Iterable[PhaseRow] = (),
) -> list[RoundExplanation]:  # fmt: skip
    """Return the explanations of the closed rounds among these, in order.

    `updates` are all rows that were assigned or aggregated in the rounds. `since` is when each round began to accept
    replies (`turns`). `rtts` are seconds by device (`round_trips`). `phases` are the closed phases of secure rounds.
    """
    assignments, earlier = defaultdict[int, list[UpdateRow]](list), defaultdict[int, list[UpdateRow]](list)
    for one in updates:
        assignments[one.round].append(one)
        if one.aggregated_round not in (None, one.round):
            earlier[one.aggregated_round or 0].append(one)
    simulated, secure = run.source == "sim", secure_rounds.is_secure(run)
    closed_phases = defaultdict[int, list[PhaseRow]](list)
    for row in phases:
        closed_phases[row.round].append(row)
    return [
        why(
            one, assignments[one.round], earlier[one.round], since[one.round], simulated=simulated, rtts=rtts,
            phases=closed_phases[one.round] if secure else None,
        )
        for one in rounds if one.reason
    ]  # fmt: skip


@dataclass
class RunTotals:
    """The sums over the explanations of a run's rounds; `add` with the sign -1 takes an explanation out again."""

    rounds: int = 0
    seconds: float = 0.0
    requests: int = 0
    timed: int = 0  # requests of rounds with a measured round trip; their round trips took `trips_s`
    trips_s: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    uncounted: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    slowest: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, one: RoundExplanation, sign: int = 1) -> None:
        """Add the explanation of a round."""
        self.rounds, self.seconds = self.rounds + sign, self.seconds + sign * one.seconds
        self.requests += sign * one.requests
        if one.rtt_s is not None:
            self.timed, self.trips_s = self.timed + sign * one.requests, self.trips_s + sign * one.requests * one.rtt_s
        for sums, parts in ((self.stages, one.stages), (self.uncounted, one.uncounted)):
            for name, took in parts.items():
                sums[name] += sign * took
        self.slowest.update({one.device: sign} if one.device else {})
        for name in one.waited_for:
            self.missed[name] += sign

    def explanation(self) -> RoundExplanation:
        """Return the explanation of the run: the stages' sums, and the device that was waited for most often."""
        spent = {name: self.stages[name] for name in STAGES if self.stages.get(name, 0.0) > 0}
        uncounted = {name: self.uncounted[name] for name in OWN if self.uncounted.get(name, 0.0) > 0}
        said = f"{counted(self.rounds, 'round')} took {duration(self.seconds)}"
        if spent and self.seconds:
            most = max(spent, key=lambda name: spent[name])
            said += f", {100 * spent[most] / self.seconds:.0f} % of it in the stage {most}"
        (device, count), (silent, times) = ((*each.most_common(1), ("", 0))[0] for each in (self.slowest, self.missed))
        said += f"; {device} was the slowest in {count} of {self.rounds}" if count else ""
        said += f"; {silent} had not answered in time in {times}" if times else ""
        said += own_part(self.seconds, {}, uncounted)
        rtt_s, device = self.trips_s / self.timed if self.timed else None, device if count else ""
        return RoundExplanation(0, self.seconds, f"{said}.", device, spent, (), self.requests, rtt_s, uncounted)


def in_all(found: Iterable[RoundExplanation]) -> RoundExplanation:
    """Return the explanation of a run from those of its rounds."""
    totals = RunTotals()
    for one in found:
        totals.add(one)
    return totals.explanation()
