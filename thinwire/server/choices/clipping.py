"""The share of a clip that is each device's own in a round (Lin et al. 2018, "Deep gradient compression")."""

from __future__ import annotations

import math

from thinwire.core.plan import RunPlan
from thinwire.core.types import Work


def work_of(plan: RunPlan, devices: int, own: tuple[int, int] | None = None) -> Work:
    """How much a device is asked to do in a round of so many; `own` are its steps and batch, where it has its own.

    dgc clips where a gradient is accumulated, on each device by itself: N gradients, each of an L2 norm of at most
    N^(-1/2) times the threshold, add up to one of about that norm, since independent ones grow as the root of N.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nclip_grad=2\\nsteps=1\\n[uplink]\\ncodec="dgc(0.1)"')
    >>> work_of(plan, 16)
    Work(steps=1, batch=32, clip=0.5)
    """
    local = plan.local
    clip = local.clip_grad / math.sqrt(devices) if plan.uplink.dgc and local.clip_grad and devices else 0.0
    steps, batch = own or (local.steps if isinstance(local.steps, int) else 0, local.batch)
    return Work(steps, batch, clip)
