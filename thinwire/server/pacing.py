"""What is asked of one device, put into the fact that it is asked."""

from __future__ import annotations

from typing import Any

from thinwire.server.pace import given
from thinwire.server.running import Running


def own_work(running: Running, device: str, deadline_s: float) -> dict[str, Any]:
    """The fields of `ClientAsked` for a device whose work follows its speed; none where the plan says how much."""
    local = running.plan.local
    if local.steps != "auto":
        return {}
    work = given(local, running.past.paces.of(device), deadline_s)
    return {"steps": work.steps, "batch": work.batch, "work_reason": work.why}
