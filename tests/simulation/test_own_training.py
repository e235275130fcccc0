"""A task's own train() in a simulation: state for each client, metrics in the journal, the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tests.support.small_task import plan_of, task_of
from thinwire.core.events import RoundClosed, UpdateAccepted
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import simulate
from thinwire.store import Store

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_training"


def own_rounds(model: nn.Module, data: Any, context: Any) -> int:
    """Report how often this client has trained, by its own state, and a number of its own."""
    number = int(context.site.rpartition("-")[2])
    if context.state:
        assert context.state["number"] == number
    context.state = {"times": context.state.get("times", 0) + 1, "number": np.int16(number)}
    context.report("times", context.state["times"])
    return len(data)


def test_each_client_has_a_state_of_its_own(tmp_path: Path) -> None:
    plan = plan_of("[cohort]\nclients = 2", run="rounds = 5\nseed = 3")
    history = simulate(task_of(train=own_rounds), plan, clients=4, home=tmp_path)
    times = dict[str, int]()
    for row in history.client_records():
        times[row["client"]] = times.get(row["client"], 0) + 1
        assert row["train/times"] == times[row["client"]]
    assert sum(times.values()) == 10
    assert len(times) > 2
    pooled = [sum(r["train/times"] for r in history.client_records() if r["round"] == n) / 2 for n in range(1, 6)]
    assert [row["train/times"] for row in history.records()] == pooled
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        events = [event for _, event in store.events(history.run.run_id)]
    closed = [event.metrics["times"] for event in events if isinstance(event, RoundClosed)]
    assert closed == pooled
    assert all("train/times" in event.header["metrics"] for event in events if isinstance(event, UpdateAccepted))


def test_the_same_states_in_several_processes(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "from tests.simulation.test_own_training import own_rounds as train\n"
        "from tests.support.small_task import cross_entropy as loss, linear as model, task_of\n"
        "data = task_of().module.data\n"
    )
    plan = plan_of("[cohort]\nclients = 2", run="rounds = 4\nseed = 3")
    one, two = (simulate(f"small={file}", plan, clients=4, processes=count) for count in (1, 2))
    assert [row["train/times"] for row in one.client_records()] == [row["train/times"] for row in two.client_records()]


def test_the_example_learns_with_a_loop_of_its_own() -> None:
    example = simulate(f"digits={EXAMPLE / 'task.py'}", EXAMPLE / "plan.toml", clients=4)
    assert example.metrics["accuracy"] > 0.85
    losses = [row["train/loss"] for row in example.records()]
    assert losses[-1] < losses[0] / 2
    assert {row["steps"] for row in example.client_records()} == {20}
    assert {row["examples"] for row in example.client_records()} == {615, 616}, "the last batch of a pass is smaller"
