"""One assignment, one answer: what it holds, and that it is given once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.small_task import RUN, Aggregator, cross_entropy, examples, local_of, normed, plan_of, task_of
from thinwire.aggregation import BufferMean
from thinwire.client import execute, payload
from thinwire.client.assignment_context import AssignmentContext, HandlerEnvironment
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import encode, parts_of
from thinwire.client.train import module as tensors
from thinwire.client.train.layout import Key, derive
from thinwire.client.train.module import build
from thinwire.client.train.protocol import Split
from thinwire.client.train.protocol import Work as Steps
from thinwire.client.train.schedule import Clock
from thinwire.client.train.trainer import TorchTrainer
from thinwire.compression import native, parse
from thinwire.core.clock import VirtualClock
from thinwire.core.types import ReplyHeader, Work

SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def decoded(aggregator: Aggregator, header: ReplyHeader, bundle) -> np.ndarray:
    layout = aggregator.first.layout
    codec, out = parse(header.codec).bind(layout), np.zeros(layout.size, np.float32)
    for name, data in parts_of(bundle, header.parts):
        if name.startswith("frame/"):
            segment = layout.segments[int(name.removeprefix("frame/"))]
            out[segment.span] = codec.decode(data, segment.index)
    return out


def residual(handler: AssignmentHandler) -> np.ndarray:
    found = handler.runs[RUN][1].residual
    assert found is not None
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_identity_and_no_feedback_the_frames_are_the_change_divided_by_a(tmp_path, momentum):
    plan = plan_of(f"momentum = {momentum}")
    aggregator = Aggregator(tmp_path, task_of(), plan, steps=4)
    header, bundle = aggregator.answer(aggregator.handler(), aggregator.assign())
    module = build(aggregator.task)
    places = tensors.layout_of(module)
    tensors.write(module, places, aggregator.first.vector)
    key = derive(Key(plan.run.seed), "train", "pi-01", 1)
    done = TorchTrainer(aggregator.task, local_of(plan)).train(module, examples(), Steps(4, 8), key)
    change = tensors.read(module, places) - aggregator.first.vector
    assert decoded(aggregator, header, bundle).tobytes() == (change / np.float32(done.a)).tobytes()
    assert (header.a, header.steps, header.examples) == (done.a, 4, 24)
    assert header.norm == pytest.approx(float(np.linalg.norm(change)))
    assert header.metrics["train/loss"] == done.loss


def test_who_is_selected_once_more_in_a_round_trains_over_other_batches_and_measures_nothing(tmp_path):
    """From the same version: what it did over the same batches would be the same change once more."""
    aggregator = Aggregator(tmp_path, task_of(), plan_of(), steps=2)
    handler = aggregator.handler()
    assignments = (
        aggregator.assign(assignment_id=f"{RUN}.1.pi-01"),
        aggregator.assign(assignment_id=f"{RUN}.1+.pi-01", is_follow_up=True),
    )
    answers = [aggregator.answer(handler, assignment) for assignment in assignments]
    first, second = (decoded(aggregator, *answer) for answer in answers)
    assert np.abs(first - second).max() > 0
    assert ["eval/loss" in header.metrics for header, _ in answers] == [True, False]


def test_a_clip_that_the_assignment_names_is_the_one_that_is_trained_with(tmp_path):
    assigned, planned = (
        Aggregator(tmp_path / name, task_of(), plan_of(f"clip_grad = {clip}"))
        for name, clip in {"selected": 1.0, "planned": 0.05}.items()
    )
    _, bundle = assigned.answer(assigned.handler(), assigned.assign(work=Work(3, 8, clip=0.05)))
    _, expected = planned.answer(planned.handler(), planned.assign())
    assert bundle.read_bytes() == expected.read_bytes()


def test_the_plan_says_how_many_threads_encode_and_the_bytes_are_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv(native.THREADS_VARIABLE, raising=False)
    seen, bytes_sent = list[int](), set[bytes]()

    def encode_there(*given):
        seen.append(native.threads())
        return encode(*given)

    monkeypatch.setattr(execute, "encode", encode_there)
    for count in (0, 1, 3):
        aggregator = Aggregator(tmp_path / str(count), task_of(), plan_of(f"codec_threads = {count}"))
        _, bundle = aggregator.answer(aggregator.handler(), aggregator.assign())
        bytes_sent.add(bundle.read_bytes())
    assert seen == [native.cores(), 1, 3]
    assert len(bytes_sent) == 1


def test_what_was_not_sent_stays_in_the_residual_and_goes_with_the_next(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    header, bundle = aggregator.answer(handler, aggregator.assign())
    dense = Aggregator(tmp_path / "dense", task_of(), plan_of())
    whole = decoded(dense, *dense.answer(dense.handler(), dense.assign()))
    np.testing.assert_allclose(decoded(aggregator, header, bundle) + residual(handler), whole, atol=1e-6)
    assert header.residual_norm == pytest.approx(float(np.linalg.norm(residual(handler))))
    assert header.payload_bytes < dense.first.layout.size * 4


def test_the_norm_of_a_reference_is_not_reported_as_a_residuals(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(codec="topk(0.25)", feedback="ef21"))
    header, _ = aggregator.answer(handler := aggregator.handler(), aggregator.assign())
    assert np.linalg.norm(residual(handler)) > 0, "the reference is where the residual would be"
    assert header.norm > 0 and header.residual_norm == 0


def test_an_assignment_that_was_answered_gets_the_same_bytes_from_this_process_and_the_next(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    header, bundle = aggregator.answer(handler, aggregator.assign())
    body = bundle.read_bytes()
    assert aggregator.answer(handler, aggregator.assign()) == (header, bundle)
    later = aggregator.handler()
    assert later.unsent_replies() == [(header, bundle)]
    assert aggregator.answer(later, aggregator.assign()) == (header, bundle)
    assert bundle.read_bytes() == body


def test_aggregated_is_forgotten_and_dropped_goes_back_into_the_residual_once(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    header, bundle = aggregator.answer(handler, aggregator.assign())
    sent, before = decoded(aggregator, header, bundle), residual(handler).copy()
    aggregator.answer(handler, aggregator.assign(2, kind="evaluate", outcomes=[(1, "unknown")]))
    np.testing.assert_array_equal(residual(handler), before)
    aggregator.answer(handler, aggregator.assign(3, kind="evaluate", outcomes=[(1, "dropped")]))
    np.testing.assert_allclose(residual(handler), before + sent, atol=1e-7)
    aggregator.answer(handler, aggregator.assign(4, kind="evaluate", outcomes=[(1, "dropped")]))
    np.testing.assert_allclose(residual(handler), before + sent, atol=1e-7)
    assert not bundle.exists()


@pytest.mark.parametrize(("plan", "more"), [({}, ""), (SPARSE, " and added to the residual")])
def test_what_became_of_a_dropped_update_is_said(tmp_path, plan, more):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**plan))
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign())
    aggregator.answer(handler, aggregator.assign(2, outcomes=[(1, "dropped")]))
    assert f"round 1: its update was dropped{more}" in aggregator.said


def test_the_sequence_goes_on_above_what_the_aggregator_has_seen(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    handler = aggregator.handler()
    handler.continue_sequences({RUN: 9})
    header, _ = aggregator.answer(handler, aggregator.assign())
    assert header.update_id.sequence == 10


def test_the_model_is_measured_before_training_every_so_many_rounds(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(run="evaluate_every = 2"))
    handler = aggregator.handler()
    headers = [aggregator.answer(handler, aggregator.assign(number))[0] for number in (1, 2, 3)]
    assert ["eval/accuracy" in header.metrics for header in headers] == [True, False, True]
    module = build(aggregator.task)
    places = tensors.layout_of(module)
    tensors.write(module, places, aggregator.first.vector)
    batch = list(examples(6, 4).tensors)
    with torch.no_grad():
        loss = float(cross_entropy(module, batch)) * 6
        right = float((module(batch[0]).argmax(1) == batch[1]).sum())
    assert headers[0].metrics["eval/loss"] == pytest.approx((loss, 6))
    assert headers[0].metrics["eval/accuracy"] == (right, 6)


def test_an_evaluation_answers_with_metrics_and_no_parts(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    handler = aggregator.handler()
    header, bundle = aggregator.answer(handler, aggregator.assign(kind="evaluate"))
    assert (header.parts, bundle, header.a, header.examples) == ((), None, 0.0, 6)
    handler.mark_delivered(header)
    assert handler.unsent_replies() == []


def test_running_statistics_travel_as_a_frame_and_counters_in_the_header(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(normed), plan_of())
    header, bundle = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert [part.name for part in header.parts] == ["frame/0", "buffers"]
    assert header.counters == {"1.num_batches_tracked": 3}
    mean = BufferMean(aggregator.first.layout)
    mean.fold(dict(parts_of(bundle, header.parts))["buffers"], 1.0)
    assert not np.array_equal(mean.close(aggregator.first.buffers), aggregator.first.buffers)


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_statistics_that_are_not_averaged_stay_here(tmp_path, buffers):
    aggregator = Aggregator(tmp_path, task_of(normed), plan_of(f'buffers = "{buffers}"'))
    handler = aggregator.handler()
    header, _ = aggregator.answer(handler, aggregator.assign())
    assert ([part.name for part in header.parts], header.counters) == (["frame/0"], {})
    kept = handler.runs[RUN][1].buffers
    assert (kept is not None) == (buffers == "local")


def test_training_says_its_steps_and_its_deadline(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(), steps=5)
    aggregator.answer(aggregator.handler(), aggregator.assign(7, deadline_s=40.0))
    assert "round 7: evaluate" in aggregator.said
    assert any(line.startswith("round 7: train 5/5 steps, deadline in ") for line in aggregator.said)


def test_data_without_a_test_part_is_trained_on_and_not_measured(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(data=lambda client: Split(examples())), plan_of())
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert list(header.metrics) == ["train/loss"]


def test_the_longer_training_takes_the_fewer_lines_it_says(tmp_path) -> None:
    aggregator, time, said = Aggregator(tmp_path, task_of(), plan_of()), VirtualClock(), list[str]()
    job = AssignmentContext(
        aggregator.assign(1), aggregator.plan, "pi-01", lambda: False, said.append,
        environment=HandlerEnvironment(clock=Clock(time.now)),
    )  # fmt: skip
    for step in range(1, 3601):
        job.print_progress("train", step, 3600)
        time.advance(1.0)
    assert len(said) < 120, "in an hour"
    assert (said[0].split()[3], said[1].split()[3], said[-1].split()[3]) == ("1/3600", "2/3600", "3600/3600")


def test_loading_is_measured_until_training_begins_and_what_follows_training_is_no_part_of_it(tmp_path):
    """Time on the virtual clock: 3 s to decode the model, 2 s to read the data, 4 s until the result is back."""
    aggregator, time = Aggregator(tmp_path, task_of(), plan_of()), VirtualClock()
    clock = Clock(time.now, time.advance)

    class Slow(InProcessExecutor):
        def do(self, *words, **more):
            done = super().do(*words, **more)
            time.advance(4.0)
            return done

    executor = Slow(aggregator.task, clock=clock)
    split = executor.inner.split

    def read(site):
        time.advance(2.0)
        return split(site)

    executor.inner.split = read  # type: ignore[method-assign]  # as a task that reads its data slowly

    def update_replica(*words):
        time.advance(3.0)
        return payload.update_replica(*words)

    handler = aggregator.handler(clock=clock, update_replica=update_replica)
    handler.executor = executor
    header, _ = aggregator.answer(handler, aggregator.assign())
    assert (header.timings.load_s, header.timings.train_s) == (5.0, 0.0)
