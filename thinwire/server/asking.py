"""For how long and in which codecs devices are asked: what is known of them, put before the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.aggregation.rungs import rungs
from thinwire.aggregation.warmup import codec_of
from thinwire.core.plan import RunPlan
from thinwire.server import ladder
from thinwire.server.deadline import Deadline, auto_deadline, filled, fixed
from thinwire.server.errands import errand, update_bytes
from thinwire.server.known import work_of
from thinwire.server.ladder import Choice
from thinwire.server.running import Running

Expected = Mapping[str, Sequence[float | None]]  # device -> seconds for each codec; None: not known


def codecs_of(running: Running) -> list[str]:
    """The codecs of the next round, mildest first: one where the plan has no ladder."""
    uplink = running.plan.uplink
    return rungs(uplink) if uplink.ladder else [codec_of(uplink, running.past.steps_made)]


def expected(running: Running, number: int, sizes: Mapping[str, int], codecs: Sequence[str]) -> Expected:
    """For each device, which is sent so many bytes, the seconds in which nine of ten answers in each codec are here."""
    plan, work, came = running.plan, work_of(running.plan, running.layout), running.past.codecs.came
    ups = [update_bytes(codec, running.layout, came) for codec in codecs]
    found = dict[str, list[float | None]]()
    for device, down in sizes.items():
        known = running.known.device(device, work)
        times = [known.seconds(errand(plan, number, down, up)) for up in ups]
        found[device] = [time.p90 if time else None for time in times]
    return found


def deadline_of(plan: RunPlan, times: Expected, wanted: int) -> Deadline:
    """The plan's, or that which the devices' links and speed give with the smallest codec."""
    if plan.cohort.deadline_s != "auto":
        return fixed(plan.cohort.deadline_s)
    if plan.local.steps == "auto":
        return filled()
    return auto_deadline({device: own[-1] for device, own in times.items()}, wanted)


def rungs_of(running: Running, times: Expected, codecs: Sequence[str], deadline_s: float) -> dict[str, Choice]:
    """Each device's rung of the ladder; nothing where the plan has none."""
    if len(codecs) == 1:
        return {}
    standings = running.past.codecs.standings
    return {device: ladder.choose(codecs, own, deadline_s, standings.get(device)) for device, own in times.items()}


def own_codec(running: Running, number: int, device: str, down_bytes: int, left_s: float) -> dict[str, Any]:
    """The fields of `ClientAsked` for one asked in the middle of a round, with less time; none without a ladder."""
    codecs = codecs_of(running)
    if len(codecs) == 1:
        return {}
    times = expected(running, number, {device: down_bytes}, codecs)
    return {"codec": rungs_of(running, times, codecs, left_s)[device].standing.codec}


def most_common(chosen: Mapping[str, Choice], codecs: Sequence[str]) -> str:
    """What most are asked in, the milder of two; the one codec without a ladder."""
    asked = [choice.standing.codec for choice in chosen.values()]
    return max(codecs, key=asked.count)
