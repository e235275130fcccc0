"""Whole runs in which devices train on while their updates travel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_task import normed, plan_of, task_of
from thinwire.core import RunPlan
from thinwire.simulation import History, simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


def overlapped(delay: int, down: str = "identity", rounds: int = 5) -> History:
    plan = plan_of(
        f"[local.overlap]\nmax_delay = {delay}", codec="topk(0.5)", feedback="classic", run=f"rounds = {rounds}"
    ).to_json()
    plan["downlink"]["codec"] = down
    return simulate(task_of(normed), RunPlan.from_json(plan), clients=3)


@pytest.mark.parametrize("delay", [1, 3])
def test_a_round_starts_from_the_version_that_is_there_so_many_rounds_before(delay: int) -> None:
    made = overlapped(delay)
    assert [row.base_version for row in made.rounds] == [max(0, number - delay) for number in range(5)]
    assert [(row.reason, row.version, row.aggregated_count) for row in made.rounds] == [
        ("all", n, 3) for n in range(1, 6)
    ]
    assert made.run.status == "done"


def test_changes_of_the_model_are_sent_one_at_a_time_though_assignments_go_ahead() -> None:
    changes, dense = overlapped(1, "int8"), overlapped(1)
    assert changes.run.status == "done"
    later = changes.rounds[3:]  # the first two assignments start from the first model, in full
    assert {row.payload_down for row in later} == {changes.rounds[2].payload_down}
    assert later[0].payload_down < dense.rounds[3].payload_down / 2
    assert changes.run.model_digest == overlapped(1, "int8").run.model_digest


def test_several_processes_make_the_same_bits_as_one() -> None:
    plan = RunPlan.load(EXAMPLE / "plan.toml").to_json()
    plan["run"]["rounds"], plan["local"]["steps"], plan["local"]["overlap"] = 4, 3, {"max_delay": 2}
    one, two = (
        simulate(f"digits={EXAMPLE / 'task.py'}", RunPlan.from_json(plan), clients=3, processes=count)
        for count in (1, 2)
    )
    assert one.run.model_digest == two.run.model_digest


def test_on_the_digits_a_delay_costs_no_accuracy_that_can_be_seen() -> None:
    def accuracy(**more: object) -> float:
        plan = RunPlan.load(EXAMPLE / "plan.toml").to_json()
        plan["run"]["rounds"], plan["local"]["steps"] = 12, 20
        plan["local"] |= more
        made = simulate(f"digits={EXAMPLE / 'task.py'}", RunPlan.from_json(plan), clients=4)
        return float(made.run.metrics["accuracy"])

    assert accuracy(overlap={"max_delay": 1}) > accuracy() - 0.03
