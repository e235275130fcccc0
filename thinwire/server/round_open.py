"""The opening of a round decides which devices are selected, until when, in which codecs, and for how much work.

This module gathers what is known of devices and passes it to the pure decisions in `policy/`. It also builds the state
machine of the round.

Invariant: `RoundOpened` is recorded before any assignment is sent, with the reason of each decision. A resume reads
these decisions and does not take them again.
"""

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
from thinwire.server.buffered_round import BufferedRound
from thinwire.server.context import RunContext
from thinwire.server.policy import codec_ladder
from thinwire.server.policy.codec_ladder import RungChoice
from thinwire.server.policy.cohort import Cohort, SelectionWeights, choose, choose_for_buffer, floor_of, notes, odds
from thinwire.server.policy.deadlines import SHARE, Deadline, auto_deadline, fixed, in_groups
from thinwire.server.policy.device_profiles import errand, update_bytes, work_of
from thinwire.server.policy.local_work import DeviceSpeed, given
from thinwire.server.round import Round, at_work_before, slowest_s
from thinwire.server.round_events import RoundConfig, SlotLease


def open_round(running: RunContext) -> RoundOpened | None:
    """Decide a round, record it and return its opening event.

    Devices that have been silent for longer than the plan's staleness allows are given up first. Return None if no
    device can be selected now. Return None too if a synchronous round would select fewer devices than a step needs,
    because the others are busy.
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


def _cohort(running: RunContext, number: int) -> Cohort:
    """Return the selected devices, and the reasons why others are not selected."""
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


def _timed(running: RunContext, cohort: Cohort, floor: int) -> tuple[Sequence[str], int]:
    """Return the devices whose times decide the deadline, and how many of their replies are needed.

    In a buffered round each assignment has its own deadline, and any idle device may be selected later. Therefore all
    devices that can take part count.
    """
    if running.plan.cohort.mode == "sync":
        return [*cohort.asked, *cohort.later], max(cohort.target, floor)
    unable = running.unable()
    able = [device for device in running.presence.devices if device not in unable]
    return able, len(able)


def _may_fill(running: RunContext) -> bool:
    """Return True if a buffered round that selects no device at its opening can still receive replies."""
    if running.plan.cohort.mode == "sync":
        return False
    past = running.past
    return bool(running.deferred) or any(running.elapsed < past.owed.due[device] for device in past.owed.busy)


def _references_from(running: RunContext, number: int) -> int:
    """Return the round since which the sums of EF21, SCAFFOLD or FedDyn count.

    These sums contain all that a device has sent, and no part can be taken out. When a device is revoked, all devices
    therefore start again from zero.
    """
    counted = running.plan.remembered and running.revoked() & running.past.weights.keys()
    return number if counted else running.past.references_from


def machine_of(opened: RoundOpened, running: RunContext) -> Round | BufferedRound:
    """Build the state machine of a round, which may have opened before a restart."""
    if running.plan.cohort.mode == "buffered":
        return BufferedRound(buffer_terms_of(opened, running))
    past, terms = running.past, terms_of(opened, running.plan)
    since_s, earlier = max(terms.opened_s, past.line.head_since_s), at_work_before(past, opened.round)
    return Round(replace(terms, opened_s=since_s, earlier=earlier, slowest_s=partial(slowest_s, past)))


def buffer_terms_of(opened: RoundOpened, running: RunContext) -> RoundConfig:
    """Return the terms of a buffered round.

    A reply that arrived while the previous buffer was open is in time.
    """
    past = running.past
    earlier = {
        device: SlotLease(ask_id, math.inf if ask_id in running.deferred else past.owed.due[device])
        for device, (ask_id, asked) in past.owed.busy.items()
        if asked != opened.round
    }
    return replace(terms_of(opened, running.plan), earlier=earlier, further=partial(_further, running, opened.round))


def _further(running: RunContext, number: int, device: str) -> str:
    """Return the `ask_id` of a follow-up assignment for the next buffer; "" if the device cannot get one."""
    past = running.past
    if past.steps_made + 1 >= running.plan.run.rounds or device in past.owed.busy or not running.able(device):
        return ""
    return ask_id_of(running.run_id, number, device, further=True)


def terms_of(opened: RoundOpened, plan: RunPlan) -> RoundConfig:
    """Return the terms of a synchronous round."""
    return RoundConfig(
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


Expected = Mapping[str, Sequence[float | None]]  # device -> p90 in seconds for each codec; None: unknown


def codecs_of(running: RunContext) -> list[str]:
    """Return the codecs of the next round, least compressed first: only one if the plan has no ladder."""
    uplink, past = running.plan.uplink, running.past
    return rungs(uplink) if uplink.ladder else [codec_of(uplink, past.steps_made + len(past.line.rounds))]


def expected(running: RunContext, number: int, sizes: Mapping[str, int], codecs: Sequence[str]) -> Expected:
    """Return for each device the seconds within which nine of ten replies arrive, for each of the codecs.

    `sizes` maps each device to the bytes of the model that it is sent.
    """
    plan, work, came = running.plan, work_of(running.plan, running.layout), running.past.codecs.came
    ups = [update_bytes(codec, running.layout, came) for codec in codecs]
    found = dict[str, list[float | None]]()
    for device, down in sizes.items():
        known = running.known.device(device, work)
        times = [known.seconds(errand(plan, number, down, up)) for up in ups]
        found[device] = [time.p90 if time else None for time in times]
    return found


def odds_of(running: RunContext, number: int, candidates: Sequence[str]) -> SelectionWeights:
    """Return the selection weights of the candidates.

    The plan decides by what: the seconds of a local step, or of downloading the model and sending the smallest update.
    """
    plan, work, selection = running.plan, work_of(running.plan, running.layout), running.plan.cohort.selection
    if selection == "uniform":
        return SelectionWeights()
    known = {device: running.known.device(device, work) for device in candidates}
    if selection == "speed":
        return odds(selection, {d: one.step.p50 if one.step else None for d, one in known.items()}, "a step")
    up = update_bytes(codecs_of(running)[-1], running.layout, running.past.codecs.came)
    sent = {d: errand(plan, number, running.sending.parcel(d).size, up) for d in candidates}
    return odds(selection, {d: one.travels_s(sent[d]) for d, one in known.items()}, "an exchange")


def deadline_of(plan: RunPlan, times: Expected, wanted: int, floor: int) -> Deadline:
    """Return the plan's deadline, or the automatic one, with its reason.

    The automatic one follows from the devices' links and speed with the smallest codec. It is multiplied by the number
    of waves if `max_concurrency` splits the selected devices. `floor` is the number of updates that a step needs.
    """
    if plan.cohort.deadline_s != "auto":
        return fixed(plan.cohort.deadline_s)
    found = auto_deadline({device: own[-1] for device, own in times.items()}, wanted, floor)
    return in_groups(found, len(times), plan.cohort.max_concurrency) if plan.cohort.mode == "sync" else found


def rungs_of(running: RunContext, times: Expected, codecs: Sequence[str], fits_s: float) -> dict[str, RungChoice]:
    """Return each device's rung of the codec ladder, with the reason; empty if the plan has no ladder."""
    if len(codecs) == 1:
        return {}
    standings = running.past.codecs.standings
    return {device: codec_ladder.choose(codecs, own, fits_s, standings.get(device)) for device, own in times.items()}


def own_codec(running: RunContext, number: int, device: str, down_bytes: int, left_s: float) -> dict[str, Any]:
    """Return the codec fields of `ClientAsked` for a device that is selected during the round, with `left_s` seconds
    left.

    They are empty without a ladder. With an automatic deadline the codec makes the round not much longer than the
    smallest codec would.
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


def most_common(chosen: Mapping[str, RungChoice], codecs: Sequence[str]) -> str:
    """Return the codec of most devices, and the less compressed one of two; without a ladder the only codec."""
    asked = [choice.standing.codec for choice in chosen.values()]
    return max(codecs, key=asked.count)


def own_work(running: RunContext, device: str, deadline_s: float) -> dict[str, Any]:
    """Return the work fields of `ClientAsked` for a device; empty if the plan sets the work instead of the
    device's speed.
    """
    local = running.plan.local
    if local.steps != "auto":
        return {}
    pace = running.past.paces.of(device)
    before = None if pace else _measured_before(running, device)
    work = given(local, pace or before, deadline_s)
    why = f"{work.why}, by what earlier runs measured of it" if before else work.why
    return {"steps": work.steps, "batch": work.batch, "work_reason": why}


def _measured_before(running: RunContext, device: str) -> DeviceSpeed | None:
    """Estimate a device's speed from earlier runs, for use until it has replied in this run.

    Return None if any part of it was never measured with this model and batch size.
    """
    plan, local = running.plan, running.plan.local
    known = running.known.device(device, work_of(plan, running.layout))
    up = update_bytes(running.codec, running.layout, running.past.codecs.came)
    rest = known.seconds(errand(plan, 1, running.sending.parcel(device).size, up))  # no local step, but an evaluation
    if known.step is None or known.epoch_steps is None or rest is None:
        return None
    examples = round(known.epoch_steps.p50 * local.batch * local.accumulate)
    return DeviceSpeed(known.step.p90 / local.batch, rest.p90, examples)
