"""A round's terms: who is asked for what until when, recorded before any ask leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.aggregation.plan_codecs import codec_of, rungs
from thinwire.core.events import ClientAsked, RoundOpened, RunNoted, RunStatusChanged
from thinwire.core.plan import RunPlan
from thinwire.core.types import ask_id_of
from thinwire.server.buffered_round import Buffer
from thinwire.server.context import Running
from thinwire.server.policy import codec_ladder
from thinwire.server.policy.codec_ladder import Choice
from thinwire.server.policy.cohort import Cohort, Odds, choose, choose_for_buffer, floor_of, notes, odds
from thinwire.server.policy.deadlines import SHARE, Deadline, auto_deadline, fixed, in_groups
from thinwire.server.policy.device_profiles import errand, update_bytes, work_of
from thinwire.server.policy.local_work import Pace, given
from thinwire.server.round import Round, at_work_before, slowest_s
from thinwire.server.round_events import AtWork, Terms


def open_round(running: Running) -> RoundOpened | None:
    """Decide a round and record it; None when nobody can be asked now, or too few for a step since the others are
    busy. Who has been silent too long is given up.
    """
    past, plan = running.past, running.plan
    number, base = past.rounds_opened + 1, past.bases.newest
    for device, asks in running.still_due().items():
        for ask_id, asked in asks.items():
            if number - asked > plan.cohort.max_staleness + past.delay:
                running.lose(device, "stale", f"no answer for {number - asked} rounds", ask_id)
    cohort = _cohort(running, number)
    if not cohort.asked and not _may_fill(running):
        return None
    floor = floor_of(plan.cohort.min_replies, cohort.wanted)
    if floor > cohort.wanted and plan.cohort.mode == "sync":
        return None
    timed, wanted = _timed(running, cohort, floor)
    sizes = {device: running.sending.parcel(device).size for device in timed}
    codecs = codecs_of(running)
    times = expected(running, number, sizes, codecs)
    deadline = deadline_of(plan, times, wanted, floor)
    chosen = rungs_of(running, times, codecs, deadline.fits_s)
    opened = RoundOpened(
        at=running.clock.wall(),
        round=number,
        elapsed_s=running.elapsed,
        base_version=base.version,
        base_digest=base.digest,
        candidates=list(cohort.candidates),
        asks={device: ask_id_of(running.run_id, number, device) for device in cohort.asked},
        codec=most_common(chosen, codecs),
        deadline_s=deadline.seconds,
        target=max(cohort.target, floor),
        floor=floor,
        reasons=dict(cohort.reasons),
        references_from=_references_from(running, number),
        deadline_reason=deadline.reason,
        codecs={device: choice.standing.codec for device, choice in chosen.items()},
        codec_reasons={device: choice.reason for device, choice in chosen.items()},
        later=list(cohort.later),
        drawn=cohort.drawn,
        standings={device: (choice.standing.milder, choice.standing.rounds) for device, choice in chosen.items()},
    )
    sent = [
        ClientAsked(opened.at, number, device, ask_id, sizes[device], **own_work(running, device, opened.deadline_s))
        for device, ask_id in opened.asks.items()
    ]
    said = f"round {number}, step {past.steps_made + len(past.line.rounds) + 1} of {plan.run.rounds}"
    noted = [RunNoted(opened.at, text) for text in notes(plan, cohort.able)] if number == 1 else []
    running.record(*noted, RunStatusChanged(opened.at, "running", said), opened, *sent)
    return opened


def _cohort(running: Running, number: int) -> Cohort:
    past, plan, present, unable = running.past, running.plan, running.presence.devices, running.unable()
    if past.delay:
        busy = {device: min(asks.values()) for device, asks in running.still_due().items() if len(asks) > past.delay}
    else:
        busy = {device: asked for device, (_, asked) in past.owed.busy.items()}
    if plan.cohort.mode == "sync":
        holding = sum(running.elapsed < work.until_s for work in at_work_before(past, number).values())
        odds = partial(odds_of, running, number)
        return choose(plan, number, present, unable, busy, odds, holding if plan.cohort.max_concurrency else 0)
    at_work = sum(running.elapsed < past.owed.due[device] for device in past.owed.busy)
    return choose_for_buffer(plan, number, present, unable, busy, at_work)


def _timed(running: Running, cohort: Cohort, floor: int) -> tuple[Sequence[str], int]:
    """(devices whose times the deadline follows from, how many of their answers are wanted).

    In a buffer it is each ask's own deadline, and whoever is idle is asked later: all who can take part count.
    """
    if running.plan.cohort.mode == "sync":
        return [*cohort.asked, *cohort.later], max(cohort.target, floor)
    unable = running.unable()
    able = [device for device in running.presence.devices if device not in unable]
    return able, len(able)


def _may_fill(running: Running) -> bool:
    """Whether answers can come to a buffer that asks nobody when it opens."""
    if running.plan.cohort.mode == "sync":
        return False
    past = running.past
    return bool(running.deferred) or any(running.elapsed < past.owed.due[device] for device in past.owed.busy)


def _references_from(running: Running, number: int) -> int:
    """What a device has sent stays in ef21's, SCAFFOLD's or FedDyn's sum until all begin anew: so they do when one was
    shut out.
    """
    counted = running.plan.remembered and running.revoked() & running.past.weights.keys()
    return number if counted else running.past.references_from


def machine_of(opened: RoundOpened, running: Running) -> Round | Buffer:
    """The state machine of a round that was opened, now or before a restart."""
    if running.plan.cohort.mode == "buffered":
        return Buffer(buffer_terms_of(opened, running))
    past, terms = running.past, terms_of(opened, running.plan)
    since_s, earlier = max(terms.opened_s, past.line.head_since_s), at_work_before(past, opened.round)
    return Round(replace(terms, opened_s=since_s, earlier=earlier, slowest_s=partial(slowest_s, past)))


def buffer_terms_of(opened: RoundOpened, running: Running) -> Terms:
    """What the state machine needs of a buffer. An answer that came while the buffer before was open is in time."""
    past = running.past
    earlier = {
        device: AtWork(ask_id, math.inf if ask_id in running.deferred else past.owed.due[device])
        for device, (ask_id, asked) in past.owed.busy.items()
        if asked != opened.round
    }
    return replace(terms_of(opened, running.plan), earlier=earlier, further=partial(_further, running, opened.round))


def _further(running: Running, number: int, device: str) -> str:
    """The id of an ask whose answer is for the buffer after this one, where there is one."""
    past = running.past
    if past.steps_made + 1 >= running.plan.run.rounds or device in past.owed.busy or not running.able(device):
        return ""
    return ask_id_of(running.run_id, number, device, further=True)


def terms_of(opened: RoundOpened, plan: RunPlan) -> Terms:
    """What the state machine needs of a round."""
    return Terms(
        number=opened.round,
        base_version=opened.base_version,
        asks=opened.asks,
        target=opened.target,
        floor=opened.floor,
        opened_s=opened.elapsed_s,
        deadline_s=opened.deadline_s,
        late=plan.cohort.late,
        max_staleness=plan.cohort.max_staleness,
        staleness_exponent=plan.cohort.staleness_exponent,
        max_concurrency=plan.cohort.max_concurrency,
    )


# For how long and in which codecs devices are asked: what is known of them, put before the decisions.


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
    return {device: codec_ladder.choose(codecs, own, fits_s, standings.get(device)) for device, own in times.items()}


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


# What is asked of one device, put into the fact that it is asked.


def own_work(running: Running, device: str, deadline_s: float) -> dict[str, Any]:
    """The fields of `ClientAsked` for a device whose work follows its speed; none where the plan says how much."""
    local = running.plan.local
    if local.steps != "auto":
        return {}
    pace = running.past.paces.of(device)
    before = None if pace else _measured_before(running, device)
    work = given(local, pace or before, deadline_s)
    why = f"{work.why}, by what earlier runs measured of it" if before else work.why
    return {"steps": work.steps, "batch": work.batch, "work_reason": why}


def _measured_before(running: Running, device: str) -> Pace | None:
    """Of a device that has not answered in this run; None where a part of it was never seen at this model and batch."""
    plan, local = running.plan, running.plan.local
    known = running.known.device(device, work_of(plan, running.layout))
    up = update_bytes(running.codec, running.layout, running.past.codecs.came)
    rest = known.seconds(errand(plan, 1, running.sending.parcel(device).size, up))  # without a step, but it measures
    if known.step is None or known.epoch_steps is None or rest is None:
        return None
    examples = round(known.epoch_steps.p50 * local.batch * local.accumulate)
    return Pace(known.step.p90 / local.batch, rest.p90, examples)
