"""For how long and in which codecs devices are asked: what is known of them, put before the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.aggregation.rungs import rungs
from thinwire.aggregation.warmup import codec_of
from thinwire.core.plan import RunPlan
from thinwire.server.choices import ladder
from thinwire.server.choices.deadline import SHARE, Deadline, auto_deadline, fixed, in_groups
from thinwire.server.choices.errands import errand, update_bytes
from thinwire.server.choices.known import work_of
from thinwire.server.choices.ladder import Choice
from thinwire.server.choices.selection import Odds, odds
from thinwire.server.driving.running import Running

Expected = Mapping[str, Sequence[float | None]]  # device -> seconds for each codec; None: not known


def codecs_of(running: Running) -> list[str]:
    """The codecs of the next round, mildest first: one where the plan has no ladder."""
    uplink, past = running.plan.uplink, running.past
    return rungs(uplink) if uplink.ladder else [codec_of(uplink, past.steps_made + len(past.line.rounds))]


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


def odds_of(running: Running, number: int, candidates: Sequence[str]) -> Odds:
    """By what the plan says: the seconds of a local step, or of taking the model and sending the smallest update."""
    plan, work, selection = running.plan, work_of(running.plan, running.layout), running.plan.cohort.selection
    if selection == "uniform":
        return Odds()
    known = {device: running.known.device(device, work) for device in candidates}
    if selection == "speed":
        return odds(selection, {d: one.step.p50 if one.step else None for d, one in known.items()}, "a step")
    up = update_bytes(codecs_of(running)[-1], running.layout, running.past.codecs.came)
    sent = {d: errand(plan, number, running.sending.parcel(d).size, up) for d in candidates}
    return odds(selection, {d: one.travels_s(sent[d]) for d, one in known.items()}, "an exchange")


def deadline_of(plan: RunPlan, times: Expected, wanted: int, floor: int) -> Deadline:
    """The plan's, or that which the devices' links and speed give with the smallest codec, multiplied by the number of
    groups when `max_concurrency` splits the cohort. `floor` are the fewest answers that make a step.
    """
    if plan.cohort.deadline_s != "auto":
        return fixed(plan.cohort.deadline_s)
    found = auto_deadline({device: own[-1] for device, own in times.items()}, wanted, floor)
    return in_groups(found, len(times), plan.cohort.max_concurrency) if plan.cohort.mode == "sync" else found


def rungs_of(running: Running, times: Expected, codecs: Sequence[str], fits_s: float) -> dict[str, Choice]:
    """Each device's rung of the ladder; nothing where the plan has none."""
    if len(codecs) == 1:
        return {}
    standings = running.past.codecs.standings
    return {device: ladder.choose(codecs, own, fits_s, standings.get(device)) for device, own in times.items()}


def own_codec(running: Running, number: int, device: str, down_bytes: int, left_s: float) -> dict[str, Any]:
    """The fields of `ClientAsked` for one asked in the middle of a round, with less time; none without a ladder.

    Under an automatic deadline its codec makes the round not much longer than its smallest one does.
    """
    codecs = codecs_of(running)
    if len(codecs) == 1:
        return {}
    times = expected(running, number, {device: down_bytes}, codecs)
    fits_s = SHARE * left_s
    if running.plan.cohort.deadline_s == "auto":
        fits_s = min(fits_s, deadline_of(running.plan, times, wanted=1, floor=1).fits_s)
    choice = rungs_of(running, times, codecs, fits_s)[device]
    return {"codec": choice.standing.codec, "codec_reason": choice.reason}


def most_common(chosen: Mapping[str, Choice], codecs: Sequence[str]) -> str:
    """What most are asked in, the milder of two; the one codec without a ladder."""
    asked = [choice.standing.codec for choice in chosen.values()]
    return max(codecs, key=asked.count)
