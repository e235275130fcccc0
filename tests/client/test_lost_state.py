"""A device whose state is missing, older than what it sent, damaged or unsaved: zero, said once, nothing doubled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client import calls
from thinwire.client.handler import AssignmentHandler
from thinwire.client.run_state import MARK, RunFolder, WriteBehindRunFolder
from thinwire.core.errors import DataLost
from thinwire.core.types import Failure, ReplyHeader
from thinwire.transport.device.identity import TRUST_FILE, Trust

SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def device(folder: Path, **uplink: str) -> Aggregator:
    return Aggregator(folder, task_of(), plan_of(**(uplink or SPARSE)))


def answered(
    aggregator: Aggregator, handler: AssignmentHandler, number: int, kind: str = "train"
) -> tuple[ReplyHeader, bytes]:
    header, bundle = aggregator.answer(handler, aggregator.assign(number, kind=kind))
    return header, bundle.read_bytes() if bundle else b""


def fresh_bytes(folder: Path, number: int) -> bytes:
    """What a device that never had a residual answers."""
    fresh = device(folder)
    return answered(fresh, fresh.handler(), number)[1]


def lose(aggregator: Aggregator, how: str) -> AssignmentHandler:
    """A process that finds its state so, after three answers of which the aggregator has seen all."""
    runs, copy = aggregator.folder / "device" / "runs" / RUN, aggregator.folder / "copy"
    handler = aggregator.handler()
    for number in (1, 2, 3):
        answered(aggregator, handler, number)
        if number == 2:
            shutil.copytree(runs, copy)
    if how == "damaged":
        (runs / "state.json").write_text("{")
    else:
        shutil.rmtree(runs)
    if how == "older":
        shutil.copytree(copy, runs)
    again = aggregator.handler()
    again.continue_sequences({RUN: 3})
    return again


@pytest.mark.parametrize("how", ["missing", "older", "damaged"])
def test_it_begins_at_zero_above_what_was_seen_and_tells_so_once(tmp_path, how):
    aggregator = device(tmp_path / "lost")
    handler = lose(aggregator, how)
    assert handler.unsent_replies(aggregator.said.append) == []
    header, body = answered(aggregator, handler, 4)
    assert (header.lost, header.update_id.sequence) == (how, 4)
    assert body == fresh_bytes(tmp_path / "fresh", 4), "it begins with no residual"
    assert answered(aggregator, handler, 5)[0].lost == ""


def test_it_is_told_by_the_first_update_also_when_another_process_makes_that(tmp_path):
    aggregator = device(tmp_path)
    handler = lose(aggregator, "older")
    assert answered(aggregator, handler, 4, kind="evaluate")[0].lost == ""
    again = aggregator.handler()
    again.continue_sequences({RUN: 4})
    assert answered(aggregator, again, 5)[0].lost == "older"
    assert answered(aggregator, aggregator.handler(), 6)[0].lost == ""


def test_who_has_sent_nothing_that_this_disk_does_not_know_has_lost_nothing(tmp_path):
    aggregator = device(tmp_path)
    header, _ = answered(aggregator, aggregator.handler(), 1)
    again = aggregator.handler()
    again.continue_sequences({RUN: 1})
    assert again.unsent_replies()[0][0] == header
    assert answered(aggregator, again, 2)[0].lost == ""


def test_what_was_not_saved_before_a_kill_is_told(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of('durability = "exit"', **SPARSE))
    answered(aggregator, aggregator.handler(), 1)
    assert answered(aggregator, aggregator.handler(), 2)[0].lost == "unsaved"


def test_with_ef21_a_device_whose_state_is_older_does_not_take_part(tmp_path):
    aggregator = device(tmp_path, codec="topk(0.2)", feedback="ef21")
    handler = lose(aggregator, "older")
    answered(aggregator, handler, 4, kind="evaluate")  # which makes its number the newest
    again = aggregator.handler()
    again.continue_sequences({RUN: 4})
    reply, _ = aggregator.answer(again, aggregator.assign(5))
    assert isinstance(reply, Failure)
    assert reply.kind == "state-lost"
    assert isinstance(aggregator.answer(again, aggregator.assign(6, references_from=6))[0], ReplyHeader)


@pytest.mark.parametrize("folder", [RunFolder, WriteBehindRunFolder])
def test_files_that_are_nested_without_end_are_damaged_like_others(tmp_path: Path, folder: type[RunFolder]) -> None:
    """One of them would else end the client at each start."""
    for name in ("state.json", MARK, calls.STATUS_FILE, TRUST_FILE):
        (tmp_path / name).write_bytes(b"[" * 100_000)
    state, said = folder(tmp_path).load()
    assert state.lost
    assert said
    assert calls.ClientStatus.load(tmp_path) is None
    with pytest.raises(DataLost):
        Trust.load(tmp_path)
