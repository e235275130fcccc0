"""Every key of [local] is carried out, handed to the task's own function, or refused: none is ignored."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.small_task import Aggregator, plan_of, task_of
from thinwire.client.task import require_own_loop
from thinwire.client.train.errors import BadTask
from thinwire.client.train.protocol import CARRIED, REFUSED, Local, ignored
from thinwire.client.train.trainer import TorchTrainer
from thinwire.core.errors import PlanError
from thinwire.core.plan_schema import LocalSection
from thinwire.core.types import Failure
from thinwire.simulation import simulate

OTHER: dict[str, Any] = {  # a value of each key that is not its default
    "lr": 0.5, "steps": 7, "epochs": 2.0, "min_steps": 2, "codec_threads": 1, "batch": 5, "accumulate": 2,
    "optimizer": "adam", "momentum": 0.9, "weight_decay": 0.1, "schedule": "cosine", "lr_warmup": 0.1, "lr_end": 0.5,
    "clip_grad": 1.0, "prox": 0.1, "buffers": "local", "personal_layers": ["w*"], "partial": True,
    "overlap": {"max_delay": 1}, "durability": "exit",
}  # fmt: skip
WHOLE = task_of(train=lambda model, data, context: len(data))
OWN_OPTIMIZER = task_of(optimizer=lambda params, local: torch.optim.SGD(params, local.lr))
IGNORED_BY_TRAIN = ("accumulate", "clip_grad", "momentum", "prox", "weight_decay")  # as it was before there was a table


def test_every_key_of_the_section_takes_a_stand() -> None:
    carried = set(LocalSection.model_fields) - {"schedule_rounds"}  # it is carried out with `schedule`
    assert set(CARRIED) == carried == {field.name for field in dataclasses.fields(Local)}
    assert set(OTHER) == set(CARRIED), "give the new key a value here"


@pytest.mark.parametrize("key", CARRIED)
def test_what_train_does_not_carry_out_is_refused_everywhere_and_its_default_nowhere(key: str) -> None:
    local = Local(**{"lr": 0.1, key: OTHER[key]})
    refused = [what for what, _, _ in ignored(local, WHOLE.defines)]
    assert bool(refused) == (CARRIED[key].train == REFUSED)
    assert all(f"[local] {key} = " in what and "its own train()" in what for what in refused)
    if refused:
        with pytest.raises(BadTask, match="its own train"):
            TorchTrainer(WHOLE, local)
    assert not list(ignored(Local(lr=0.1), WHOLE.defines))


@pytest.mark.parametrize("key", IGNORED_BY_TRAIN)
def test_a_plan_that_selects_what_train_would_not_do_is_refused_before_a_run(key: str) -> None:
    plan = plan_of(f"{key} = {OTHER[key]!r}", run="rounds = 1")
    with pytest.raises(PlanError, match=rf"\[local\] {key} = .* its own train\(\)") as caught:
        require_own_loop(plan, WHOLE)
    assert caught.value.why
    assert caught.value.hint
    with pytest.raises(PlanError, match=key):
        simulate(WHOLE, plan, clients=2)


@pytest.mark.parametrize("key", IGNORED_BY_TRAIN)
def test_a_device_whose_own_train_would_not_do_it_fails_the_assignment_before_it_reads_data(tmp_path, key: str) -> None:
    read: list[Any] = []
    task = task_of(train=lambda model, data, context: 3, data=read.append)
    aggregator = Aggregator(tmp_path, task, plan_of(f"{key} = {OTHER[key]!r}"))
    failure, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert isinstance(failure, Failure)
    assert failure.kind == "task-error"
    assert failure.text.startswith(f"[local] {key} = ")
    assert not read
    assert "try: leave" in aggregator.said[-1]


@pytest.mark.parametrize("value", ["steps", "buffers"])
def test_one_value_of_a_key_can_be_refused_where_others_are_carried_out(value: str) -> None:
    for other in CARRIED[value].values:
        assert list(ignored(Local(**{"lr": 0.1, value: other}), WHOLE.defines))
    assert not list(ignored(Local(**{"lr": 0.1, value: OTHER[value]}), WHOLE.defines))


def test_an_optimizer_of_the_task_that_is_not_used_is_refused() -> None:
    with pytest.raises(PlanError, match=r"its own optimizer\(\)"):
        require_own_loop(plan_of(), OWN_OPTIMIZER)
    with pytest.raises(PlanError, match=r"its own optimizer\(\)"):
        require_own_loop(plan_of('optimizer = "adam"'), OWN_OPTIMIZER)
    require_own_loop(plan_of('optimizer = "task"'), OWN_OPTIMIZER)
    both = task_of(train=WHOLE.module.train, optimizer=OWN_OPTIMIZER.module.optimizer)
    require_own_loop(plan_of(), both)  # train() may call it
    with pytest.raises(PlanError, match="no optimizer"):
        require_own_loop(plan_of('optimizer = "task"'), task_of())


@pytest.mark.parametrize("key", [key for key in CARRIED if key != "optimizer"])
def test_what_an_optimizer_of_the_task_makes_alone_is_refused(key: str) -> None:
    refused = list(ignored(Local(**{"lr": 0.1, "optimizer": "task", key: OTHER[key]}), OWN_OPTIMIZER.defines))
    assert bool(refused) == (CARRIED[key].optimizer == REFUSED)
