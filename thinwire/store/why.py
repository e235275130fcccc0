"""Why a round took as long as it did: its stages along the device that it waited for, and one sentence.

All is read from the rows of the round and its asks, so what a late answer tells of a round is said once it is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.texts import duration, size, speed
from thinwire.store.rows import RoundRow, UpdateRow
from thinwire.store.stages import ALONG, OWN, STAGES, along, within, within_s

OWN_SHARE = 0.2  # of a round's time, from which on the aggregator's part is worth a word
# Bits of a parameter, mildest first: what could be tried instead. tests/store holds them against the codecs.
SMALLER = {"fp16": 16.0, "int8": 8.0, "qsgd(4)": 4.0, "topk(0.01) > int8 > rice": 0.17, "topk(0.01) > sign > rice": 0.1}


@dataclass(frozen=True)
class Why:
    """Seconds by stage (`STAGES`); `device`: along whose answer, "" where none came. `waiting`: from the last answer
    that counted until nothing more was accepted, for `waited_for`, who had not answered by then. `requests`: of
    that device's exchange, where there is a wire.
    """

    round: int
    seconds: float
    sentence: str
    device: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    waited_for: tuple[str, ...] = ()
    requests: int = 0


def why(
    found: RoundRow, asks: Sequence[UpdateRow] = (), parameters: int = 0, earlier: Sequence[UpdateRow] = (),
    turn_at: float | None = None,
) -> Why:  # fmt: skip
    """Of a round that is closed. `asks`: the round's own rows; `earlier`: those of rounds before it that were folded
    into it; without them less is told. `parameters`: of the model, for what a smaller codec would have come to.
    `turn_at`: since when it took answers (`turns`), where that was not at its opening.
    """
    took = found.seconds or 0.0
    slowest = _slowest(found, asks, earlier)
    stages = {name.removesuffix("_s"): value for name, value in found.spent.items()}
    stages = {"asked" if name == "wait" else name: value for name, value in stages.items()}
    begin = found.opened_at if turn_at is None else turn_at
    if slowest is not None and slowest.arrived_at is not None:
        stages |= within(slowest, begin, found.away)
        begin = max(begin, slowest.arrived_at)
    waited_for = () if found.reason == "buffer" else tuple(one.device for one in asks if not _in_time(one, found))
    if (asks or earlier) and found.closed_at is not None:
        if gone := within_s(found.away, begin, found.closed_at):  # after the last answer that counted
            stages["away"] = stages.get("away", 0.0) + gone
        known = sum(stages.get(name, 0.0) for name in STAGES if name != "waiting")
        stages["waiting"] = max(0.0, took - known)
    elif found.away:
        known = sum(stages.get(name, 0.0) for name in STAGES)
        stages["away"] = min(max(0.0, took - known), gone_s(found))
    said = {name: stages[name] for name in STAGES if name in stages}
    if found.reason == "buffer":
        reason = _filled(found, said, slowest, earlier)
    elif found.reason == "deadline":
        reason = _missed(found, asks, waited_for, parameters)
    else:
        reason = _waited(found, said, slowest)
    device, requests = (slowest.device, slowest.requests) if slowest else (found.slowest, 0)
    told = f"Round {found.round} took {duration(took)}: {_blamed(found, said, reason)}."
    return Why(found.round, took, told, device, said, waited_for, requests)


def gone_s(found: RoundRow) -> float:
    """For how long no aggregator was there while the round was open."""
    return sum(until - since for since, until in found.away)


def _blamed(found: RoundRow, stages: Mapping[str, float], reason: str) -> str:
    """The reason, and what of the round was without an aggregator: first where nothing else took so long."""
    if not found.away:
        return reason
    gone = f"the aggregator was away for {duration(gone_s(found))}"
    first = stages.get("away", 0.0) >= max(stages.values(), default=0.0)
    return f"{gone}; {reason}" if first else f"{reason}; {gone} meanwhile"


def _slowest(found: RoundRow, asks: Sequence[UpdateRow], earlier: Sequence[UpdateRow]) -> UpdateRow | None:
    """The ask that the round waited for last; what filled a buffer may have been asked for before it opened."""
    own = next((one for one in asks if one.device == found.slowest), None)
    if own is not None and found.reason != "buffer":
        return own
    came = [one for one in (*asks, *earlier) if one.update_id in found.folded and one.arrived_at is not None]
    return max(came, key=lambda one: one.arrived_at or 0.0, default=own)


def in_all(whys: Sequence[Why]) -> Why:
    """Of a run: the sums of its rounds' stages, along different devices, and who was waited for most often."""
    stages = {name: sum(one.stages.get(name, 0.0) for one in whys) for name in STAGES}
    took = sum(one.seconds for one in whys)
    rounds = f"{len(whys)} {'round' if len(whys) == 1 else 'rounds'} took {duration(took)}"
    spent = {name: value for name, value in stages.items() if value > 0}
    if not spent:
        return Why(0, took, f"{rounds}.")
    most = max(spent, key=lambda name: spent[name])
    share = f"{100 * spent[most] / took:.0f} % of it " if took else ""
    device, count = Counter(one.device for one in whys if one.device).most_common(1)[0] if _any(whys) else ("", 0)
    by = f"; {device} was the slowest in {count} of {len(whys)}" if device else ""
    missed = Counter(name for one in whys for name in one.waited_for).most_common(1)
    silent = f"; {missed[0][0]} had not answered in time in {missed[0][1]}" if missed else ""
    return Why(0, took, f"{rounds}, {share}{_words(most)}{by}{silent}.", device, spent)


def _any(whys: Iterable[Why]) -> bool:
    return any(one.device for one in whys)


def _in_time(ask: UpdateRow, found: RoundRow) -> bool:
    """Whether this ask had its outcome when the round closed."""
    if ask.arrived_at is None or found.closed_at is None:
        return ask.outcome in ("failed", "folded", "dropped")
    return ask.outcome == "failed" or ask.arrived_at <= found.closed_at


def _waited(found: RoundRow, stages: Mapping[str, float], slowest: UpdateRow | None) -> str:
    """For whom, and what that device did most of the time; a word on the aggregator where it took its share."""
    device = {name: stages[name] for name in ALONG if name in stages}
    name = slowest.device if slowest else found.slowest
    if not name or not device:
        return "no update came to wait for" if not found.folded else "nothing of it is known"
    waited = (
        f"waited {duration(sum(device.values()))} for {name}, which {_most(device, slowest)}{_asked(stages, slowest)}"
    )
    own = {stage: stages[stage] for stage in OWN if stage in stages}
    if sum(own.values()) < OWN_SHARE * (found.seconds or 0.0):
        return waited
    most = max(own, key=lambda stage: own[stage])
    mine = f"the aggregator took {duration(sum(own.values()))} ({_words(most)} {duration(own[most])})"
    return f"{waited}; {mine}"


def _asked(stages: Mapping[str, float], slowest: UpdateRow | None) -> str:
    """Of one that was asked in the middle of the round: when, and in whose place."""
    if slowest is None or not slowest.asked_why:
        return ""
    place = f" instead of {slowest.instead_of}" if slowest.instead_of else ""
    return f" (asked after {duration(stages.get('before', 0.0))}{place})"


def _filled(
    found: RoundRow, stages: Mapping[str, float], last: UpdateRow | None, earlier: Sequence[UpdateRow]
) -> str:  # fmt: skip
    """A buffer waits for nobody: what filled it, how much of that was asked for earlier, and what came last."""
    said = f"its buffer was full with {len(found.folded)} {'update' if len(found.folded) == 1 else 'updates'}"
    if old := [one for one in earlier if one.update_id in found.folded]:
        said += f", {'all' if len(old) == len(found.folded) else f'{len(old)} of them'} asked for before it opened"
        behind = max(old, key=lambda one: one.staleness)
        if behind.staleness:
            said += (
                f" ({behind.device}'s {behind.staleness} {'version' if behind.staleness == 1 else 'versions'} behind)"
            )
    device = {name: stages[name] for name in ALONG if name in stages}
    if last is None or not any(device.values()):
        return said
    return f"{said}; the last came from {last.device}, which then {_most(device, last)}"


def _missed(found: RoundRow, asks: Sequence[UpdateRow], waited_for: Sequence[str], parameters: int) -> str:
    """Who had not answered when the deadline passed, and what is known of the first of those who answered later."""
    silent = len(waited_for) or unanswered(found)
    said = f"{silent} of {len(found.asked)} had not answered when its deadline of {duration(found.deadline_s)} passed"
    late = [one for one in asks if one.device in waited_for and one.arrived_at is not None]
    if late:
        first = min(late, key=lambda one: one.arrived_at or 0.0)
        stages = {name: took for name, took in along(first, found.away).items() if name in ALONG}
        hint = would_do(first, stages, found.deadline_s, parameters)
        return f"{said}; {first.device} took {duration(sum(stages.values()))} and {_most(stages, first)}{hint}"
    here = {one.device: one for one in asks if one.device in waited_for}
    if not here:
        return said
    pulled = [name for name, one in here.items() if one.pulled_at]
    if pulled:
        return f"{said}; {_names(pulled)} took the ask up and has not answered yet"
    return f"{said}; {_names(list(here))} was not seen to take the ask up"


def would_do(ask: UpdateRow, stages: Mapping[str, float], deadline_s: float, parameters: int) -> str:
    """Which codec's update would have come in time on the link as it was; "" where it is not the upload's fault."""
    if not parameters or not ask.payload_up or stages["upload"] <= 0.0:
        return ""
    rest = sum(stages.values()) - stages["upload"]
    for codec, bits in SMALLER.items():
        sent = parameters * bits / 8
        if sent < ask.payload_up and rest + stages["upload"] * sent / ask.payload_up <= deadline_s:
            return f"; {codec} would have made the deadline"
    return "; no smaller update would have made the deadline" if rest > deadline_s else ""


def unanswered(found: RoundRow) -> int:
    """Devices that had not answered when the round closed; late answers came after it."""
    return max(0, len(found.asked) - found.folded_count - found.dropped - found.failed)


def _most(stages: Mapping[str, float], ask: UpdateRow | None) -> str:
    """The longest stage, as something that a device did."""
    name = max(stages, key=lambda stage: stages[stage])
    took = duration(stages[name])
    if name == "upload" and ask and ask.payload_up and stages[name] > 0:
        sent = ask.payload_up if ask.wire_up is None else ask.wire_up
        return f"uploaded {size(sent)} at {speed(8 * sent / stages[name])} in {took}"
    if name == "download" and ask and ask.payload_down and stages[name] > 0:
        return f"downloaded {size(ask.payload_down)} at {speed(8 * ask.payload_down / stages[name])} in {took}"
    if name == "train" and ask and ask.steps:
        return f"trained {ask.steps} {'step' if ask.steps == 1 else 'steps'} in {took}"
    if name == "trips" and ask and ask.requests:
        return f"spent {took} on {ask.requests} requests"
    return {
        "asked": f"took the ask up after {took}", "queue": f"did other work first for {took}",
        "evaluate": f"measured the model for {took}", "encode": f"encoded for {took}",
        "trips": f"spent {took} on requests", "upload": f"uploaded for {took}",
        "download": f"downloaded for {took}", "train": f"trained for {took}",
    }[name]  # fmt: skip


def _words(name: str) -> str:
    """A stage as a noun."""
    return {
        "asked": "until an ask was taken up", "queue": "behind other work", "trips": "requests and round trips",
        "waiting": "waiting for who did not answer", "store": "making it durable", "download": "downloads",
        "evaluate": "measuring", "train": "training", "encode": "encoding", "upload": "uploads", "fold": "folding",
        "step": "the step", "away": "without an aggregator", "before": "before the last one to answer was asked",
    }[name]  # fmt: skip


def _names(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"
