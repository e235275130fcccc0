"""One ask, one answer: what it holds, and that it is given once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.small_task import RUN, Aggregator, cross_entropy, examples, local_of, normed, plan_of, task_of
from thinwire.aggregation import BufferMean
from thinwire.client import execute, run_store
from thinwire.client.admission import AdmissionController
from thinwire.client.context import AssignmentContext
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import encode, parts_of
from thinwire.client.policy import Policy
from thinwire.client.train import module as tensors
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.layout import Key, derive
from thinwire.client.train.module import build
from thinwire.client.train.protocol import Split
from thinwire.client.train.protocol import Work as Steps
from thinwire.client.train.schedule import Clock
from thinwire.client.train.trainer import TorchTrainer
from thinwire.compression import parse
from thinwire.compression.native import threads
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import DataLost
from thinwire.core.types import ReplyHeader, Work

SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def decoded(aggregator: Aggregator, head: ReplyHeader, bundle) -> np.ndarray:
    layout = aggregator.first.layout
    codec, out = parse(head.codec).bind(layout), np.zeros(layout.size, np.float32)
    for name, data in parts_of(bundle, head.parts):
        if name.startswith("frame/"):
            segment = layout.segments[int(name.removeprefix("frame/"))]
            out[segment.span] = codec.decode(data, segment.index)
    return out


def residual(session: AssignmentHandler) -> np.ndarray:
    found = session.kept[RUN][1].residual
    assert found is not None
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_identity_and_no_feedback_the_frames_are_the_change_divided_by_a(tmp_path, momentum):
    plan = plan_of(f"momentum = {momentum}")
    aggregator = Aggregator(tmp_path, task_of(), plan, steps=4)
    head, bundle = aggregator.answer(aggregator.session(), aggregator.ask())
    module = build(aggregator.task)
    places = tensors.places_of(module)
    tensors.write(module, places, aggregator.first.vector)
    key = derive(Key(plan.run.seed), "train", "pi-01", 1)
    done = TorchTrainer(aggregator.task, local_of(plan)).train(module, examples(), Steps(4, 8), key)
    change = tensors.read(module, places) - aggregator.first.vector
    assert decoded(aggregator, head, bundle).tobytes() == (change / np.float32(done.a)).tobytes()
    assert (head.a, head.steps, head.examples) == (done.a, 4, 24)
    assert head.norm == pytest.approx(float(np.linalg.norm(change)))
    assert head.metrics["train/loss"] == done.loss


def test_who_is_asked_once_more_in_a_round_trains_over_other_batches_and_measures_nothing(tmp_path):
    """From the same version: what it did over the same batches would be the same change once more."""
    aggregator = Aggregator(tmp_path, task_of(), plan_of(), steps=2)
    session = aggregator.session()
    asks = aggregator.ask(ask_id=f"{RUN}.1.pi-01"), aggregator.ask(ask_id=f"{RUN}.1+.pi-01", further=True)
    answers = [aggregator.answer(session, ask) for ask in asks]
    first, second = (decoded(aggregator, *answer) for answer in answers)
    assert np.abs(first - second).max() > 0
    assert ["eval/loss" in head.metrics for head, _ in answers] == [True, False]


def test_a_clip_that_the_ask_names_is_the_one_that_is_trained_with(tmp_path):
    asked, planned = (
        Aggregator(tmp_path / name, task_of(), plan_of(f"clip_grad = {clip}"))
        for name, clip in {"asked": 1.0, "planned": 0.05}.items()
    )
    _, bundle = asked.answer(asked.session(), asked.ask(work=Work(3, 8, clip=0.05)))
    _, expected = planned.answer(planned.session(), planned.ask())
    assert bundle.read_bytes() == expected.read_bytes()


def test_the_plan_says_how_many_threads_encode_and_the_bytes_are_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    seen, bytes_sent = list[int](), set[bytes]()

    def encode_there(*given):
        seen.append(threads.threads())
        return encode(*given)

    monkeypatch.setattr(execute, "encode", encode_there)
    for count in (0, 1, 3):
        aggregator = Aggregator(tmp_path / str(count), task_of(), plan_of(f"codec_threads = {count}"))
        _, bundle = aggregator.answer(aggregator.session(), aggregator.ask())
        bytes_sent.add(bundle.read_bytes())
    assert seen == [threads.cores(), 1, 3]
    assert len(bytes_sent) == 1


def test_what_was_not_sent_stays_in_the_residual_and_goes_with_the_next(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    head, bundle = aggregator.answer(session, aggregator.ask())
    dense = Aggregator(tmp_path / "dense", task_of(), plan_of())
    whole = decoded(dense, *dense.answer(dense.session(), dense.ask()))
    np.testing.assert_allclose(decoded(aggregator, head, bundle) + residual(session), whole, atol=1e-6)
    assert head.residual_norm == pytest.approx(float(np.linalg.norm(residual(session))))
    assert head.payload_bytes < dense.first.layout.size * 4


def test_an_ask_that_was_answered_gets_the_same_bytes_from_this_process_and_the_next(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    head, bundle = aggregator.answer(session, aggregator.ask())
    body = bundle.read_bytes()
    assert aggregator.answer(session, aggregator.ask()) == (head, bundle)
    later = aggregator.session()
    assert later.unsent() == [(head, bundle)]
    assert aggregator.answer(later, aggregator.ask()) == (head, bundle)
    assert bundle.read_bytes() == body


def test_folded_is_forgotten_and_dropped_goes_back_into_the_residual_once(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    head, bundle = aggregator.answer(session, aggregator.ask())
    sent, before = decoded(aggregator, head, bundle), residual(session).copy()
    aggregator.answer(session, aggregator.ask(2, kind="evaluate", verdicts=[(1, "unknown")]))
    np.testing.assert_array_equal(residual(session), before)
    aggregator.answer(session, aggregator.ask(3, kind="evaluate", verdicts=[(1, "dropped")]))
    np.testing.assert_allclose(residual(session), before + sent, atol=1e-7)
    aggregator.answer(session, aggregator.ask(4, kind="evaluate", verdicts=[(1, "dropped")]))
    np.testing.assert_allclose(residual(session), before + sent, atol=1e-7)
    assert not bundle.exists()


@pytest.mark.parametrize(("plan", "more"), [({}, ""), (SPARSE, ", it goes into the next one")])
def test_what_became_of_a_dropped_update_is_said(tmp_path, plan, more):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**plan))
    session = aggregator.session()
    aggregator.answer(session, aggregator.ask())
    aggregator.answer(session, aggregator.ask(2, verdicts=[(1, "dropped")]))
    assert f"round 1: its update was not used{more}" in aggregator.said


def test_the_sequence_goes_on_above_what_the_aggregator_has_seen(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    session = aggregator.session()
    session.welcomed({RUN: 9})
    head, _ = aggregator.answer(session, aggregator.ask())
    assert head.update_id.sequence == 10


def test_the_model_is_measured_before_training_every_so_many_rounds(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(run="evaluate_every = 2"))
    session = aggregator.session()
    heads = [aggregator.answer(session, aggregator.ask(number))[0] for number in (1, 2, 3)]
    assert ["eval/accuracy" in head.metrics for head in heads] == [True, False, True]
    module = build(aggregator.task)
    places = tensors.places_of(module)
    tensors.write(module, places, aggregator.first.vector)
    batch = list(examples(6, 4).tensors)
    with torch.no_grad():
        loss = float(cross_entropy(module, batch)) * 6
        right = float((module(batch[0]).argmax(1) == batch[1]).sum())
    assert heads[0].metrics["eval/loss"] == pytest.approx((loss, 6))
    assert heads[0].metrics["eval/accuracy"] == (right, 6)


def test_an_evaluation_answers_with_metrics_and_no_parts(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    session = aggregator.session()
    head, bundle = aggregator.answer(session, aggregator.ask(kind="evaluate"))
    assert (head.parts, bundle, head.a, head.examples) == ((), None, 0.0, 6)
    session.delivered(head)
    assert session.unsent() == []


def test_running_statistics_travel_as_a_frame_and_counters_in_the_head(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(normed), plan_of())
    head, bundle = aggregator.answer(aggregator.session(), aggregator.ask())
    assert [part.name for part in head.parts] == ["frame/0", "buffers"]
    assert head.counters == {"1.num_batches_tracked": 3}
    mean = BufferMean(aggregator.first.layout)
    mean.fold(dict(parts_of(bundle, head.parts))["buffers"], 1.0)
    assert not np.array_equal(mean.close(aggregator.first.buffers), aggregator.first.buffers)


@pytest.mark.parametrize("buffers", ["local", "frozen"])
def test_statistics_that_are_not_averaged_stay_here(tmp_path, buffers):
    aggregator = Aggregator(tmp_path, task_of(normed), plan_of(f'buffers = "{buffers}"'))
    session = aggregator.session()
    head, _ = aggregator.answer(session, aggregator.ask())
    assert ([part.name for part in head.parts], head.counters) == (["frame/0"], {})
    kept = session.kept[RUN][1].buffers
    assert (kept is not None) == (buffers == "local")


def test_a_run_that_is_over_leaves_its_sequence_only(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    aggregator.answer(session, aggregator.ask())
    session.stop(aggregator.ask(2, kind="stop").ask, aggregator.said.append)
    folder = tmp_path / "device" / "runs" / RUN
    assert [path.name for path in folder.iterdir()] == ["state.json"]
    assert json.loads((folder / "state.json").read_text())["sequence"] == 1
    assert aggregator.said[-1] == f"{RUN} is over"


def test_nothing_of_another_run_with_the_same_id_goes_into_this_one(tmp_path):
    """Ids are counted, so a new aggregator's first run has the id, and its asks the ids, of another's."""
    aggregator, clean = (Aggregator(tmp_path / name, task_of(), plan_of(**SPARSE)) for name in ("a", "b"))
    expected, bundle = clean.answer(clean.session(), clean.ask(identity="b" * 16))
    session = aggregator.session()
    for number in (1, 2):
        aggregator.answer(session, aggregator.ask(number, identity="a" * 16))
    for device in (session, aggregator.session()):
        head, sent = aggregator.answer(device, aggregator.ask(identity="b" * 16))
        assert (head.identity, head.update_id, head.parts) == ("b" * 16, expected.update_id, expected.parts)
        assert sent.read_bytes() == bundle.read_bytes()
    assert f"{RUN}: another run of this name; what this disk holds of the earlier one is not sent" in aggregator.said
    assert [head.identity for head, _ in aggregator.session().unsent()] == ["b" * 16]


def test_the_end_of_another_run_with_the_same_id_ends_nothing_here(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    aggregator.answer(session, aggregator.ask(identity="a" * 16))
    stop = aggregator.ask(2, kind="stop").ask
    for identity in ("b" * 16, ""):
        session.stop(replace(stop, identity=identity), aggregator.said.append)
        assert "another run of this name is over" in aggregator.said[-1]
        assert [head.identity for head, _ in aggregator.session().unsent()] == ["a" * 16]
    session.stop(replace(stop, identity="a" * 16), aggregator.said.append)
    assert (aggregator.said[-1], aggregator.session().unsent()) == (f"{RUN} is over", [])


def test_how_far_another_run_with_the_same_id_came_takes_nothing_away(tmp_path):
    """What it has seen of this device under this name says nothing of what this disk holds of its own run."""
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    aggregator.answer(aggregator.session(), aggregator.ask(identity="a" * 16))
    other, same = aggregator.session(), aggregator.session()
    other.welcomed({RUN: 7}, {RUN: "b" * 16})
    assert [head.identity for head, _ in other.unsent()] == ["a" * 16]
    same.welcomed({RUN: 7}, {RUN: "a" * 16})
    assert same.unsent() == []
    head, _ = aggregator.answer(other, aggregator.ask(2, identity="b" * 16))
    assert (head.update_id.sequence, head.lost) == (8, "missing")


def test_runs_that_are_never_over_fill_neither_the_disk_nor_the_memory(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    runs = [f"small-{number}" for number in range(1, 8)]
    held = []
    for run in runs:
        aggregator.answer(session, aggregator.ask(run=run))
        held.append(session.held_bytes)
    kept = {path.name for path in (tmp_path / "device" / "runs").iterdir() if len(list(path.iterdir())) > 1}
    assert kept == set(runs[-4:])
    assert held[3:] == held[3:4] * 4
    assert {head.update_id.run for head, _ in aggregator.session().unsent()} == kept
    head, _ = aggregator.answer(session, aggregator.ask(run=runs[0]))
    assert (head.lost, head.update_id.sequence) == ("given-up", 2)
    assert aggregator.answer(session, aggregator.ask(run="other-1"))[0].kind == "protocol"


def of_runs(session):
    """How many runs this process keeps anything of, in each place."""
    return [len(session.kept._runs), len(session._afterwards), len(session._ahead)]


@pytest.mark.parametrize("ended", ["over", "never over"])
def test_of_many_runs_that_owe_nothing_only_the_latest_numbers_are_kept(tmp_path, monkeypatch, ended):
    """An aggregator names as many as it likes, and need not end them."""
    monkeypatch.setattr(run_store, "MAX_ENDED_RUNS", 3)
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session, runs, asked = aggregator.session(), tmp_path / "device" / "runs", [f"small-{n}" for n in range(1, 13)]
    for run in asked:
        head, _ = aggregator.answer(session, aggregator.ask(kind="train" if ended == "over" else "evaluate", run=run))
        session.delivered(head, 0.1)
        if ended == "over":
            session.stop(aggregator.ask(kind="stop", run=run).ask, aggregator.said.append)
    assert {path.name for path in runs.iterdir()} == set(asked[-4:])
    assert max(of_runs(session)) <= 4
    assert aggregator.answer(session, aggregator.ask(2, run=asked[-2]))[0].update_id.sequence == 2


def test_a_run_that_still_owes_a_reply_is_kept_though_newer_ones_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "MAX_ENDED_RUNS", 1)
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    session = aggregator.session()
    owed, _ = aggregator.answer(session, aggregator.ask(kind="evaluate", run="small-1"))
    for run in ("small-2", "small-3", "small-4"):
        aggregator.answer(session, aggregator.ask(run=run))
        session.stop(aggregator.ask(kind="stop", run=run).ask, aggregator.said.append)
    assert [head for head, _ in aggregator.session().unsent()] == [owed]


def test_nothing_stays_in_memory_of_runs_that_were_refused_or_given_up(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of("[local.overlap]\nmax_delay = 1\n", **SPARSE))
    session = aggregator.session()
    for number in range(20):
        aggregator.answer(session, aggregator.ask(run=f"small-{number}", layout_digest="0" * 64))
        with pytest.raises(Cancelled):
            session.answer(aggregator.ask(run=f"small-{number}"), lambda: True, aggregator.said.append)
    assert max(of_runs(session)) <= 1
    for number in range(20):
        session.delivered(aggregator.answer(session, aggregator.ask(run=f"small-{number}"))[0], 0.1)
    assert of_runs(session) == [4, 4, 4]
    for number in range(20):
        session.stop(aggregator.ask(kind="stop", run=f"small-{number}").ask, aggregator.said.append)
    assert of_runs(session)[1:] == [0, 0]


def test_a_run_whose_vectors_do_not_fit_on_the_disk_is_refused_before_the_data_are_read(tmp_path, monkeypatch):
    read = []

    def data(site):
        read.append(site)
        return Split(examples(), examples(6, 4))

    aggregator = Aggregator(tmp_path, task_of(data=data), plan_of(**SPARSE))
    session = aggregator.session(gate=AdmissionController(Policy(min_free_disk_mb=1)))
    residual_bytes, free = 4 * aggregator.first.vector.size, [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    free[0] = 10**6 + residual_bytes - 1
    failure, _ = aggregator.answer(session, aggregator.ask())
    assert (failure.kind, failure.text.partition(":")[0], read) == ("disk", "min_free_disk_mb = 1", [])
    assert not (tmp_path / "device" / "runs").exists()
    free[0] += 10**4
    assert isinstance(aggregator.answer(session, aggregator.ask())[0], ReplyHeader)


def test_the_end_of_runs_that_this_device_has_no_part_in_writes_nothing(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    session = aggregator.session()
    declined = aggregator.ask(run="small-8", layout_digest="0" * 64)
    aggregator.answer(session, declined)
    for number in range(8, 20):
        session.stop(aggregator.ask(kind="stop", run=f"small-{number}").ask, aggregator.said.append)
    assert not (tmp_path / "device" / "runs").exists()
    assert not [line for line in aggregator.said if line.endswith("is over")]


@pytest.mark.parametrize("run", ["../../elsewhere", ""])
def test_the_end_of_a_run_that_cannot_be_is_said_and_ends_nothing_else(tmp_path, run):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    session = aggregator.session()
    session.stop(aggregator.ask(kind="stop", run=run).ask, aggregator.said.append)
    assert aggregator.said == [f"no run can be called {run!r}"]
    assert isinstance(aggregator.answer(session, aggregator.ask())[0], ReplyHeader)


def test_the_end_of_a_run_on_a_full_disk_is_said_and_what_is_kept_does_no_harm(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    head, bundle = aggregator.answer(aggregator.session(), aggregator.ask())

    def full(path, data):
        raise DataLost("the disk is full")

    session = aggregator.session(write=full)
    session.stop(aggregator.ask(2, kind="stop").ask, aggregator.said.append)
    assert aggregator.said[-1] == "the disk is full"
    assert aggregator.session().unsent() == [(head, bundle)]


def test_training_says_its_steps_and_its_deadline(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(), steps=5)
    aggregator.answer(aggregator.session(), aggregator.ask(7, deadline_s=40.0))
    assert "round 7: measure" in aggregator.said
    assert any(line.startswith("round 7: train 5/5 steps, deadline in ") for line in aggregator.said)


def test_data_without_a_test_part_is_trained_on_and_not_measured(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(data=lambda site: Split(examples())), plan_of())
    head, _ = aggregator.answer(aggregator.session(), aggregator.ask())
    assert list(head.metrics) == ["train/loss"]


def test_the_longer_training_takes_the_fewer_lines_it_says(tmp_path) -> None:
    aggregator, time, said = Aggregator(tmp_path, task_of(), plan_of()), VirtualClock(), list[str]()
    job = AssignmentContext(
        aggregator.ask(1), aggregator.plan, "pi-01", lambda: False, said.append, clock=Clock(time.now)
    )
    for step in range(1, 3601):
        job.tell("train", step, 3600)
        time.advance(1.0)
    assert len(said) < 120, "in an hour"
    assert (said[0].split()[3], said[1].split()[3], said[-1].split()[3]) == ("1/3600", "2/3600", "3600/3600")
