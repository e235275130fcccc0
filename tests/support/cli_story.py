"""A run as the store of an aggregator's home has it, without devices, network or torch: for what the CLI reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from thinwire.core import Layout, RunPlan
from thinwire.core.events import (
    Evaluated,
    Event,
    RoundClosed,
    RoundOpened,
    RunStatus,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Tensor
from thinwire.core.serialization import reply_to_json
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Part, ReplyHeader, UpdateId
from thinwire.server.model_store import Versions
from thinwire.server.submit import FirstModel, submit
from thinwire.store import Store

KEY = hashlib.sha256(b"key").hexdigest()  # a device's fingerprint
PLAN = '[run]\ntask = "toy"\nrounds = 2\n[local]\nlr = 0.5'
LAYOUT = Layout.build(
    [
        Tensor("first.weight", (3, 2)),
        Tensor("first.bias", (3,)),
        Tensor("norm.running_mean", (3,), role="buffer"),
        Tensor("norm.num_batches_tracked", (), "int64", "buffer"),
    ],
    [("second.weight", "first.weight")],
)
PARAMS = np.arange(9, dtype=np.float32)
BUFFERS = np.array([1, 2, 3], np.float32)
T = 1_700_000_000.0


def told(
    home: Path,
    status: RunStatus = "done",
    exit_code: int = 0,
    plan: str = PLAN,
    source: Literal["devices", "sim"] = "devices",
    steps: bool = True,
) -> str:
    """A run of two rounds; round r made version r with the parameters PARAMS + r. Gives its id.

    Without `steps` nobody answered, and version 0 is all there is.
    """
    place = AggregatorHome.under(home)
    with Store.open(place.database) as store:
        report = TaskReport("toy", layout_digest=LAYOUT.digest)
        counters = {"norm.num_batches_tracked": 0}
        run_id = submit(
            store, place, RunPlan.parse(plan), FirstModel(LAYOUT, report, PARAMS, BUFFERS, counters), source
        )
        versions = Versions(place.run(run_id), LAYOUT)
        for number in () if steps else (1, 2):
            closed = RoundClosed(T + number, number, "too-few", 0, [], [], ["pi-01"], 2.0, 1.5, {})
            store.record(run_id, [*round_events(run_id, number)[:2], closed])
        for number in (1, 2) if steps else ():
            made = versions.write(
                number, PARAMS + number, BUFFERS, {"norm.num_batches_tracked": 7 * number}, T + number
            )
            store.record(run_id, [*round_events(run_id, number), made, evaluated(number)])
        store.record(run_id, [RunStatusChanged(T + 9, status, "2 rounds", exit_code)])
    return run_id


def round_events(run_id: str, number: int) -> list[Event]:
    """Two devices were selected, one answered, one was still out when the round closed."""
    update = UpdateId(run_id, "pi-01", number)
    header = ReplyHeader(
        f"{run_id}.{number}.pi-01", update, number - 1, 10, 5, 5.0, 1.0, parts=(Part("frame/0", 42, "00"),)
    )
    assignments = {name: f"{run_id}.{number}.{name}" for name in ("pi-01", "pi-02")}
    return [
        RunStatusChanged(T, "running", f"round {number} of 2"),
        RoundOpened(at=T + number, round=number, elapsed_s=0.0, base_version=number - 1, base_digest="",
                    added=list(assignments), assignments=assignments, codec="int8", deadline_s=60.0,
                    target_updates=2, min_updates=1),
        UpdateAccepted(T + number, number, number, "pi-01", header.assignment_id, str(update), 0, 1.0, False, 1.0,
                       reply_to_json(header)),
        UpdateAggregated(T + number, number, str(update), 0.001),
        RoundClosed(T + number, number, "deadline", number, [str(update)], [], ["pi-02"], 2.0, 1.5, {}),
    ]  # fmt: skip


def evaluated(number: int) -> Evaluated:
    metrics = {"accuracy": 0.5 + number / 10, "loss": 1.0 / number}
    return Evaluated(T + number, number, number, metrics, {"accuracy": [0.4, 0.9]}, 20, 1, best=True)
