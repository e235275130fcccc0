"""A task's own train(): what its context says, what it reports, and the keys that it must carry out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.small_task import Aggregator, examples, linear, local_of, plan_of, task_of
from tests.support.trained_elsewhere import TASK, Elsewhere
from thinwire.cli.task import lines
from thinwire.client import Context
from thinwire.client.executor import InProcessExecutor
from thinwire.client.task import require_own_loop
from thinwire.client.task_check import rehearse
from thinwire.client.train.context import MAX_REPORTED, TrainingControl
from thinwire.client.train.errors import BadTask, Cancelled
from thinwire.client.train.layout import Key
from thinwire.client.train.protocol import ClientInfo, Local, Work
from thinwire.client.train.schedule import Clock, Schedule, TimeBudget
from thinwire.client.train.trainer import TorchTrainer
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import TaskError
from thinwire.core.serialization import reply_from_bytes, reply_to_bytes
from thinwire.core.types import Failure
from thinwire.simulation.client_pool import VirtualClockExecutor

LOCAL = Local(lr=0.1, steps=4)
PARTIAL = "partial = true"


def stepped(model: nn.Module, data: Any, context: Any) -> int:
    """A loop that carries out all that a context says: a step moves the bias by the rate."""
    steps, seen = context.local.steps or 4, 0
    for step in range(steps):
        if context.should_stop():
            break
        with torch.no_grad():
            model.bias += context.lr(step / steps)
        seen += 6
        context.report("loss", 1.0 / (step + 1), 6)
        context.progress(step + 1, steps)
    return seen


def trained(train: Any, plan: str = "", context: Any = None, **trainer: Any) -> Any:
    made = TorchTrainer(task_of(train=train), local_of(plan_of(plan)), **trainer)
    return made.train(linear(), examples(), Work(), Key(1), context=context)


def scripted(until: float) -> tuple[Clock, TimeBudget]:
    virtual = VirtualClock()
    clock = Clock(virtual.now, virtual.advance)
    return clock, TimeBudget(until, clock=clock)


def test_a_device_gives_its_round_its_version_its_name_and_the_section(tmp_path: Path) -> None:
    seen: list[Any] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        seen.extend((context.round, context.version, context.site, context.local.batch, context.deadline_s))
        return len(data)

    aggregator = Aggregator(tmp_path, task_of(train=train), plan_of())
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign(3))
    assert seen == [3, 2, "pi-01", 8, None]
    assert (header.examples, header.steps, header.planned, header.a) == (24, 0, 0, 1.0)


def test_what_it_reports_travels_with_the_reply_as_sums_and_counts(tmp_path: Path) -> None:
    aggregator = Aggregator(tmp_path, task_of(train=stepped), plan_of("steps = 2"))
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert header.metrics["train/loss"] == (9.0, 12.0)
    assert (header.steps, header.examples) == (2, 12)
    assert reply_from_bytes(reply_to_bytes(header)) == header
    assert "round 1: train 2/2 steps" in aggregator.said


def test_the_largest_report_is_one_that_an_aggregator_reads(tmp_path: Path) -> None:
    def train(model: nn.Module, data: Any, context: Any) -> int:
        for number in range(MAX_REPORTED):
            context.report(f"{number:02}" + "x" * 62, torch.tensor(2.0, requires_grad=True), torch.tensor(3))
        return 24

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        return {f"{number:02}" + "m" * 62: (1.0, 6) for number in range(64)}

    aggregator = Aggregator(tmp_path, task_of(train=train, metrics=metrics), plan_of())
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert header.metrics["train/00" + "x" * 62] == (6.0, 3.0)
    assert len(header.metrics) == 64 + 1 + MAX_REPORTED
    assert reply_from_bytes(reply_to_bytes(header)) == header


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (("loss", None), "a value that is None"), (("loss", "3"), "a value that is a str"),
        (("loss", torch.ones(2)), "a value that is a tensor of shape"), (("loss", 1.0, -1), "a negative count"),
        (("loss", 1.0, float("nan")), "a negative count or NaN"), (("", 1.0), "a name that is not valid"),
        (("x" * 65, 1.0), "a name that is not valid"), (("a\nb", 1.0), "a name that is not valid"),
        ((3, 1.0), "a name that is not valid"), (("accuracy", 17.0), "an accuracy outside 0 to 1"),
    ],
)  # fmt: skip
def test_a_report_that_no_metric_can_be_is_refused(report: Any, what: str) -> None:
    with pytest.raises(BadTask, match=what):
        Context(LOCAL).report(*report)


def test_reports_are_bounded_averaged_by_count_and_left_out_where_they_are_no_number() -> None:
    context = Context(LOCAL)
    nan = float("nan")
    for name, value, count in (("a", 1.0, 1), ("a", 4.0, 3), ("nan", nan, 1), ("none", 2.0, 0), ("b", 1e99, 1e9)):
        context.report(name, value, count)
    assert context.metrics == {"a": (13.0, 4.0)}
    with pytest.raises(BadTask, match=f"more than {MAX_REPORTED} names"):
        for number in range(MAX_REPORTED):
            context.report(str(number), 1.0)


def test_a_protected_run_refuses_a_report_and_says_so_beforehand(tmp_path: Path) -> None:
    said: list[bool] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        said.append(context.may_report)
        if len(said) > 1:
            context.report("loss", 1.0)
        return len(data)

    cohort = 'steps = 1\nbuffers = "local"\n[cohort]\ndeadline_s = 60\nlate = "drop"\n'
    noise = '[privacy]\nmode = "local"\nclip = 1.0\nnoise_multiplier = 1.0\ndelta = 1e-3'
    plan = plan_of(cohort + noise, run='evaluate = "off"')
    aggregator = Aggregator(tmp_path, task_of(train=train), plan)
    handler = aggregator.handler()
    header, _ = aggregator.answer(handler, aggregator.assign(1))
    assert not isinstance(header, Failure), header.text
    assert header.metrics == {}
    failure, _ = aggregator.answer(handler, aggregator.assign(2))
    assert isinstance(failure, Failure)
    assert said == [False, False]
    assert "if context.may_report: context.report(...)" in aggregator.said[-1]


def test_the_rate_follows_the_schedule_of_the_run() -> None:
    context = Context(LOCAL)
    assert [context.lr(at) for at in (0, 0.5, 1, 7)] == [0.1] * 4
    context.control = TrainingControl(Schedule("linear", begin=0.5, until=1.0))
    assert [context.lr(at) for at in (-1, 0, 0.5, 1, 2)] == pytest.approx([0.05, 0.05, 0.025, 0.0, 0.0])


def test_a_plan_whose_schedule_partial_work_or_overlap_the_loop_never_asks_for_fails(tmp_path: Path) -> None:
    def deaf(model: nn.Module, data: Any, context: Any) -> int:
        return len(data)

    task = task_of(train=deaf)
    for text, call in (
        ('schedule = "cosine"', r"context\.lr\(\)"), ("lr_warmup = 0.5", r"context\.lr\(\)"),
        (PARTIAL, r"context\.should_stop\(\)"), ("overlap = { max_delay = 1 }", r"context\.should_stop\(\)"),
    ):  # fmt: skip
        require_own_loop(plan_of(text), task)  # nothing but a training shows what the loop does
        with pytest.raises(TaskError, match=f"never called {call}"):
            rehearse(task, ClientInfo(), plan_of(text))
        aggregator = Aggregator(tmp_path, task, plan_of(text))
        failure, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
        assert "train() that never called" in failure.text
        rehearse(task_of(train=stepped), ClientInfo(), plan_of(text))


def test_a_loop_stops_before_a_step_that_the_time_would_not_suffice_for_and_never_before_the_first() -> None:
    clock, budget = scripted(5.0)

    def train(model: nn.Module, data: Any, context: Any) -> int:
        seen = 0
        while not context.should_stop():
            clock.sleep(2.0)
            seen += 8
            context.progress(seen // 8, 10)
        assert context.deadline_s == pytest.approx(1.0)
        return seen

    done = trained(train, PARTIAL, partial=budget, clock=clock)
    assert (done.examples, done.steps, done.planned) == (16, 2, 10)
    clock, late = scripted(-1.0)
    context = Context(LOCAL, control=TrainingControl(budget=late, clock=clock))
    assert [context.should_stop() for _ in range(2)] == [False, True]
    asked_after = Context(LOCAL, control=TrainingControl(budget=late, clock=clock))
    asked_after.progress(1, 4)
    assert asked_after.should_stop()
    assert asked_after.deadline_s == 0.0


def test_partial_work_of_a_device_sends_the_steps_made_and_planned(tmp_path: Path) -> None:
    aggregator = Aggregator(tmp_path, task_of(train=stepped), plan_of(f"steps = 20\n{PARTIAL}"), steps=20)
    executor = VirtualClockExecutor(InProcessExecutor(aggregator.task), 1.0)
    handler = aggregator.handler(clock=executor.clock)
    handler.executor = executor
    header, _ = aggregator.answer(handler, aggregator.assign(deadline_s=10.0))
    assert (header.steps, header.planned, header.examples) == (8, 20, 48)
    assert "round 1: stopped after 8 of 20 steps, to send them in time" in aggregator.said


def test_a_withdrawn_assignment_stops_the_loop_and_gives_no_reply(tmp_path: Path) -> None:
    asked: list[bool] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        asked.extend(context.should_stop() for _ in range(3))
        return len(data)

    answers = iter([False, True, False])  # the message is read once
    with pytest.raises(Cancelled):
        TorchTrainer(task_of(train=train), LOCAL).train(
            linear(), examples(), Work(), Key(1), cancelled=lambda: next(answers)
        )
    assert asked == [False, True, True]


def test_an_attribute_of_the_section_is_named_where_it_is_now() -> None:
    with pytest.raises(AttributeError, match=r"no batch; the plan's \[local\] batch is context\.local\.batch"):
        _ = Context(LOCAL).batch
    with pytest.raises(AttributeError, match="a Context has no nothing$"):
        _ = Context(LOCAL).nothing
    with pytest.raises(TaskError, match="raised AttributeError") as refused:
        rehearse(task_of(train=lambda model, data, local: int(local.steps)), ClientInfo(), plan_of())
    assert "context.local.steps" in refused.value.why


@pytest.mark.parametrize("numbers", [(-1,), (1, -1), (2**41,)])
def test_steps_that_no_training_makes_are_refused(numbers: Any) -> None:
    with pytest.raises(BadTask, match="is not valid"):
        Context(LOCAL).progress(*numbers)


def test_a_loop_that_counts_more_steps_than_the_plan_assigns_fails_before_an_aggregator_rejects_its_update() -> None:
    def train(model: nn.Module, data: Any, context: Any) -> int:
        context.progress(5, 5)
        return len(data)

    with pytest.raises(TaskError, match=r"counted 5 steps, and \[local\] steps assigns 1"):
        rehearse(task_of(train=train), ClientInfo(), plan_of("steps = 3"))
    assert rehearse(task_of(train=train), ClientInfo(), plan_of()).train_steps == (5, 5), "the loop decides how many"


def test_more_steps_than_planned_are_all_of_the_steps() -> None:
    context = Context(LOCAL)
    context.progress(5, 4)
    assert (context.done, context.total) == (5, 5)


def test_the_check_says_what_was_reported_and_what_is_kept() -> None:
    rounds: list[int] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        rounds.append(context.round)
        context.state["seen"] = context.state.get("seen", 0) + torch.ones(2).numpy()
        return stepped(model, data, context)

    found = rehearse(task_of(train=train), ClientInfo(), plan_of())
    assert rounds == [1, 2]
    assert found.train_steps == (3, 3)
    assert found.reported == pytest.approx({"loss": 11 / 18})
    assert found.state == ["seen: float32 [2]"]
    shown = {**vars(found), "task": "t", "upload_s_at_mbit": {}}
    assert [line for line in lines(shown) if line.startswith(("train()", "state"))] == [
        "train()    reported 3 of 3 steps and loss 0.6111", "state      seen: float32 [2]"
    ]  # fmt: skip


OWN = """
import numpy as np


def train(model, data, context):
    if WISH.exists():
        context.state["text"] = WISH.read_text()
        return 1
    kept = context.state.get("rounds", np.zeros((), np.int64))
    context.state["rounds"] = kept + 1
    context.state["grid"] = np.full((2, 3), context.round, np.float16)
    context.report("round", context.round, 2)
    context.progress(1, 1)
    with torch.no_grad():
        model[0].bias += context.lr(0.5)
    return len(data)
"""


def test_a_worker_process_does_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK + OWN)
    elsewhere = Elsewhere(tmp_path, threads=1)
    elsewhere.worker.describe()
    try:
        handler = elsewhere.handler()
        for number in (1, 2):
            header = elsewhere.answer(handler, number)
            assert not isinstance(header, Failure), header.text
            assert header.metrics["train/round"] == (2.0 * number, 2.0)
            assert (header.steps, header.examples) == (1, 24)
        elsewhere.worker.close()
        elsewhere.answer(handler, 3)  # a new process
        state = handler.runs["small-1"][1].context
        assert {name: array.tolist() for name, array in state.items()} == {"rounds": 3, "grid": [[3.0] * 3] * 2}
        elsewhere.wish("pass")
        assert "numpy arrays of numbers" in repr((elsewhere.answer(handler, 4), elsewhere.said))
    finally:
        elsewhere.worker.close()
