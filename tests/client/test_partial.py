"""Partial work: training ends in time to send what was done, and is averaged and weighed as what it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.small_task import Aggregator, examples, linear, local_of, plan_of, task_of
from tests.support.trained_elsewhere import Elsewhere
from thinwire.client.assignment_context import ENCODE_BYTES_A_SECOND, UPLINK_SLOWDOWN, UplinkTimeEstimator
from thinwire.client.executor import InProcessExecutor
from thinwire.client.task import require_own_loop
from thinwire.client.train import module as tensors
from thinwire.client.train.errors import BadTask
from thinwire.client.train.layout import Key
from thinwire.client.train.protocol import Work
from thinwire.client.train.schedule import Clock, Schedule, TimeBudget
from thinwire.client.train.trainer import TorchTrainer
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import PlanError
from thinwire.core.formatting import p90
from thinwire.core.types import ReplyHeader, Timings
from thinwire.simulation.client_pool import VirtualClockExecutor

PARTIAL = "partial = true"
ODD = "momentum = 0.9\nprox = 0.3\naccumulate = 2"


def scripted() -> Clock:
    virtual = VirtualClock()
    return Clock(virtual.now, virtual.advance)


def trained(text: str, work: Work, until: float | None = None, least: int = 1, step_s: float = 1.0, data=None):
    """A module after training on a clock on which only steps take time."""
    torch.manual_seed(0)
    module, clock = linear(), scripted()
    partial = None if until is None else TimeBudget(until, least, clock)
    trainer = TorchTrainer(task_of(), local_of(plan_of(text)), partial=partial, clock=clock)
    done = trainer.train(
        module, examples() if data is None else data, work, Key(7), lambda steps, total: clock.sleep(step_s)
    )
    return tensors.read(module, tensors.layout_of(module)), done, clock.now()


@settings(deadline=None, max_examples=40)
@given(
    until=st.floats(0.5, 30.0), step_s=st.floats(0.5, 5.0), least=st.integers(1, 12), steps=st.integers(1, 12),
    text=st.sampled_from(["", ODD, 'optimizer = "adam"']),
)  # fmt: skip
def test_training_that_is_stopped_is_training_of_so_many_steps(until, step_s, least, steps, text):
    params, done, took_s = trained(text, Work(steps, 8), until, least, step_s)
    assert done.steps >= min(least, steps)
    if done.steps > least:
        assert took_s <= until
    if least <= done.steps < steps:
        assert took_s + step_s > until
    same, whole, _ = trained(text, Work(done.steps, 8))
    assert params.tobytes() == same.tobytes()
    assert (done.a, done.loss, done.planned) == (whole.a, whole.loss, steps)
    assert done.examples == max(1, round(24 * done.steps / steps))


def test_with_time_enough_nothing_is_other_than_without():
    for text in ("", ODD, "epochs = 2.5"):
        work = Work(0 if "epochs" in text else 5, 8)
        (params, done, _), (same, whole, _) = trained(text, work, until=1e9), trained(text, work)
        assert params.tobytes() == same.tobytes()
        assert done == whole


@pytest.mark.parametrize(("epochs", "until", "counted"), [(1.0, 2.0, 16), (3.0, 3.0, 8), (3.0, 8.0, 21)])
def test_of_epochs_only_the_batches_that_were_seen_count(epochs, until, counted):
    _, done, _ = trained(f"epochs = {epochs}", Work(0, 8), until)
    assert (done.steps, done.examples, done.planned) == (int(until), counted, round(3 * epochs))


def test_a_loader_whose_length_nobody_knows_counts_what_it_gave():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return iter([tuple(examples()[at]) for at in range(24)])

    _, done, _ = trained("", Work(0, 8), until=2.0, data=DataLoader(Endless(), 8))
    assert (done.steps, done.examples, done.planned) == (2, 16, 0)


def test_the_learning_rate_falls_as_over_the_whole_work():
    def train(steps: int, until: float | None) -> tuple[float, bytes]:
        torch.manual_seed(0)
        module, clock = linear(), scripted()
        partial = None if until is None else TimeBudget(until, 1, clock)
        schedule = Schedule("linear", begin=0.0, until=0.5 * steps / 8)
        trainer = TorchTrainer(task_of(), local_of(plan_of()), "cpu", schedule, partial, clock)
        done = trainer.train(module, examples(), Work(steps, 8), Key(7), lambda steps, total: clock.sleep(1.0))
        return done.a, tensors.read(module, tensors.layout_of(module)).tobytes()

    assert train(8, until=4.0) == train(4, until=None)


def answered(folder: Path, text: str, **changed):
    """A device's answer where a step takes a second, to an assignment of 20 steps."""
    aggregator = Aggregator(folder, task_of(), plan_of(text), steps=20)
    executor = VirtualClockExecutor(InProcessExecutor(aggregator.task), 1.0)
    handler = aggregator.handler(clock=executor.clock)
    handler.executor = executor
    delivery = aggregator.assign(**{"deadline_s": 10.0, **changed})
    return aggregator, handler, delivery


def test_a_device_stops_so_early_that_a_tenth_of_the_deadline_is_left(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, PARTIAL)
    header, _ = aggregator.answer(handler, delivery)
    assert (header.steps, header.planned, header.examples, header.a) == (
        8,
        20,
        10,
        8.0,
    )  # 9 s, less a guess of the encode
    assert "round 1: stopped after 8 of 20 steps, to send them in time" in aggregator.said
    whole, _ = aggregator.answer(handler, aggregator.assign(2, deadline_s=60.0))
    assert (whole.steps, whole.planned, whole.examples) == (20, 0, 24)


def test_without_partial_work_a_deadline_stops_nobody(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, "")
    header, _ = aggregator.answer(handler, delivery)
    assert (header.steps, header.planned) == (20, 0)


def test_min_steps_are_made_when_the_time_is_up_already(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, PARTIAL + "\nmin_steps = 3", deadline_s=0.5)
    header, _ = aggregator.answer(handler, delivery)
    assert (header.steps, header.a) == (3, 3.0)


@pytest.mark.parametrize(
    ("late", "upload_s", "steps"),
    [("aggregate", 10.5, 20), ("drop", 10.5, 3), ("aggregate", 9.5, 3), ("aggregate", 25.0, 9)],
)
def test_who_is_known_to_come_late_whatever_it_does_works_for_as_long_as_that_counts(tmp_path, late, upload_s, steps):
    """Two and a half deadlines of 10 s, of five that it may be late by. With 9.5 s of upload `min_steps` are made."""
    aggregator, handler, delivery = answered(tmp_path, f'{PARTIAL}\nmin_steps = 3\n[cohort]\nlate = "{late}"')
    first, _ = aggregator.answer(handler, delivery)
    handler.mark_delivered(first, upload_s=upload_s)
    header, _ = aggregator.answer(handler, aggregator.assign(2, deadline_s=10.0))
    assert (first.steps, header.steps) == (8, steps)


def test_one_slow_upload_makes_nobody_late_for_rounds(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, f"{PARTIAL}\nmin_steps = 3")
    header, _ = aggregator.answer(handler, delivery)
    for number, upload_s in ((2, 20.0), (3, 0.2), (4, 0.2)):
        handler.mark_delivered(header, upload_s=upload_s)
        header, _ = aggregator.answer(handler, aggregator.assign(number, deadline_s=10.0))
    assert header.steps == 3, "its p90 says that there is no time, and its best that there was"


def test_what_came_before_the_training_is_taken_off(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, PARTIAL)
    handler._uplink_estimators["small-1"] = UplinkTimeEstimator()
    handler._uplink_estimators["small-1"].sending["identity"].append(0.0)
    header, _ = handler.handle(replace(delivery, download_s=2.0), lambda: False, aggregator.said.append, queue_s=3.0)
    assert header.steps == 3


def test_what_encoding_and_sending_took_before_is_taken_off(tmp_path):
    aggregator, handler, delivery = answered(tmp_path, PARTIAL)
    header, _ = aggregator.answer(handler, delivery)
    handler.mark_delivered(header, upload_s=4.0)
    after, _ = aggregator.answer(handler, aggregator.assign(2, deadline_s=10.0))
    handler.mark_delivered(after)  # cut on its way: it says nothing of the link
    again, _ = aggregator.answer(handler, aggregator.assign(3, deadline_s=10.0))
    assert [header.steps, after.steps, again.steps] == [8, 5, 5]


def test_a_first_guess_goes_by_the_download_and_is_replaced_by_what_is_known():
    after = UplinkTimeEstimator()
    header = ReplyHeader("a", None, 0, 1, codec="int8", timings=Timings(encode_s=0.5))  # type: ignore[arg-type]  # no update is read
    assert after.estimate_s("int8", 4000, 2000, 3.0) == pytest.approx(
        4000 / ENCODE_BYTES_A_SECOND + UPLINK_SLOWDOWN * 6.0
    )
    after.add_encode(header, commit_s=0.25)
    after.add_upload(header, 2.0)
    assert after.estimate_s("int8", 4000, 2000, 3.0) == 2.75
    assert after.estimate_s("fp16", 4000, 2000, 0.0) == 2.75  # another codec was dearer than the guess


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40))
def test_nine_of_ten_are_within_the_p90(seconds):
    assert sum(each <= p90(seconds) for each in seconds) >= 0.9 * len(seconds)
    assert p90(seconds) in seconds
    assert p90(seconds) == np.quantile(seconds, 0.9, method="inverted_cdf")


def test_a_task_with_its_own_loop_is_refused_what_it_cannot_do(tmp_path):
    own = task_of(train=lambda model, data, context: 3)
    require_own_loop(plan_of(PARTIAL), own)
    with pytest.raises(PlanError, match="auto"):
        require_own_loop(plan_of('steps = "auto"\n[cohort]\ndeadline_s = 60'), own)
    with pytest.raises(PlanError, match="scaffold"):
        require_own_loop(plan_of(run='algorithm = "scaffold"'), own)
    with pytest.raises(BadTask, match=r"never called context.should_stop"):
        TorchTrainer(own, local_of(plan_of(PARTIAL))).train(linear(), examples(), Work(), Key(1))


def test_the_process_that_trains_knows_the_time_that_is_left(tmp_path):
    elsewhere = Elsewhere(tmp_path, plan=plan_of(PARTIAL + "\nmin_steps = 2", codec="int8"), threads=1)
    elsewhere.worker.describe()
    try:
        handler = elsewhere.handler()
        short = elsewhere.answer(handler, 1, deadline_s=1e-6)
        whole = elsewhere.answer(handler, 2, deadline_s=1e6)
    finally:
        elsewhere.worker.close()
    assert (short.steps, short.planned, whole.steps, whole.planned) == (2, 3, 3, 0)
