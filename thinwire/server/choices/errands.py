"""What an ask of a run takes its devices: bytes both ways, steps, and the seconds that they are expected to need."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from thinwire.aggregation.described import bits
from thinwire.aggregation.rungs import rungs
from thinwire.core.check import DeviceTimes
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.server.choices.known import Errand, Known, epochs_of, work_of

FLOAT_BYTES = 4


def update_bytes(codec: str, layout: Layout, came: Mapping[str, list[int]]) -> int:
    """Of one update in this codec: what is usual among those that came, else as many bits as normal values take.

    `came`: codec -> bytes of updates.
    """
    if seen := came.get(codec):
        return int(statistics.median(seen))
    return int(bits(codec) * layout.size / 8)


def errand(plan: RunPlan, round_number: int, down_bytes: int, up_bytes: int) -> Errand:
    """What a training ask of this round takes a device."""
    evaluates = plan.run.evaluate == "clients" and (round_number - 1) % plan.run.evaluate_every == 0
    steps = plan.local.steps if isinstance(plan.local.steps, int) else 0
    return Errand(down_bytes, up_bytes, steps, epochs_of(plan), evaluates)


def best_times(known: Known, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """The best that each device has been seen to do, of what a round of this plan takes at least; unknown ones not."""
    down = 0 if plan.downlink.compressed else layout.size * FLOAT_BYTES
    taken = errand(plan, 0, down, min(update_bytes(codec, layout, {}) for codec in rungs(plan.uplink)))
    found = {device: known.best(device, work_of(plan, layout), taken) for device in known.devices}
    return {device: times for device, times in found.items() if times is not None}
