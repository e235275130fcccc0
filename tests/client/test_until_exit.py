"""`durability = "exit"`: nothing is synced between rounds, a kill costs the residual, and no number is used twice."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.test_service import Running
from tests.support.fleet_words import polled
from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client import loop
from thinwire.client.calls import Say
from thinwire.client.handler import AssignmentHandler
from thinwire.client.run_state import MARK, SEQUENCES_A_MARK
from thinwire.core.errors import DataLost
from thinwire.core.statedir import write_atomically
from thinwire.core.types import ReplyHeader

SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}
EXIT = 'durability = "exit"'


class Written:
    """Durable writes, by the files' names."""

    def __init__(self) -> None:
        self.names = list[str]()

    def __call__(self, path: Path, data: bytes) -> None:
        self.names.append(path.name)
        write_atomically(path, data)


def device(folder: Path, text: str = EXIT) -> Aggregator:
    return Aggregator(folder, task_of(), plan_of(text, **SPARSE))


def answered(aggregator: Aggregator, handler: AssignmentHandler, *numbers: int) -> list[tuple[int, bytes]]:
    """(sequence, bytes) of the answers to these rounds, each told that the one before it was aggregated."""
    found = []
    for number in numbers:
        header, bundle = aggregator.answer(handler, aggregator.assign(number, outcomes=[(number - 1, "aggregated")]))
        found.append((header.update_id.sequence, bundle.read_bytes()))
    return found


def test_rounds_write_nothing_durable_but_one_mark_and_give_the_same_bytes(tmp_path):
    written = Written()
    lax, strict = device(tmp_path / "exit"), device(tmp_path / "round", "")
    here = answered(lax, lax.handler(write=written), 1, 2, 3)
    assert written.names == [MARK]
    assert here == answered(strict, strict.handler(), 1, 2, 3)


def test_what_was_saved_at_the_exit_is_gone_on_with(tmp_path):
    lax, strict = device(tmp_path / "exit"), device(tmp_path / "round", "")
    handler = lax.handler()
    here = answered(lax, handler, 1, 2)
    handler.save(lax.said.append)
    again = lax.handler()
    assert [header.update_id.sequence for header, _ in again.unsent_replies()] == [2]
    here += answered(lax, again, 3)
    assert here == answered(strict, strict.handler(), 1, 2, 3)


def test_a_kill_costs_the_residual_and_nothing_is_counted_twice(tmp_path):
    lax = device(tmp_path)
    handler = lax.handler()
    answered(lax, handler, 1)
    handler.save(lax.said.append)
    answered(lax, handler, 2)  # the save is older than this
    killed, said = lax.handler(), list[str]()
    assert killed.unsent_replies(said.append) == []
    assert said == [f"{RUN}: what was not yet sent of it is lost: this client ended before it could save it"]
    fresh = device(tmp_path / "fresh", "")
    _, first = answered(fresh, fresh.handler(), 3)[0]
    ((sequence, body),) = answered(lax, killed, 3)
    assert body == first, "it begins with no residual"
    assert sequence == 1 + SEQUENCES_A_MARK + 1


@settings(deadline=None, max_examples=15)
@given(moves=st.lists(st.sampled_from(["answer", "save", "kill"]), max_size=12))
def test_no_number_is_used_twice_whenever_it_is_killed(tmp_path_factory, moves):
    lax = device(tmp_path_factory.mktemp("killed"))
    handler, used, number = lax.handler(), list[int](), 0
    for move in moves:
        if move == "answer":
            number += 1
            used.append(answered(lax, handler, number)[0][0])
        elif move == "save":
            handler.save(lax.said.append)
        else:
            handler = lax.handler()
    assert used == sorted(set(used))


def test_the_end_of_a_run_is_durable_at_once(tmp_path):
    lax = device(tmp_path)
    handler = lax.handler()
    answered(lax, handler, 1)
    handler.stop(lax.assign(2, kind="stop").assignment, lax.said.append)
    assert [path.name for path in (tmp_path / "device" / "runs" / RUN).iterdir()] == ["state.json"]
    assert answered(lax, lax.handler(), 3)[0][0] == 2


def test_the_mark_is_removed_durably(tmp_path, monkeypatch):
    """A power failure would bring it back, and what was saved would be discarded."""
    lax, fsync, synced = device(tmp_path), os.fsync, list[tuple[str, bool]]()
    handler = lax.handler()
    answered(lax, handler, 1)
    mark = tmp_path / "device" / "runs" / RUN / MARK
    assert mark.exists()

    def noted(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), mark.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    handler.save(lax.said.append)
    assert synced[-1] == (str(mark.parent), False)


def test_a_disk_that_is_full_at_the_exit_is_said_and_begins_again(tmp_path):
    full = [False]

    def write(path: Path, data: bytes) -> None:
        if full[0]:
            raise DataLost("the disk is full")
        write_atomically(path, data)

    lax = device(tmp_path)
    handler = lax.handler(write=write)
    answered(lax, handler, 1)
    full[0] = True
    handler.save(lax.said.append)
    assert lax.said[-1] == f"{RUN}: the pending state was not saved: the disk is full"
    assert answered(lax, lax.handler(), 2)[0][0] == SEQUENCES_A_MARK + 2


@pytest.mark.parametrize("how", ["exit", "timer"])
def test_a_service_saves_when_it_ends_and_from_time_to_time(tmp_path, monkeypatch, how):
    running = Running(tmp_path)
    running.aggregator.plan = plan_of(EXIT, **SPARSE)
    saved, save = threading.Event(), AssignmentHandler.save

    def noted(handler: AssignmentHandler, say: Say) -> None:
        save(handler, say)
        if (tmp_path / "device" / "runs" / RUN / "state.json").exists():
            saved.set()

    monkeypatch.setattr(AssignmentHandler, "save", noted)
    if how == "timer":
        monkeypatch.setattr(loop, "SAVE_S", 0.0)
    thread = running.start()
    running.send(running.aggregator.assign(1))
    polled(running.fleet, ReplyHeader)
    if how == "exit":
        running.stop.set()
    assert saved.wait(60)
    assert not (tmp_path / "device" / "runs" / RUN / MARK).exists()
    running.stop.set()
    thread.join(60)
