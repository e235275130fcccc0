"""A round's terms: who is asked for what until when, recorded before any ask leaves."""

from __future__ import annotations

from thinwire.aggregation.warmup import codec_of
from thinwire.core.events import ClientAsked, RoundOpened, RunStatusChanged
from thinwire.core.plan import RunPlan
from thinwire.server.cohort import choose
from thinwire.server.deadline import auto_deadline
from thinwire.server.moves import Terms
from thinwire.server.pacing import own_work
from thinwire.server.past import ask_id_of
from thinwire.server.round import floor_of
from thinwire.server.running import Running


def open_round(running: Running) -> RoundOpened | None:
    """Decide a round and record it; None when nobody can be asked now. Who has been silent too long is given up."""
    past, plan = running.past, running.plan
    number, base = past.rounds_opened + 1, past.base
    for device, (_, asked) in list(past.busy.items()):
        if number - asked > plan.cohort.max_staleness:
            running.lose(device, "stale", f"no answer for {number - asked} rounds")
    busy = {device: asked for device, (_, asked) in past.busy.items()}
    cohort = choose(plan, number, running.presence.devices, running.unable(), busy)
    if not cohort.asked:
        return None
    deadline = plan.cohort.deadline_s
    opened = RoundOpened(
        at=running.clock.wall(),
        round=number,
        elapsed_s=running.elapsed,
        base_version=base.version,
        base_digest=base.digest,
        candidates=list(cohort.candidates),
        asks={device: ask_id_of(running.run_id, number, device) for device in cohort.asked},
        codec=codec_of(plan.uplink, past.steps_made),
        deadline_s=auto_deadline(past.slowest) if deadline == "auto" else deadline,
        target=cohort.target,
        floor=floor_of(plan.cohort.min_replies, len(cohort.asked)),
        reasons=dict(cohort.reasons),
        references_from=_references_from(running, number),
    )
    sizes = {device: running.sending.parcel(device).size for device in opened.asks}
    sent = [
        ClientAsked(opened.at, number, device, ask_id, sizes[device], **own_work(running, device, opened.deadline_s))
        for device, ask_id in opened.asks.items()
    ]
    said = f"round {number}, step {past.steps_made + 1} of {plan.run.rounds}"
    running.record(RunStatusChanged(opened.at, "running", said), opened, *sent)
    return opened


def _references_from(running: Running, number: int) -> int:
    """With ef21 what a device has sent stays in the sum until all begin anew: so they do when one was shut out."""
    counted = running.plan.uplink.feedback == "ef21" and running.revoked() & running.past.weights.keys()
    return number if counted else running.past.references_from


def terms_of(opened: RoundOpened, plan: RunPlan) -> Terms:
    """What the state machine needs of a round that was opened, now or before a restart."""
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
    )
