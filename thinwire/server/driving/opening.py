"""A round's terms: who is asked for what until when, recorded before any ask leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from thinwire.core.ask_ids import ask_id_of
from thinwire.core.events import ClientAsked, RoundOpened, RunNoted, RunStatusChanged
from thinwire.core.plan import RunPlan
from thinwire.server.buffered import Buffer
from thinwire.server.choices.forewarned import notes
from thinwire.server.choices.selection import floor_of
from thinwire.server.cohort import Cohort, choose, choose_for_buffer
from thinwire.server.driving.asking import codecs_of, deadline_of, expected, most_common, odds_of, rungs_of
from thinwire.server.driving.pacing import own_work
from thinwire.server.driving.running import Running
from thinwire.server.moves import AtWork, Terms
from thinwire.server.places import at_work_before, slowest_s
from thinwire.server.round import Round


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
