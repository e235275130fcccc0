"""SCAFFOLD and FedDyn with real handlers, killed here and there: both ends end with the same bits, and agree."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.simulation.test_drift import SIZES, Point, data, loss, plan_of
from tests.support.crashes import Fate, Killed, Outcome, deadly, each_death
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.small_task import task_of
from tests.support.store_agreement import empty_database
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.client.task import initial_model, report
from thinwire.client.train.protocol import ClientInfo
from thinwire.core import VirtualClock
from thinwire.core.events import ModelStored, UpdateDropped
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, Vector
from thinwire.server.model_store import Versions
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedFleet, Training
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.store import FileSpool, Store

EVERY = 31  # of all places at which the aggregator can die
BOTH = pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])


def lived(folder: Path, algorithm: str, fate: Fate) -> tuple[dict[str, Any], list[Vector], Vector]:
    """(what a run came to, what each device keeps, their mean as the aggregator has it); one death at most."""
    (folder / "clients").mkdir(parents=True)
    task, home, clock = task_of(Point, data=data, loss=loss), AggregatorHome.under(folder), VirtualClock()
    home.database.write_bytes(empty_database())
    plan = plan_of(
        algorithm, 5, cohort={"deadline_s": 30, "min_updates": 1, "wait_for": 3}, local={"steps": 3},
        uplink={"codec": "topk(0.67) > int8"}, downlink={"codec": "int8"}, run={"keep": "all"},
    )  # fmt: skip
    training = Training(task, ClientPopulation(folder / "clients", ClientInfo(), 3))

    def step_s(index: int, assignment: Assignment) -> float:
        return 11.0 if (index, assignment.round) == (2, 2) else 0.5 + index

    works = [training.client(i, lambda assignment, i=i: step_s(i, assignment)) for i in range(3)]  # type: ignore[misc]  # bound now
    devices = [AttentiveDevice(f"sim-{i}", work) for i, work in enumerate(works)]
    fleet, made = ScriptedFleet(FileSpool(home.spool), clock, report(task), devices), initial_model(task, 0)
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(Store.open(home.database, durable=False))
        run_id = submit(
            store, home, plan, FirstModel(made.layout, report(task), made.vector, made.buffers, made.counters)
        )
        with deadly(fate, store):
            try:
                drive(run_id, store=store, fleet=fleet, home=home, clock=clock)
            except Killed:
                store = opened.enter_context(Store.open(home.database, durable=False))
                fleet = fleet.restart(FileSpool(home.spool))
                drive(run_id, store=store, fleet=fleet, home=home, clock=clock)
        outcome = Outcome(store, run_id, fleet)
    dropped = [event.reason for event in outcome.of(UpdateDropped)]
    assert (outcome.status, dropped) == ("done", ["late"])
    last: ModelStored = outcome.of(ModelStored)[-1]
    behind = Versions(home.run(run_id), transmitted_layout(algorithm_of(plan), made.layout)).read(last)[0][
        made.layout.size :
    ]
    common = behind if last.state == "" else load_file(home.run(run_id) / f"v{last.version:06d}.state")["common"]
    kept = [work.handler.runs[run_id][1].own for work in works]
    return outcome.same(), [own for own in kept if own is not None], common


@BOTH
def test_the_aggregators_mean_is_the_mean_of_what_the_devices_keep_though_one_was_late(
    tmp_path: Path, algorithm: str
) -> None:
    _, kept, common = lived(tmp_path, algorithm, Fate())
    mean = sum(size * own.astype(np.float64) for size, own in zip(SIZES, kept, strict=True)) / sum(SIZES)
    np.testing.assert_allclose(common, mean, rtol=1e-5, atol=1e-6)
    assert np.abs(common).max() > 0.1


@BOTH
def test_a_kill_changes_no_bit_on_either_end(tmp_path: Path, algorithm: str) -> None:
    fate = Fate()
    made, kept, _ = lived(tmp_path / "whole", algorithm, fate)

    def live(folder: Path, fate: Fate) -> tuple[dict[str, Any], list[Vector], Vector]:
        return lived(folder, algorithm, fate)

    def check(again: tuple[dict[str, Any], list[Vector], Vector], where: str) -> None:
        assert again[0] == made, where
        assert [own.tobytes() for own in again[1]] == [own.tobytes() for own in kept]

    each_death(tmp_path, range(1, len(fate.places) + 1, EVERY), live, check)
