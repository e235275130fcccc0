"""What one answer says of its device: durations, each of one clock."""

from __future__ import annotations

import math

from thinwire.core.sections import LocalSection
from thinwire.core.types import ReplyHead
from thinwire.server.links import Sample

SLACK_S, SLACK = 1e-3, 1e-3  # by how much two stopwatches may differ over the same time

Durations = dict[str, Sample]


def at_own_pace(found: Durations, head: ReplyHead, local: LocalSection, asked: tuple[int, int] | None) -> Durations:
    """Of an answer with steps and a batch of its own (`asked`; None: not known any more): what it says of a step of the
    plan's batch, and of a pass over the device's data, which is told by its examples where nothing ended training.
    """
    if asked is None or asked[1] != local.batch:
        found = {kind: sample for kind, sample in found.items() if kind != "step"}
    if found and head.planned in (0, head.steps) and head.examples:
        found["pass"] = (1, math.ceil(head.examples / (local.batch * local.accumulate)))
    return found


def durations(head: ReplyHead, sent_bytes: int, epochs: float) -> Durations:
    """(how much, seconds) by kind: `down`, `up`, `step`, `evaluate`, `encode`; and `pass`, the steps of one epoch.

    The aggregator's stopwatch runs from handing the ask out to having the answer, the device's over its own work; `up`
    is what the first shows beyond the second: the upload, and all latency. So the parts add up to what was waited for.
    A device that claims to have worked for longer than its ask was out is not believed, and nothing is learned from
    an answer that this process did not hand out the ask of.
    """
    transfer, own = head.transfer, head.timings
    if transfer is None or not transfer.pulled_at or not head.parts:
        return {}
    out_s = transfer.arrived_at - transfer.pulled_at
    own_s = own.download_s + own.queue_s + own.evaluate_s + own.train_s + own.encode_s
    if own_s > out_s * (1 + SLACK) + SLACK_S:
        return {}
    found: Durations = {"up": (head.payload_bytes, max(0.0, out_s - own_s)), "encode": (1, own.encode_s)}
    if sent_bytes > 0:
        found["down"] = (sent_bytes, own.download_s)
    if head.steps > 0:
        found["step"] = (head.steps, own.train_s)
        if epochs:
            found["pass"] = (epochs, head.steps)
    if any(name.startswith("eval/") for name in head.metrics):
        found["evaluate"] = (1, own.evaluate_s)
    return found
