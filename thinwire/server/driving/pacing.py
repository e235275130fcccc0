"""What is asked of one device, put into the fact that it is asked."""

from __future__ import annotations

from typing import Any

from thinwire.server.choices.errands import errand, update_bytes
from thinwire.server.choices.known import work_of
from thinwire.server.choices.pace import Pace, given
from thinwire.server.driving.running import Running


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
