"""Measure what the mailbox and Flower's LinkState cost the aggregator for each assignment and its reply.

    python -m benchmarks.mailbox [--preset small|full] --json

All devices are online, and all their assignments are in flight at once. `mailbox_us` is the CPU time of a client-round:
the assignment is sent, found by the device's pull, delivered, reported as held by the next pull, replied to, polled and
acknowledged. Requests, signatures, files and the journal are in `benchmarks.device_api` and
`benchmarks.round_overhead`.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from thinwire.core.fleet import Envelope
from thinwire.core.link_state import LinkState
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import Assignment, Part, ReplyHeader, UpdateId
from thinwire.flower.link_state import SuperLink
from thinwire.transport.server.mailbox import Mailbox

RUN = "bench-1"
PART = Part("frame/0", 10_000, hashlib.sha256(b"an update").hexdigest())


@dataclass(frozen=True)
class Preset:
    devices: int
    rounds: int


PRESETS = {"tiny": Preset(20, 2), "small": Preset(1000, 5), "full": Preset(1000, 50)}


def one_round(mailbox: Mailbox, state: LinkState, devices: list[str], number: int) -> float:
    """Return the CPU seconds of one round with all devices."""
    assignments = [Assignment(f"{RUN}.{number}.{name}", RUN, "toy", "train", "", round=number) for name in devices]
    replies = [
        ReplyHeader(assignment.assignment_id, UpdateId(RUN, name, number), 0, 100, parts=(PART,))
        for name, assignment in zip(devices, assignments, strict=True)
    ]
    received = [reply_to_bytes(reply) for reply in replies]  # the bytes that the device sent
    began = time.process_time()
    mailbox.send([Envelope(name, assignment) for name, assignment in zip(devices, assignments, strict=True)])
    for name in devices:
        mailbox.record_in_flight(name, (), 1.0)
        if (found := mailbox.next_for(name, 1.0)) is not None:
            mailbox.mark_delivered(found, 1.0)
    mailbox.delivered()
    for name, assignment, reply, data in zip(devices, assignments, replies, received, strict=True):
        mailbox.record_in_flight(name, (assignment.assignment_id,), 2.0)
        mailbox.next_for(name, 2.0)
        mailbox.withdrawn(name)
        mailbox.receive(name, reply, data)
    for arrival in mailbox.poll(0.0):
        assert isinstance(arrival, ReplyHeader)
        mailbox.mark_acked(arrival.update_id)
    spent = time.process_time() - began
    assert not state.in_flight()
    return spent


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each round, and the median as figure."""
    del folder  # all of it is in memory
    state = SuperLink().state
    mailbox, devices = Mailbox(state), [f"pi-{number:04d}" for number in range(preset.devices)]
    for name in devices:
        state.register(name, name.encode())
        state.set_online(name)
    one_round(mailbox, state, devices, 0)  # a warm-up
    spent = [one_round(mailbox, state, devices, number) for number in range(1, preset.rounds + 1)]
    rows = [{"round": number, "us": 1e6 * each / preset.devices} for number, each in enumerate(spent, 1)]
    found = statistics.median(row["us"] for row in rows)
    note(f"{preset.devices} devices: {found:.0f} us a client-round in the mailbox")
    return [dict(row) for row in rows], {"mailbox_us": found}


if __name__ == "__main__":
    run_in_folder("mailbox", __doc__, PRESETS, measure)
