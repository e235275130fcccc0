"""Why a round took as long as it did: its stages along the device that it waited for, and one sentence.

All is read from the rows of the round and its asks, so what a late answer tells of a round is said once it is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.ask_ids import is_further
from thinwire.core.events import CAPPED
from thinwire.core.texts import counted, duration
from thinwire.store.one_clock import on_one_clock
from thinwire.store.rows import RoundRow, UpdateRow
from thinwire.store.stages import ALONG, OWN, STAGES, along, within, within_s
from thinwire.store.why_words import again, became, did, gone, gone_s, names, own_part, still_out, unanswered, would_do


@dataclass(frozen=True)
class Why:
    """Seconds by stage (`STAGES`); `device`: along whose answer, "" where none came. `waiting`: from the last answer
    that counted until nothing more was accepted, for `waited_for`: who was lost or dropped then, or still out.
    `requests`: of that device's exchange, where there is a wire, with a round trip of `rtt_s` where one was measured;
    `trips_s`: what these come to. That is no stage: it lies in the download, the upload and between.
    `uncounted`: the aggregator's part in a simulation, whose clock stands still meanwhile.
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
        return None if self.rtt_s is None else self.requests * self.rtt_s


def why(
    found: RoundRow, asks: Sequence[UpdateRow] = (), parameters: int = 0, earlier: Sequence[UpdateRow] = (),
    turn_at: float | None = None, *, simulated: bool = False, rtts: Mapping[str, float] | None = None,
) -> Why:  # fmt: skip
    """Of a round that is closed. `asks`: the round's own rows; `earlier`: those of rounds before it that were folded
    into it; without them less is told. `parameters`: of the model, for what a smaller codec would have come to.
    `turn_at`: since when it took answers (`turns`), where that was not at its opening. `rtts`: seconds by device.
    """
    told_of, took = found, found.seconds or 0.0
    found, turn_at, (asks, earlier) = on_one_clock(found, turn_at, asks, earlier)
    slowest = _slowest(found, asks, earlier)
    stages = {name.removesuffix("_s"): value for name, value in found.spent.items()}
    stages = {"asked" if name == "wait" else name: value for name, value in stages.items()}
    uncounted = {name: stages.pop(name) for name in OWN if name in stages} if simulated else {}
    begin = found.opened_at if turn_at is None else turn_at
    if slowest is not None and slowest.arrived_at is not None:
        stages |= within(slowest, begin, found.away)
        begin = max(begin, slowest.arrived_at)
    held = _held_up_by(found, asks, begin)
    if (asks or earlier) and found.closed_at is not None:
        if after := within_s(found.away, begin, found.closed_at):  # the last answer that counted
            stages["away"] = stages.get("away", 0.0) + after
        known = sum(stages.get(name, 0.0) for name in STAGES if name != "waiting")
        stages["waiting"] = max(0.0, took - known)
    elif found.away:
        known = sum(stages.get(name, 0.0) for name in STAGES)
        stages["away"] = min(max(0.0, took - known), gone_s(found))
    said = {name: stages[name] for name in STAGES if name in stages}
    device, requests = (slowest.device, slowest.requests) if slowest else (found.slowest, 0)
    rtt_s = (rtts or {}).get(device) if requests else None
    if found.reason == "buffer":
        reason = _filled(found, said, slowest, earlier, rtt_s)
    elif found.reason == "deadline":
        reason = _missed(found, asks, [one.device for one in held], parameters)
    else:
        reason = _waited(found, said, slowest, held, rtt_s)
        reason += own_part(took, {name: said[name] for name in OWN if name in said}, uncounted)
    told = f"Round {found.round} took {duration(took)}: {_blamed(told_of, said, reason)}."
    told += _capped(found, (*asks, *earlier))
    waited_for = tuple(one.device for one in held)
    return Why(found.round, took, told, device, said, waited_for, requests, rtt_s, uncounted)


def _capped(found: RoundRow, asks: Sequence[UpdateRow]) -> str:
    """A sentence on the first client that counts less than its reply says, and how many more do."""
    capped = [one for one in asks if one.update_id in found.folded and one.reason.startswith(CAPPED)]
    if not capped:
        return ""
    more = f"; {counted(len(capped) - 1, 'more client')} too" if capped[1:] else ""
    return f" {capped[0].device}: {capped[0].reason}{more}."


def _blamed(found: RoundRow, stages: Mapping[str, float], reason: str) -> str:
    """The reason, and what of the round was without an aggregator: first where nothing else took so long."""
    if not gone(found):
        return reason
    first = gone_s(found) > 0.0 and stages.get("away", 0.0) >= max(stages.values(), default=0.0)
    return f"{gone(found)}; {reason}" if first else f"{reason}; {gone(found, ' meanwhile')}"


def _slowest(found: RoundRow, asks: Sequence[UpdateRow], earlier: Sequence[UpdateRow]) -> UpdateRow | None:
    """The ask that the round waited for last; what filled a buffer may have been asked for before it opened."""
    own = next((one for one in asks if one.device == found.slowest and not is_further(one.ask_id)), None)
    if own is not None and found.reason != "buffer":
        return own
    came = [one for one in (*asks, *earlier) if one.update_id in found.folded and one.arrived_at is not None]
    return max(came, key=lambda one: one.arrived_at or 0.0, default=own)


def _held_up_by(found: RoundRow, asks: Sequence[UpdateRow], since: float) -> list[UpdateRow]:
    """Who kept the round open after `since`, the last answer that counted: first who did so for longest. What a
    deadline ended was kept open by those alone who were out when it passed; a full buffer waits for nobody, and none
    for what a device does for the next one.
    """
    if found.reason == "buffer":
        return []
    over = [(one, _over_at(one, found)) for one in asks if not is_further(one.ask_id)]
    out = [one for one, at in over if at is None]
    if found.reason == "deadline":
        return out
    after = [(at, one) for one, at in over if at is not None and at > since]
    return out + [one for _, one in sorted(after, key=lambda pair: -pair[0])]


def _over_at(ask: UpdateRow, found: RoundRow) -> float | None:
    """When this ask had its outcome, None: not before the round closed; 0 where nobody kept when it failed."""
    if ask.arrived_at is None and ask.failed_at is None:
        return 0.0 if ask.outcome in ("failed", "folded", "dropped") else None
    moments = [at for at in (ask.arrived_at, ask.failed_at) if at is not None]
    return max((at for at in moments if found.closed_at is None or at <= found.closed_at), default=None)


def _waited(
    found: RoundRow, stages: Mapping[str, float], slowest: UpdateRow | None, held: Sequence[UpdateRow],
    rtt_s: float | None,
) -> str:  # fmt: skip
    """For whom, and what that device did most of the time; or who never came, where that took longer."""
    device = {name: stages[name] for name in ALONG if name in stages}
    name, waiting = slowest.device if slowest else found.slowest, stages.get("waiting", 0.0)
    if held and waiting > sum(device.values()):
        last, others = held[0], len(held) - 1
        lost = last.failed_at is not None and (found.closed_at is None or last.failed_at <= found.closed_at)
        return f"waited {duration(waiting)} for {last.device}, {became(last, lost)}" + (
            f", and {others} more" if others else ""
        )
    if not name or not device:
        return "no update came to wait for" if not found.folded else "nothing of it is known"
    return (
        f"waited {duration(sum(device.values()))} for {name}, which {did(device, slowest, rtt_s)}"
        f"{_asked(stages, slowest)}{_again(device)}"
    )


def _again(device: Mapping[str, float]) -> str:
    """That it was gone in the middle of its work, where something else took longer."""
    took_s = device.get("again", 0.0)
    return f" (it {again(took_s)})" if 0.0 < took_s < max(device.values()) else ""


def _asked(stages: Mapping[str, float], slowest: UpdateRow | None) -> str:
    """Of one that was asked in the middle of the round: when, and in whose place."""
    if slowest is None or not slowest.asked_why:
        return ""
    place = f" instead of {slowest.instead_of}" if slowest.instead_of else ""
    return f" (asked after {duration(stages.get('before', 0.0))}{place})"


def _filled(
    found: RoundRow, stages: Mapping[str, float], last: UpdateRow | None, earlier: Sequence[UpdateRow],
    rtt_s: float | None,
) -> str:  # fmt: skip
    """A buffer waits for nobody: what filled it, how much of that was asked for earlier, and what came last."""
    said = f"its buffer was full with {counted(len(found.folded), 'update')}"
    if old := [one for one in earlier if one.update_id in found.folded]:
        said += f", {'all' if len(old) == len(found.folded) else f'{len(old)} of them'} asked for before it opened"
        behind = max(old, key=lambda one: one.staleness)
        if behind.staleness:
            said += f" ({behind.device}'s {counted(behind.staleness, 'version')} behind)"
    device = {name: stages[name] for name in ALONG if name in stages}
    if last is None or not any(device.values()):
        return said
    return f"{said}; the last came from {last.device}, which then {did(device, last, rtt_s)}{_again(device)}"


def _missed(found: RoundRow, asks: Sequence[UpdateRow], waited_for: Sequence[str], parameters: int) -> str:
    """Who had not answered when the deadline passed, and what is known of the first of those who answered later."""
    silent = len(waited_for) or unanswered(found)
    said = f"{silent} of {len(found.asked)} had not answered when its deadline of {duration(found.deadline_s)} passed"
    late = [one for one in asks if one.device in waited_for and one.arrived_at is not None]
    if late:
        first = min(late, key=lambda one: one.arrived_at or 0.0)
        stages = {name: took for name, took in along(first, found.away).items() if name in ALONG}
        hint = would_do(first, stages, found.deadline_s, parameters)
        return f"{said}; {first.device} took {duration(sum(stages.values()))} and {did(stages, first)}{hint}"
    here = {one.device: one for one in asks if one.device in waited_for}
    if not here:
        return said
    pulled = [name for name, one in here.items() if one.pulled_at]
    if pulled:
        return f"{said}; {names(pulled)} took the ask up and {still_out(here[pulled[0]])}"
    return f"{said}; {names(list(here))} was not seen to take the ask up"
