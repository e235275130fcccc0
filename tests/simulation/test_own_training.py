"""A task's own train() in a simulation: state for each client, metrics in the journal, the example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tests.support.small_task import plan_of, task_of
from thinwire.core import RunPlan
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


def test_under_masks_the_state_stays_with_its_client_and_nothing_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        assert not context.may_report
        context.state["times"] = context.state.get("times", 0) + 1
        seen.append((context.site, context.round, int(context.state["times"])))
        return len(data)

    secure = "[secure]\nenabled = true\nmax_dropout = 0.25\nmax_corrupt = 0.25\n"
    cohort = '[cohort]\nclients = 4\nlate = "drop"\ndeadline_s = 60\n'
    text = '[run]\ntask = "small"\nrounds = 2\nevaluate = "off"\n[local]\nlr = 0.1\nsteps = 2\nbuffers = "local"\n'
    history = simulate(task_of(train=train), RunPlan.parse(text + cohort + secure), clients=4)
    assert [row.reason for row in history.rounds] == ["all"] * 2
    assert sorted(seen) == [(f"sim-{n}", number, number) for n in range(4) for number in (1, 2)]
    assert [row.train_metrics for row in history.rounds] == [{}, {}]


def test_the_example_learns_with_a_loop_of_its_own() -> None:
    example = simulate(f"digits={EXAMPLE / 'task.py'}", EXAMPLE / "plan.toml", clients=4)
    assert example.metrics["accuracy"] > 0.85
    losses = [row["train/loss"] for row in example.records()]
    assert losses[-1] < losses[0] / 2
    assert {row["steps"] for row in example.client_records()} == {20}
    assert {row["examples"] for row in example.client_records()} == {615, 616}, "the last batch of a pass is smaller"
