"""What is said of where time went: stages as nouns and as something that a device did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.core.absence import absence_s
from thinwire.core.texts import counted, duration, size, speed, trip
from thinwire.store.rows import RoundRow, UpdateRow

TOLD_S = 1.0  # an absence that is shorter is not worth a word
OWN_SHARE = 0.2  # of a round's time, from which on the aggregator's part is worth a word
# Bits of a parameter, mildest first: what could be tried instead. tests/store holds them against the codecs.
SMALLER = {"fp16": 16.0, "int8": 8.0, "qsgd(4)": 4.0, "topk(0.01) > int8 > rice": 0.17, "topk(0.01) > sign > rice": 0.1}


def did(stages: Mapping[str, float], ask: UpdateRow | None, rtt_s: float | None = None) -> str:
    """The longest stage, as something that a device did."""
    name = max(stages, key=lambda stage: stages[stage])
    took = duration(stages[name])
    if name == "upload" and ask and ask.payload_up and stages[name] > 0:
        sent = ask.payload_up if ask.wire_up is None else ask.wire_up
        return f"uploaded {size(sent)} at {speed(8 * sent / stages[name])} in {took}"
    if name == "download" and ask and ask.payload_down and stages[name] > 0:
        return f"downloaded {size(ask.payload_down)} at {speed(8 * ask.payload_down / stages[name])} in {took}"
    if name == "train" and ask and ask.steps:
        return f"trained {counted(ask.steps, 'step')} in {took}"
    if name == "between" and ask and ask.requests:
        of_it = ""
        if rtt_s and ask.requests * rtt_s < stages[name] / 2:
            of_it = ": it started what trains, wrote to its disk, or was gone"
        return f"spent {took} between its stages ({exchange(ask.requests, rtt_s)}){of_it}"
    return {
        "asked": f"took the ask up after {took}", "again": again(stages[name]),
        "queue": f"did other work first for {took}",
        "evaluate": f"measured the model for {took}", "encode": f"encoded for {took}",
        "between": f"spent {took} between its stages", "upload": f"uploaded for {took}",
        "download": f"downloaded for {took}", "train": f"trained for {took}",
    }[name]  # fmt: skip


def again(took_s: float) -> str:
    """Of a device whose process or line was gone in the middle of its work."""
    return f"took the ask up again after {duration(took_s)}: what it had begun was lost"


def noun(name: str) -> str:
    """A stage as a noun."""
    return {
        "asked": "until an ask was taken up", "again": "until an ask was taken up again", "queue": "behind other work",
        "waiting": "waiting for who did not answer", "store": "making it durable", "download": "downloads",
        "evaluate": "measuring", "train": "training", "encode": "encoding", "upload": "uploads", "fold": "folding",
        "step": "the step", "away": "without an aggregator", "before": "before the last one to answer was asked",
        "between": "between the stages on the devices",
    }[name]  # fmt: skip


def exchange(requests: int, rtt_s: float | None) -> str:
    """Requests x round trip and what that comes to, as far as it is known; "" where there was no request.

    >>> exchange(2, 0.048), exchange(1, None), exchange(0, 0.048)
    ('2 requests x 48 ms = 96 ms', '1 request', '')
    """
    if not requests:
        return ""
    return counted(requests, "request") + (f" x {trip(rtt_s)} = {trip(requests * rtt_s)}" if rtt_s else "")


def became(ask: UpdateRow, lost: bool) -> str:
    """What became of one that the round waited for and that brought it nothing; `lost`: it failed while it was open."""
    kind = ask.reason.partition(":")[0]
    if lost:
        return "which was lost" if kind in ("left", "") or ask.outcome != "failed" else f"which failed ({kind})"
    if ask.outcome == "dropped":
        return f"whose answer was dropped ({kind})" if kind else "whose answer was dropped"
    return "which had not answered"


def still_out(ask: UpdateRow) -> str:
    """Of one that was not answered by a deadline, nor since."""
    over = "did not answer before the run's end" if ask.outcome == "over" else "did not answer"
    return "has not answered yet" if ask.outcome == "asked" else over


def own_part(took: float, stages: Mapping[str, float], uncounted: Mapping[str, float]) -> str:
    """The aggregator's, where it is worth a word; `uncounted`: seconds of it that are none of the run's clock."""
    mine = uncounted or stages
    if not mine or sum(mine.values()) < OWN_SHARE * took:
        return ""
    most = max(mine, key=lambda stage: mine[stage])
    said = f"; the aggregator took {duration(sum(mine.values()))} ({noun(most)} {duration(mine[most])})"
    return said + (", which a simulation's clock does not count" if uncounted else "")


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


def gone_s(found: RoundRow) -> float:
    """For how long no aggregator was there while the round was open, as far as that is known."""
    return sum(absence_s(*one) or 0.0 for one in found.away)


def gone(found: RoundRow, meanwhile: str = "") -> str:
    """What is said of that; "" where it is not worth a word. `meanwhile`: a word behind it."""
    if any(absence_s(*one) is None for one in found.away):
        return f"the aggregator was away{meanwhile}, for how long is not known"
    return f"the aggregator was away for {duration(took)}{meanwhile}" if (took := gone_s(found)) >= TOLD_S else ""


def unanswered(found: RoundRow) -> int:
    """Devices that had not answered when the round closed; late answers came after it."""
    return max(0, len(found.asked) - found.folded_count - found.dropped - found.failed)


def names(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"
