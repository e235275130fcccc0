"""The runs that a device keeps: which are forgotten, which stay, and that nothing of one goes into another."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.small_task import RUN, Aggregator, examples, plan_of, task_of
from thinwire.client import run_store
from thinwire.client.admission import AdmissionController
from thinwire.client.handler import AssignmentHandler
from thinwire.client.policy import Policy
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.protocol import Split
from thinwire.core.errors import DataLost
from thinwire.core.types import ReplyHeader

SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def residual(handler: AssignmentHandler) -> np.ndarray:
    found = handler.runs[RUN][1].residual
    assert found is not None
    return found


def test_a_run_that_is_over_leaves_its_sequence_only(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign())
    handler.stop(aggregator.assign(2, kind="stop").assignment, aggregator.said.append)
    folder = tmp_path / "device" / "runs" / RUN
    assert [path.name for path in folder.iterdir()] == ["state.json"]
    assert json.loads((folder / "state.json").read_text())["sequence"] == 1
    assert aggregator.said[-1] == f"{RUN} is over"


def test_nothing_of_another_run_with_the_same_id_goes_into_this_one(tmp_path):
    """Ids are counted, so a new aggregator's first run has the id, and its assignments the ids, of another's."""
    aggregator, clean = (Aggregator(tmp_path / name, task_of(), plan_of(**SPARSE)) for name in ("a", "b"))
    expected, bundle = clean.answer(clean.handler(), clean.assign(identity="b" * 16))
    handler = aggregator.handler()
    for number in (1, 2):
        aggregator.answer(handler, aggregator.assign(number, identity="a" * 16))
    for device in (handler, aggregator.handler()):
        header, sent = aggregator.answer(device, aggregator.assign(identity="b" * 16))
        assert (header.identity, header.update_id, header.parts) == ("b" * 16, expected.update_id, expected.parts)
        assert sent.read_bytes() == bundle.read_bytes()
    assert f"{RUN}: another run of this name; what this disk holds of the earlier one is not sent" in aggregator.said
    assert [header.identity for header, _ in aggregator.handler().unsent_replies()] == ["b" * 16]


def test_the_end_of_another_run_with_the_same_id_ends_nothing_here(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign(identity="a" * 16))
    stop = aggregator.assign(2, kind="stop").assignment
    for identity in ("b" * 16, ""):
        handler.stop(replace(stop, identity=identity), aggregator.said.append)
        assert "another run of this name is over" in aggregator.said[-1]
        assert [header.identity for header, _ in aggregator.handler().unsent_replies()] == ["a" * 16]
    handler.stop(replace(stop, identity="a" * 16), aggregator.said.append)
    assert (aggregator.said[-1], aggregator.handler().unsent_replies()) == (f"{RUN} is over", [])


def test_how_far_another_run_with_the_same_id_came_takes_nothing_away(tmp_path):
    """What it has seen of this device under this name says nothing of what this disk holds of its own run."""
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    aggregator.answer(aggregator.handler(), aggregator.assign(identity="a" * 16))
    other, same = aggregator.handler(), aggregator.handler()
    other.continue_sequences({RUN: 7}, {RUN: "b" * 16})
    assert [header.identity for header, _ in other.unsent_replies()] == ["a" * 16]
    same.continue_sequences({RUN: 7}, {RUN: "a" * 16})
    assert same.unsent_replies() == []
    header, _ = aggregator.answer(other, aggregator.assign(2, identity="b" * 16))
    assert (header.update_id.sequence, header.lost) == (8, "missing")


def test_what_lies_beside_the_runs_and_is_none_disturbs_nothing(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    sent = aggregator.answer(aggregator.handler(), aggregator.assign())
    runs = tmp_path / "device" / "runs"
    (runs / "small-1.tar").write_bytes(b"")
    shutil.copytree(runs / RUN, runs / f"{RUN} (copy)")
    handler = aggregator.handler()
    assert handler.unsent_replies() == [sent]
    assert isinstance(aggregator.answer(handler, aggregator.assign(run="small-2"))[0], ReplyHeader)


def test_runs_that_are_never_over_fill_neither_the_disk_nor_the_memory(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    runs = [f"small-{number}" for number in range(1, 8)]
    held = []
    for run in runs:
        aggregator.answer(handler, aggregator.assign(run=run))
        held.append(handler.runs.nbytes)
    kept = {path.name for path in (tmp_path / "device" / "runs").iterdir() if len(list(path.iterdir())) > 1}
    assert kept == set(runs[-4:])
    assert held[3:] == held[3:4] * 4
    assert {header.update_id.run for header, _ in aggregator.handler().unsent_replies()} == kept
    header, _ = aggregator.answer(handler, aggregator.assign(run=runs[0]))
    assert (header.lost, header.update_id.sequence) == ("given-up", 2)
    assert aggregator.answer(handler, aggregator.assign(run="other-1"))[0].kind == "protocol"


def test_the_owner_decides_how_many_runs_are_kept(tmp_path):
    """Six runs take turns, as an aggregator with a larger max_runs gives them: none loses its residual."""
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    runs = [f"small-{number}" for number in range(1, 7)]
    for most, lost in ((6, {""}), (2, {"given-up"})):
        device = tmp_path / f"keeps-{most}"
        handler = aggregator.handler(device, AdmissionController(Policy(max_runs=most), device))
        turns = [(number, run) for number in (1, 2) for run in runs]
        found = [aggregator.answer(handler, aggregator.assign(number, run=run))[0] for number, run in turns]
        assert {header.lost for header in found[len(runs) :]} == lost
        said = [line for line in aggregator.said if "2 newer runs are not over (max_runs of client.toml)" in line]
        assert bool(said) == (most == 2)


def of_runs(handler):
    """How many runs this process keeps anything of, in each place."""
    return [len(handler.runs._runs), len(handler._uplink_estimators), len(handler._pipelines)]


@pytest.mark.parametrize("ended", ["over", "never over"])
def test_of_many_runs_that_owe_nothing_only_the_latest_numbers_are_kept(tmp_path, monkeypatch, ended):
    """An aggregator names as many as it likes, and need not end them."""
    monkeypatch.setattr(run_store, "MAX_ENDED_RUNS", 3)
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler, runs, assigned = aggregator.handler(), tmp_path / "device" / "runs", [f"small-{n}" for n in range(1, 13)]
    for run in assigned:
        header, _ = aggregator.answer(
            handler, aggregator.assign(kind="train" if ended == "over" else "evaluate", run=run)
        )
        handler.mark_delivered(header, 0.1)
        if ended == "over":
            handler.stop(aggregator.assign(kind="stop", run=run).assignment, aggregator.said.append)
    assert {path.name for path in runs.iterdir()} == set(assigned[-4:])
    assert max(of_runs(handler)) <= 4
    assert aggregator.answer(handler, aggregator.assign(2, run=assigned[-2]))[0].update_id.sequence == 2


def test_a_run_that_still_owes_a_reply_is_kept_though_newer_ones_are_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "MAX_ENDED_RUNS", 1)
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    owed, _ = aggregator.answer(handler, aggregator.assign(kind="evaluate", run="small-1"))
    for run in ("small-2", "small-3", "small-4"):
        aggregator.answer(handler, aggregator.assign(run=run))
        handler.stop(aggregator.assign(kind="stop", run=run).assignment, aggregator.said.append)
    assert [header for header, _ in aggregator.handler().unsent_replies()] == [owed]


def test_nothing_stays_in_memory_of_runs_that_were_refused_or_given_up(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of("[local.overlap]\nmax_delay = 1\n", **SPARSE))
    handler = aggregator.handler()
    for number in range(20):
        aggregator.answer(handler, aggregator.assign(run=f"small-{number}", layout_digest="0" * 64))
        with pytest.raises(Cancelled):
            handler.handle(aggregator.assign(run=f"small-{number}"), lambda: True, aggregator.said.append)
    assert max(of_runs(handler)) <= 1
    for number in range(20):
        handler.mark_delivered(aggregator.answer(handler, aggregator.assign(run=f"small-{number}"))[0], 0.1)
    assert of_runs(handler) == [4, 4, 4]
    for number in range(20):
        handler.stop(aggregator.assign(kind="stop", run=f"small-{number}").assignment, aggregator.said.append)
    assert of_runs(handler)[1:] == [0, 0]


def test_a_run_whose_vectors_do_not_fit_on_the_disk_is_refused_before_the_data_are_read(tmp_path, monkeypatch):
    read = []

    def data(client):
        read.append(client)
        return Split(examples(), examples(6, 4))

    aggregator = Aggregator(tmp_path, task_of(data=data), plan_of(**SPARSE))
    handler = aggregator.handler(admission=AdmissionController(Policy(min_free_disk_mb=1)))
    residual_bytes, free = 4 * aggregator.first.vector.size, [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    free[0] = 10**6 + residual_bytes - 1
    failure, _ = aggregator.answer(handler, aggregator.assign())
    assert (failure.kind, failure.text.partition(":")[0], read) == ("disk", "min_free_disk_mb = 1", [])
    assert not (tmp_path / "device" / "runs").exists()
    free[0] += 10**4
    assert isinstance(aggregator.answer(handler, aggregator.assign())[0], ReplyHeader)


def test_the_end_of_runs_that_this_device_has_no_part_in_writes_nothing(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    handler = aggregator.handler()
    declined = aggregator.assign(run="small-8", layout_digest="0" * 64)
    aggregator.answer(handler, declined)
    for number in range(8, 20):
        handler.stop(aggregator.assign(kind="stop", run=f"small-{number}").assignment, aggregator.said.append)
    assert not (tmp_path / "device" / "runs").exists()
    assert not [line for line in aggregator.said if line.endswith("is over")]


@pytest.mark.parametrize("run", ["../../elsewhere", ""])
def test_the_end_of_a_run_that_cannot_be_is_said_and_ends_nothing_else(tmp_path, run):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    handler = aggregator.handler()
    handler.stop(aggregator.assign(kind="stop", run=run).assignment, aggregator.said.append)
    assert aggregator.said == [f"no run can be called {run!r}"]
    assert isinstance(aggregator.answer(handler, aggregator.assign())[0], ReplyHeader)


def test_the_end_of_a_run_on_a_full_disk_is_said_and_what_is_kept_does_no_harm(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    header, bundle = aggregator.answer(aggregator.handler(), aggregator.assign())

    def full(path, data):
        raise DataLost("the disk is full")

    handler = aggregator.handler(write=full)
    handler.stop(aggregator.assign(2, kind="stop").assignment, aggregator.said.append)
    assert aggregator.said[-1] == "the disk is full"
    assert aggregator.handler().unsent_replies() == [(header, bundle)]
