"""A batch of fast clients works before the first of them replies, to the same bits as one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.small_task import examples, plan_of, task_of
from thinwire.client import Split
from thinwire.core import RunPlan
from thinwire.simulation import History, client_pool, simulate
from thinwire.simulation.client_pool import HandlerCache, SerialExecutor

PLAN = plan_of("steps = 2", "topk(0.5) > int8", "classic", run="rounds = 4\n[cohort]\nclients = 7")
CLIENTS = 12


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Three clients work together, however slow this machine is; what happened, with the client's index."""
    happened = list[tuple[str, int]]()
    work, reply = HandlerCache.execute, SerialExecutor.result

    def working(self: HandlerCache, index: int, delivery: Any) -> Any:
        happened.append(("works", index))
        return work(self, index, delivery)

    def replying(self: SerialExecutor, index: int, delivery: Any) -> Any:
        made = reply(self, index, delivery)
        happened.append(("replies", index))
        return made

    monkeypatch.setattr(HandlerCache, "execute", working)
    monkeypatch.setattr(SerialExecutor, "result", replying)
    monkeypatch.setattr(client_pool, "CLIENT_BATCH", 3)
    monkeypatch.setattr(client_pool, "MAX_BATCHED_S", 1000.0)
    return happened


def changed(**cohort: Any) -> RunPlan:
    raw = PLAN.to_json()
    return RunPlan.from_json({**raw, "cohort": {**raw["cohort"], **cohort}})


def simulated(plan: RunPlan = PLAN) -> History:
    """Run a plan with a client whose data are never there, so that another one replaces it."""

    def data(client: Any) -> Split:
        if client.partition == 4:
            raise OSError("no data")
        return Split(examples(seed=client.partition), examples(6, 4))

    return simulate(task_of(data=data), plan, clients=CLIENTS)


def bits(made: History) -> list[Any]:
    model = [values.numpy().tobytes() for values in made.model().state_dict().values()]
    return [model, made.failures, [(row.assignment_id, row.update_id, row.outcome, row.norm) for row in made.updates]]


def most_ahead(happened: list[tuple[str, int]]) -> int:
    """Return the most clients that had worked and had not replied."""
    return int(np.cumsum([1 if what == "works" else -1 for what, _ in happened]).max())


def test_clients_that_work_together_make_the_bits_of_clients_that_take_turns(
    happened: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = simulated()
    assert most_ahead(happened) == 3
    order = [index for what, index in happened if what == "replies"]
    happened.clear()
    monkeypatch.setattr(client_pool, "MAX_BATCHED_S", 0.0)
    in_turn = simulated()
    assert most_ahead(happened) == 1
    assert [index for what, index in happened if what == "replies"] == order
    assert bits(together) == bits(in_turn)


@pytest.mark.parametrize("cohort", [{"over_select": 0.5}, {"mode": "buffered", "clients": "all", "buffer": 3}])
def test_no_client_works_before_its_turn_where_a_round_may_withdraw_its_assignment(
    happened: list[tuple[str, int]], cohort: dict[str, Any]
) -> None:
    simulated(changed(**cohort))
    assert most_ahead(happened) == 1
