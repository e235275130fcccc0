"""A plan in one process: clients count as side by side, a task's errors are a client's failures, or raised to debug."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.fork_server import run_forked
from tests.support.processes import environment
from tests.support.small_task import cross_entropy, local_of, normed, plan_of, task_of
from thinwire.client import ClientInfo, own_part
from thinwire.client.train import module as tensors
from thinwire.client.train.layout import Key, derive
from thinwire.client.train.module import build
from thinwire.client.train.protocol import Work
from thinwire.client.train.trainer import TorchTrainer
from thinwire.core import RunPlan
from thinwire.core.errors import TaskError, TooFewClients, UsageError
from thinwire.core.events import ModelStored
from thinwire.core.layout import Layout
from thinwire.core.statedir import AggregatorHome
from thinwire.server.model_store import Versions
from thinwire.simulation import History, run_sim, simulate
from thinwire.store import RoundRow, RunRow, Store

ROUNDS = "rounds = 1"


def run(folder: Path, task: Any, plan: RunPlan, clients: int = 2, **options: Any) -> tuple[RunRow, list[RoundRow]]:
    home = AggregatorHome.under(folder)
    with Store.open(home.database) as store:
        run_id = run_sim(plan, task, store=store, home=home, clients=clients, client=ClientInfo(), **options)
        return store.run(run_id), store.rounds(run_id)


def test_one_round_of_one_client_is_plain_torch(tmp_path: Path) -> None:
    task, plan = task_of(), plan_of("steps = 7", run=ROUNDS)
    row, _ = run(tmp_path, task, plan, clients=1)
    places, home = tensors.layout_of(build(task)), AggregatorHome.under(tmp_path)
    with Store.open(home.database) as store:
        made = [event for _, event in store.events(row.run_id) if isinstance(event, ModelStored)][-1]
    ours, _ = Versions(home.run(row.run_id), Layout.from_json(places.to_json())).read(made)
    module = build(task, derive(Key(plan.run.seed), "init"))
    split = task.module.data(ClientInfo())
    key = derive(Key(plan.run.seed), "train", "sim-0", 1)
    TorchTrainer(task, local_of(plan)).train(module, split.train, Work(7, 8), key)
    np.testing.assert_allclose(ours, tensors.read(module, places), rtol=1e-5, atol=1e-6)
    assert made.version == 1


def test_data_that_do_not_divide_among_so_many_clients_fail_before_the_run_begins(tmp_path: Path) -> None:
    task = task_of(data=lambda client: own_part(list(range(10)), client))
    plan = plan_of("steps = 7", run=ROUNDS)
    with pytest.raises(TaskError, match="10 examples are too few for 6 clients") as raised:
        run(tmp_path, task, plan, clients=6)
    assert (raised.value.why, raised.value.hint) == ("each needs at least 2", "--clients 5")
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert store.runs() == []


def test_a_key_that_the_task_does_not_give_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    task = task_of(data=lambda client: own_part(list(range(10)), client))
    with pytest.raises(UsageError, match="no key 'writer' to cut by"):
        simulate(task, plan_of("steps = 7", run=ROUNDS), clients=2, split="by(writer)")


@pytest.mark.parametrize("codec", ["topk(0.2) > int8 > rice", "sign", "qsgd(4)"])
def test_a_compressed_downlink_gives_the_same_bits_each_time_and_sends_less(codec: str) -> None:
    def made(down: str) -> History:
        plan = plan_of(codec="topk(0.5)", feedback="classic", run="rounds = 4").to_json()
        plan["downlink"]["codec"], plan["cohort"]["clients"] = down, 2
        return simulate(task_of(normed), RunPlan.from_json(plan), clients=3)

    first, again, dense = made(codec), made(codec), made("identity")
    assert first.run.model_digest == again.run.model_digest != dense.run.model_digest
    assert [row.payload_down for row in first.rounds] == [row.payload_down for row in again.rounds]
    assert sum(row.payload_down for row in first.rounds) < sum(row.payload_down for row in dense.rounds)
    assert {row.reason for row in first.rounds} == {"all"}


def test_a_simulated_run_is_marked_as_one_and_has_no_wire(tmp_path: Path) -> None:
    row, rounds = run(tmp_path, task_of(), plan_of(run=ROUNDS))
    assert (row.source, row.status, row.wire_up) == ("sim", "done", None)
    assert [one.reason for one in rounds] == ["all"]
    assert row.payload_up > 0
    assert set(row.metrics) == {"loss", "accuracy"}


def took(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """Let the answers of the first assignments take so long by the simulation's stopwatch, whatever this machine
    does.
    """
    stopwatch = iter(reading for spent in seconds for reading in (0.0, spent))
    watch = SimpleNamespace(perf_counter=lambda: next(stopwatch, 0.0))
    monkeypatch.setattr("thinwire.simulation.client_pool.time", watch)


def test_clients_count_as_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took(monkeypatch, *[0.5] * 8)
    plan = plan_of("[cohort]\ndeadline_s = 0.7", run=ROUNDS)
    _, (only,) = run(tmp_path, task_of(), plan, clients=8)
    assert (only.reason, only.aggregated_count, only.seconds) == ("all", 8, 0.5)


def test_work_that_is_longer_than_the_deadline_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took(monkeypatch, 0.5, 2.0)
    _, (only,) = run(tmp_path, task_of(), plan_of("[cohort]\ndeadline_s = 0.7", run=ROUNDS))
    assert (only.reason, only.aggregated_count) == ("deadline", 1)


def failing(partition: int, how: Callable[[], torch.Tensor]) -> Any:
    """A task that goes wrong at one client."""
    data = task_of().module.data
    here = [0]

    def data_of(client: ClientInfo) -> Any:
        here[0] = client.partition
        return data(client)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if here[0] == partition:
            wrong: torch.Tensor = model(batch[0]).sum() * how()
            return wrong
        return cross_entropy(model, batch)

    return task_of(data=data_of, loss=loss)


def raises() -> torch.Tensor:
    raise KeyError("somebody's data")


def test_one_client_whose_task_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    row, (only,) = run(tmp_path, failing(0, raises), plan_of(run=ROUNDS), clients=3)
    assert (row.status, only.failed, only.aggregated_count) == ("done", 1, 2)


def test_one_client_whose_training_is_nan_does_not_spoil_the_model(tmp_path: Path) -> None:
    row, (only,) = run(tmp_path, failing(0, lambda: torch.tensor(torch.nan)), plan_of(run=ROUNDS), clients=3)
    assert (row.status, only.failed, only.aggregated_count) == ("done", 1, 2)
    assert np.isfinite(row.metrics["loss"])


def test_a_task_that_raises_everywhere_fails_the_run_with_too_few_clients(tmp_path: Path) -> None:
    task = task_of(loss=lambda model, batch: raises())
    row, _ = run(tmp_path, task, plan_of("[cohort]\nretry_limit = 1", run=ROUNDS))
    assert (row.status, row.exit_code) == ("failed", 6)
    assert "somebody" not in str(row)


def test_debug_raises_the_tasks_own_exception_where_it_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="somebody's data") as caught:
        run(tmp_path, task_of(loss=lambda model, batch: raises()), plan_of(run=ROUNDS), debug=True)
    assert caught.traceback[-1].name == "raises"


def test_simulate_takes_an_object_and_gives_the_history() -> None:
    history = simulate(task_of().module, plan_of(run="rounds = 3"), clients=3, seed=4)
    assert len(history.rounds) == 3
    assert history.run.plan["run"]["seed"] == 4
    assert len(history.series("loss")) == 3


@pytest.mark.parametrize("cohort", [{"wait_for": 3}, {"min_updates": 3}, {"wait_for": ["sim-0", "pi-03"]}])
def test_a_simulation_that_would_wait_for_clients_that_never_come_is_refused(
    tmp_path: Path, cohort: dict[str, Any]
) -> None:
    raw = plan_of(run=ROUNDS).to_json()
    waits = RunPlan.from_json({**raw, "cohort": {**raw["cohort"], **cohort}})
    with pytest.raises(TooFewClients, match="would wait for ever with 2 simulated clients"):
        run(tmp_path, task_of(), waits)
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert store.runs() == []


def test_a_secure_simulation_with_too_few_clients_says_how_many_it_needs(tmp_path: Path) -> None:
    raw = plan_of("steps = 1", run='rounds = 1\nevaluate = "off"').to_json()
    masked = {"cohort": {"late": "drop", "deadline_s": 60}, "secure": {"enabled": True}, "uplink": {}}
    with pytest.raises(TooFewClients) as refused:
        run(tmp_path, task_of(), RunPlan.from_json({**raw, **masked}))
    assert "waiting: 2 of 3 devices (secure aggregation of 2 clients" in refused.value.why
    assert refused.value.hint == "--clients 3, or [secure] enabled = false"
    chosen = {"cohort": masked["cohort"], "server": {**raw["server"], "reduce": "krum(1)"}}
    with pytest.raises(TooFewClients) as refused:
        run(tmp_path, task_of(), RunPlan.from_json({**raw, **chosen}))
    assert refused.value.hint.startswith("--clients 5, or another [server] reduce, or fewer in [cohort]")


def test_the_code_of_another_task_than_the_plan_s_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the plan trains 'small', and this is the code of 'other'"):
        run(tmp_path, dataclasses.replace(task_of(), name="other"), plan_of(run=ROUNDS))
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert store.runs() == []


IN_A_CELL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from thinwire import simulate
from thinwire.core.errors import ThinwireError

class Mine:
    def model(self):
        return nn.Linear(4, 2)
    def data(self, client):
        return TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

class Broken(Mine):
    def model(self):
        raise ValueError("no")

plan = {"run": {"task": "mine", "rounds": 1}, "local": {"lr": 0.1}}
print(simulate(Mine(), plan, clients=2).run.status)
for wrong in (Mine, Broken()):
    try:
        simulate(wrong, plan, clients=2)
    except ThinwireError as error:
        print(error.text())
"""


def test_an_object_of_a_class_without_a_file_is_simulated_as_in_a_notebook() -> None:
    done = run_forked([sys.executable, "-c", IN_A_CELL], timeout=120, env=environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "done",
        "error: the class Mine is no task: its functions need an object",
        "why:   they are called as model(), data(client) and loss(model, batch)",
        "try:   Mine(), an object of it",
        "error: model() of the task mine raised ValueError at <string>:18",
        "why:   no",
    ]
