"""A plan that goes by a metric which the task does not report is refused before the first round."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import examples, task_of
from thinwire import simulate
from thinwire.client import ClientInfo, Split
from thinwire.client.task_check import rehearse
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError

UNKNOWN: list[dict[str, Any]] = [{"metric": "acuracy"}, {"target": {"metric": "f1", "value": 0.9}}]


SUMMED = [
    ({"metrics": {"loss": 10.0, "acuracy": 1.0}}, '"acuracy" of [secure] metrics'),
    ({"metrics": {"loss": 10.0}, "histograms": ["sick"]}, '"sick" of [secure] histograms'),
]


def plan_of(run: dict[str, Any], **sections: Any) -> RunPlan:
    made = {
        "run": {"task": "small", "rounds": 2, **run},
        "local": {"lr": 0.1, "steps": 1, "buffers": "local"},
        **sections,
    }
    return RunPlan.from_json(made)


@pytest.mark.parametrize("run", UNKNOWN)
def test_a_simulation_and_a_check_name_the_metrics_that_there_are(run: dict[str, Any]) -> None:
    task = task_of(data=lambda client: Split(examples(), examples()))
    with pytest.raises(PlanError, match="is no metric of the task small") as refused:
        simulate(task, plan_of(run), clients=2)
    assert refused.value.why == "its clients report: accuracy, loss; one that is no number is left out"
    assert refused.value.exit_code == 3
    with pytest.raises(PlanError, match="is no metric of the task small"):
        rehearse(task, ClientInfo(), plan_of(run))


@pytest.mark.parametrize(("summed", "named"), SUMMED)
def test_what_is_summed_under_masks_is_something_that_the_task_reports(summed: dict[str, Any], named: str) -> None:
    task = task_of(data=lambda client: Split(examples(), examples()))
    plan = plan_of({"metric": "loss"}, secure={"enabled": True, "clip": 2.0, **summed})
    for way in (lambda: simulate(task, plan, clients=5), lambda: rehearse(task, ClientInfo(), plan)):
        with pytest.raises(PlanError) as refused:
            way()
        assert refused.value.what == f"{named} is no metric of the task small"


def test_a_metric_of_the_whole_set_may_be_no_number_for_the_first_client() -> None:
    def evaluate(model: nn.Module, data: Any) -> dict[str, float]:
        return {"recall": float("nan") if len(data) == 6 else 0.5}

    def data(client: ClientInfo) -> Split:
        return Split(examples(), examples(8 if client.partition else 6))

    task = task_of(data=data, evaluate=evaluate)
    secure = {"enabled": True, "clip": 2.0, "metrics": {"loss": 10.0, "recall": 1.0}}
    plan = plan_of({"metric": "loss"}, secure=secure, cohort={"clients": 5, "deadline_s": 100, "late": "drop"})
    rehearse(task, ClientInfo(), plan)
    assert simulate(task, plan, clients=5).series("recall")[0] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("run", [{"metric": "accuracy"}, {"target": {"metric": "accuracy", "value": 0.9}}])
def test_who_goes_by_an_accuracy_that_is_not_counted_reads_what_to_write(run: dict[str, Any]) -> None:
    inputs, targets = examples().tensors
    data = TensorDataset(inputs, targets, targets)
    task = task_of(
        data=lambda client: Split(data, data),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    for way in (lambda: simulate(task, plan_of(run), clients=2), lambda: rehearse(task, ClientInfo(), plan_of(run))):
        with pytest.raises(PlanError, match="is no metric of the task small") as refused:
            way()
        assert "calls the model once and the batch is (inputs, targets)" in refused.value.why
        assert refused.value.hint.startswith('metrics(model, batch) in the task, with {"accuracy": (correct, ')
        assert refused.value.hint.endswith("or one of them: loss")


def test_a_metric_that_is_no_number_on_the_first_batch_is_one() -> None:
    task = task_of(
        data=lambda client: Split(examples(), examples()),
        metrics=lambda model, batch: {"f1": (float("nan"), len(batch[1]))},
    )
    rehearse(task, ClientInfo(), plan_of({"metric": "f1"}))


def test_a_target_that_nobody_measures_is_refused() -> None:
    from thinwire.aggregation import codecs

    plan = plan_of({"evaluate": "off", "target": {"metric": "loss", "value": 0.1}})
    assert [refusal.what for refusal in plan.check(codecs)] == ['[run] target with evaluate = "off"']
