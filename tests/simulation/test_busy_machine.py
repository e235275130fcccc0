"""A simulation on a machine that stands still for a while: a seed decides who is in time, not what else runs there."""

from __future__ import annotations

import pytest

from tests.support.small_task import normed, plan_of, task_of
from thinwire.core import RunPlan
from thinwire.simulation import simulate
from thinwire.simulation.client_pool import SerialExecutor

STOOD_S = 500.0


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third round on one client's work takes minutes."""
    answer = SerialExecutor.result

    def slowed(self, index, delivery):
        answered = answer(self, index, delivery)
        stood_s = STOOD_S * (index == 1 and delivery.assignment.round >= 3)
        return answered._replace(duration_s=answered.duration_s + stood_s)

    monkeypatch.setattr(SerialExecutor, "result", slowed)


def rounds(deadline_s: object) -> list[tuple[str, int]]:
    plan = plan_of(codec="topk(0.5)", feedback="classic", run="rounds = 5").to_json()
    plan["cohort"] |= {"deadline_s": deadline_s, "min_updates": 1}
    made = simulate(task_of(normed), RunPlan.from_json(plan), clients=3)
    return [(row.reason, row.aggregated_count) for row in made.rounds]


@pytest.mark.usefixtures("busy")
def test_a_deadline_that_follows_from_the_machine_makes_nobody_late() -> None:
    assert rounds("auto") == [("all", 3)] * 5


@pytest.mark.usefixtures("busy")
def test_a_deadline_in_seconds_is_held() -> None:
    reason, aggregated = rounds(100.0)[2]
    assert (reason, aggregated < 3) == ("deadline", True)
