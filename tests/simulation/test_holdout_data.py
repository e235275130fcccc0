"""A simulation evaluates on the holdout data of its task: in its own process, after each step, on nobody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_task import cross_entropy, examples, linear, plan_of, task_of
from thinwire import simulate
from thinwire.client import ClientInfo, Split
from thinwire.client.holdout import NAME
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError, TaskError
from thinwire.core.events import Evaluated
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import RunFailed
from thinwire.store import Store

HOLDOUT = examples(40, seed=8)


def data(client: ClientInfo) -> Split:
    return Split(examples(), HOLDOUT if client.name == NAME else examples(6, 4))


def run(home: Path | None = None, task: Any = None, **more: Any) -> Any:
    plan = plan_of(more.pop("text", ""), run='rounds = 3\nevaluate = "holdout"')
    return simulate(task or task_of(data=data), plan, clients=2, home=home, step_s=[0.1] * 2, **more)


def test_the_metrics_are_those_of_the_holdout_data() -> None:
    heard = list[Evaluated]()
    made = run(on_evaluate=heard.append)
    assert [(event.version, event.clients, event.examples) for event in heard] == [(n, 0, 40) for n in range(4)]
    with torch.no_grad():
        exact = float(cross_entropy(made.model(), HOLDOUT.tensors))
    assert made.metrics["loss"] == pytest.approx(exact, rel=1e-5)
    assert not any("eval/loss" in row for row in made.client_records()), "no client evaluated"
    assert made.series("loss") == [event.metrics["loss"] for event in heard[1:]]


def test_the_task_is_asked_for_the_whole_of_one_client(tmp_path: Path) -> None:
    seen = set[tuple[str, int, int]]()

    def asked(client: ClientInfo) -> Split:
        seen.add((client.name, client.partition, client.partitions))
        return data(client)

    run(task=task_of(data=asked))
    assert {(NAME, 0, 1), ("sim-0", 0, 2), ("sim-1", 1, 2)} == seen


def test_a_task_without_holdout_data_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no holdout data"):
        run(tmp_path, task=task_of(linear, data=lambda client: Split(examples())))
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert not store.runs()


def test_code_that_raises_fails_the_run_with_the_reason() -> None:
    def evaluate(model: Any, found: Any) -> Any:
        raise ZeroDivisionError("in a metric")

    with pytest.raises(RunFailed, match="raised ZeroDivisionError.* in its holdout"):
        run(task=task_of(data=data, evaluate=evaluate))


def test_clients_with_personal_layers_cannot_be_evaluated_by_somebody_else() -> None:
    with pytest.raises(PlanError, match="personal_layers"):
        run(text='personal_layers = ["bias"]')


SECURE = """
[secure]
enabled = true
"""


def test_the_model_of_a_secure_run_is_evaluated_too() -> None:
    text = f'steps = 2\nbuffers = "local"\n[cohort]\nlate = "drop"\ndeadline_s = 60\nclients = 3{SECURE}'
    plan = RunPlan.parse(f'[run]\ntask = "small"\nrounds = 1\nevaluate = "holdout"\n[local]\nlr = 0.1\n{text}')
    made = simulate(task_of(data=data), plan, clients=3)
    with torch.no_grad():
        assert made.metrics["loss"] == pytest.approx(float(cross_entropy(made.model(), HOLDOUT.tensors)), rel=1e-5)
    assert [row.metrics for row in made.updates] == [{}] * 3
