"""SCAFFOLD and FedDyn after a device was revoked: nothing of it moves the others, and both ends agree again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.simulation.test_drift import CURVES, PLACES, SIZES, Point, data, loss, plan_of
from tests.support.crashes import Fate, Killed, Outcome, deadly, each_death
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.small_task import task_of
from tests.support.store_agreement import empty_database
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.client.task import initial_model, report
from thinwire.client.train.protocol import ClientInfo
from thinwire.core import VirtualClock
from thinwire.core.events import ModelStored, RoundClosed, RoundOpened, UpdateDropped
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, Vector
from thinwire.server.context import RunCommands
from thinwire.server.model_store import Versions
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedFleet, Training
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.store import FileSpool, Store

EVERY = 29  # of all places at which the aggregator can die after the revoking
BEFORE, STEPS, LR = 2, 5, 0.1
Slow = Mapping[tuple[int, int], float]  # (device, round) -> seconds a step, of the 12 that a round has time for
PROMPT: Slow = {}
LATE: Slow = {(1, BEFORE): 19.5, (0, BEFORE + 1): 11.0}  # the second device's answer comes in the round after its own
TOO_FEW: Slow = {(0, BEFORE + 1): 15.0, (1, BEFORE + 1): 15.0}
BOTH = pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])


@dataclass(frozen=True)
class Lived:
    outcome: Outcome
    models: list[Vector]  # of each version, the first model first
    common: Vector  # of the last version
    kept: list[Vector | None]  # by each of the devices that are left


def lived(folder: Path, algorithm: str, rounds: int, slow: Slow = PROMPT, fate: Fate | None = None) -> Lived:
    """A run of which the third device is revoked after `BEFORE` rounds, in all of which it counted. One death at most,
    afterwards.
    """
    (folder / "clients").mkdir(parents=True)
    task, home, clock = task_of(Point, data=data, loss=loss), AggregatorHome.under(folder), VirtualClock()
    home.database.write_bytes(empty_database())
    cohort = {"deadline_s": 60, "min_updates": 1, "wait_for": 2}
    plan = plan_of(algorithm, rounds, cohort=cohort, local={"steps": STEPS, "lr": LR}, run={"keep": "all"})
    training = Training(task, ClientPopulation(folder / "clients", ClientInfo(), 3))

    def step_s(index: int, assignment: Assignment) -> float:
        return slow.get((index, assignment.round), 0.5 + index)

    works = [training.client(i, lambda assignment, i=i: step_s(i, assignment)) for i in range(3)]  # type: ignore[misc]  # bound now
    devices = [AttentiveDevice(f"sim-{i}", work) for i, work in enumerate(works)]
    fleet, made = ScriptedFleet(FileSpool(home.spool), clock, report(task), devices), initial_model(task, 0)
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(Store.open(home.database, durable=False))
        for device in devices:
            store.roster.enrol(device.name, device.name * 16, device.name.encode(), "loopback")
        run_id = submit(
            store, home, plan, FirstModel(made.layout, report(task), made.vector, made.buffers, made.counters)
        )

        def on(stop_at: int = 0) -> None:
            def stop() -> str | None:
                closed = [e for _, e in store.events(run_id) if isinstance(e, ModelStored) and e.version]
                return "service" if len(closed) == stop_at else None

            commands = RunCommands(stop) if stop_at else RunCommands()  # type: ignore[arg-type]  # a command
            drive(run_id, store=store, fleet=fleet, home=home, clock=clock, commands=commands)

        on(BEFORE)
        store.roster.revoke("sim-2")
        fleet.crash("sim-2")
        fleet.poll(0.0)
        fleet = fleet.restart(FileSpool(home.spool))
        with deadly(fate or Fate(), store):
            try:
                on()
            except Killed:
                store = opened.enter_context(Store.open(home.database, durable=False))
                fleet = fleet.restart(FileSpool(home.spool))
                on()
        outcome = Outcome(store, run_id, fleet)
    assert outcome.status == "done"
    assert [len(e.assignments) for e in outcome.of(RoundOpened)][:BEFORE] == [3] * BEFORE
    versions = Versions(home.run(run_id), transmitted_layout(algorithm_of(plan), made.layout))
    read = [versions.read(stored)[0] for stored in outcome.of(ModelStored)]
    last = home.run(run_id) / f"v{len(read) - 1:06d}.state"
    common = load_file(last)["common"] if last.exists() else read[-1][made.layout.size :]
    kept = [work.handler.runs[run_id][1].own for work in works[:2]]
    return Lived(outcome, [params[: made.layout.size] for params in read], common, kept)


def plain_step(model: Vector, devices: tuple[int, ...]) -> Vector:
    """What these devices make of a model by their own gradients alone."""
    curves, places = np.array(CURVES), np.array(PLACES)
    changes = ((1 - LR * curves) ** STEPS - 1) * (model - places)
    found: Vector = model + np.average(changes[list(devices)], axis=0, weights=[SIZES[i] for i in devices])
    return found


def mean_of(kept: list[Vector | None]) -> Vector:
    assert all(own is not None for own in kept)
    found: Vector = np.average(np.array(kept), axis=0, weights=SIZES[: len(kept)])
    return found


def test_the_first_step_after_it_is_by_the_devices_own_gradients_alone(tmp_path: Path) -> None:
    """The mean that goes with that round's model has the third device in it, and none of the others' own beside it."""
    made = lived(tmp_path, "scaffold", BEFORE + 1)
    assert not np.allclose(made.models[BEFORE], plain_step(made.models[BEFORE - 1], (0, 1, 2)), atol=1e-2)
    np.testing.assert_allclose(made.models[BEFORE + 1], plain_step(made.models[BEFORE], (0, 1)), rtol=1e-4, atol=1e-5)


def test_a_device_that_answers_late_from_before_it_begins_like_the_others(tmp_path: Path) -> None:
    made = lived(tmp_path, "scaffold", BEFORE + 2, LATE)
    assert [e.reason for e in made.outcome.of(UpdateDropped)] == ["stale"]
    assert [sorted(e.assignments) for e in made.outcome.of(RoundOpened)][BEFORE:] == [["sim-0"], ["sim-0", "sim-1"]]
    alone, both = made.models[BEFORE + 1 :]
    np.testing.assert_allclose(alone, plain_step(made.models[BEFORE], (0,)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(both, plain_step(alone, (0, 1)), rtol=1e-4, atol=1e-5)


def test_a_round_without_a_step_after_it_changes_nothing_of_that(tmp_path: Path) -> None:
    made = lived(tmp_path, "scaffold", BEFORE + 1, TOO_FEW)
    assert [e.reason for e in made.outcome.of(RoundClosed)] == ["all", "all", "too-few", "all"]
    np.testing.assert_allclose(made.models[BEFORE + 1], plain_step(made.models[BEFORE], (0, 1)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made.common, mean_of(made.kept), rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("slow", [PROMPT, LATE])
def test_the_mean_is_of_what_the_devices_that_are_left_keep(tmp_path: Path, algorithm: str, slow: Slow) -> None:
    made = lived(tmp_path, algorithm, BEFORE + 3, slow)
    assert [e.references_from for e in made.outcome.of(RoundOpened)] == [0] * BEFORE + [BEFORE + 1] * 3
    np.testing.assert_allclose(made.common, mean_of(made.kept), rtol=1e-5, atol=1e-6)


@BOTH
def test_the_optimum_of_the_devices_that_are_left_is_reached(tmp_path: Path, algorithm: str) -> None:
    made = lived(tmp_path, algorithm, 30)
    weighed = np.array(SIZES[:2])[:, None] * np.array(CURVES[:2])
    optimum = (weighed * np.array(PLACES[:2])).sum(0) / weighed.sum(0)
    np.testing.assert_allclose(made.models[-1], optimum, atol=0.02)


@BOTH
def test_a_kill_around_it_changes_no_bit_on_either_end(tmp_path: Path, algorithm: str) -> None:
    fate = Fate()
    made = lived(tmp_path / "whole", algorithm, BEFORE + 3, LATE, fate)

    def live(folder: Path, fate: Fate) -> Lived:
        return lived(folder, algorithm, BEFORE + 3, LATE, fate)

    def check(again: Lived, where: str) -> None:
        assert again.outcome.same() == made.outcome.same(), where
        assert np.array(again.kept).tobytes() == np.array(made.kept).tobytes()

    each_death(tmp_path, range(1, len(fate.places) + 1, EVERY), live, check)
