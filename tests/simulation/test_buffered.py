"""Buffered runs of real training: as good as rounds at as many updates, and sooner where devices are unequal."""

from __future__ import annotations

from pathlib import Path

from tests.support.small_task import plan_of, task_of
from thinwire.client import ClientInfo
from thinwire.client.task import initial_model, report
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import RoundClosed, UpdateAccepted
from thinwire.core.statedir import AggregatorHome
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedDevice, ScriptedFleet, Training, simulate
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.simulation.storage import InMemorySpool
from thinwire.store import Store

SPEEDS = (1.0, 1.3, 1.7, 2.2, 2.9, 12.0)  # seconds for an assignment
STEPS = 3


def plan(rounds: int, **cohort: object) -> RunPlan:
    raw = plan_of(f"steps = {STEPS}", codec="topk(0.5) > int8", feedback="classic", run=f"rounds = {rounds}").to_json()
    return RunPlan.from_json({**raw, "cohort": {"wait_for": len(SPEEDS), "deadline_s": 60, **cohort}})


def scripted(folder: Path, plan: RunPlan) -> tuple[float, float, dict[str, int]]:
    """(loss, seconds on the virtual clock, updates of each device) of a run of unequal devices."""
    task, home, clock = task_of(), AggregatorHome.under(folder, durable=False), VirtualClock()
    (folder / "clients").mkdir(parents=True)
    population = ClientPopulation(folder / "clients", ClientInfo(), len(SPEEDS))
    training = Training(task, population)

    def device(index: int, seconds: float) -> ScriptedDevice:
        return ScriptedDevice(population.name(index), training.client(index, lambda assignment: seconds / STEPS))

    devices = [device(index, seconds) for index, seconds in enumerate(SPEEDS)]
    fleet = ScriptedFleet(InMemorySpool(folder / "spool"), clock, report(task), devices)
    with Store.open(home.database, durable=False) as store:
        made = initial_model(task, plan.run.seed)
        run_id = submit(
            store,
            home,
            plan,
            FirstModel(made.layout, report(task), made.vector, made.buffers, made.counters),
            source="sim",
        )
        row = drive(run_id, store=store, fleet=fleet, home=home, clock=clock)
        assert row.status == "done", row.status_text
        events = [event for _, event in store.events(run_id)]
    counted = [event.device for event in events if isinstance(event, UpdateAccepted)]
    ended = max(event.elapsed_s for event in events if isinstance(event, RoundClosed))
    return row.metrics["loss"], ended, {name: counted.count(name) for name in counted}


def test_unequal_devices_get_as_far_with_as_many_updates_in_a_fraction_of_the_time(tmp_path: Path) -> None:
    sync_loss, sync_s, _ = scripted(tmp_path / "sync", plan(10))
    loss, took_s, updates = scripted(
        tmp_path / "buffered", plan(20, mode="buffered", buffer=3, max_staleness=50, staleness_exponent=0.5)
    )
    assert sum(updates.values()) == 10 * len(SPEEDS) == 20 * 3
    assert loss < sync_loss + 0.02
    assert took_s < sync_s / 5
    assert set(updates) == {f"sim-{index}" for index in range(len(SPEEDS))}, "the slow one counts too"


def test_a_simulation_of_a_buffered_plan_is_the_same_each_time() -> None:
    small = plan(6, mode="buffered", buffer=2, max_concurrency=4, wait_for=1)
    first, again = (simulate(task_of(), small, clients=5) for _ in range(2))
    assert first.run.model_digest == again.run.model_digest
    assert [row.reason for row in first.rounds] == ["buffer"] * 6
    assert first.run.status == "done"
    losses = [loss for loss in first.series("loss") if loss is not None]
    assert first.metrics["loss"] < losses[0]
