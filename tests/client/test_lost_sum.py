"""A device that lost what the aggregator's mean holds of it: refused, for as long as that mean is gone on with."""

from __future__ import annotations

import shutil

from tests.client.test_following import BOTH, Other, of, rounds
from tests.support.small_task import RUN, task_of
from thinwire.client.handler import AssignmentHandler
from thinwire.core.types import Failure


def damage(other: Other) -> None:
    """One bit of what is kept."""
    (kept,) = (other.folder / "device" / "runs" / RUN).glob("own-*")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")


def without_state(other: Other, seen: int) -> AssignmentHandler:
    """A process of a device of which the aggregator has seen `seen` answers, and that finds nothing on its disk."""
    runs = other.folder / "device" / "runs"
    if runs.exists():
        shutil.rmtree(runs)
    handler = other.handler()
    handler.continue_sequences({RUN: seen})
    return handler


def kind(other: Other, handler: AssignmentHandler, number: int, since: int) -> str:
    reply, _ = other.answer(handler, other.assign(number, references_from=since))
    return getattr(reply, "kind", "answered")


@BOTH
def test_a_device_that_lost_it_says_so_and_does_not_begin_again(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    rounds(other, other.handler(), [()])
    damage(other)
    reply, _ = other.answer(other.handler(), other.assign(2))
    assert isinstance(reply, Failure)
    assert (reply.kind, algorithm in reply.text) == ("state-lost", True)
    fresh = Other(tmp_path / "fresh", task_of(), other.plan)
    handler = fresh.handler()
    handler.continue_sequences({RUN: 1})
    assert fresh.answer(handler, fresh.assign(2))[0].kind == "state-lost"


@BOTH
def test_what_was_lost_before_all_began_again_is_missed_no_more(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    rounds(other, other.handler(), [()])
    handler = without_state(other, 1)
    assert [kind(other, handler, number, 0) for number in (2, 3)] == ["state-lost", "state-lost"]
    assert kind(other, handler, 4, 4) == "answered"
    assert kind(other, other.handler(), 5, 4) == "answered"


@BOTH
def test_a_damaged_sum_that_counts_no_more_is_not_missed(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    rounds(other, other.handler(), [()])
    damage(other)
    assert kind(other, other.handler(), 2, 2) == "answered"
    damage(other)
    assert kind(other, other.handler(), 3, 2) == "state-lost"


@BOTH
def test_what_is_lost_after_all_began_again_is_missed_until_they_do_again(tmp_path, algorithm):
    other = Other(tmp_path, task_of(), of(algorithm))
    other.answer(other.handler(), other.assign(3, references_from=3))
    handler = without_state(other, 1)
    assert kind(other, handler, 4, 3) == "state-lost"
    assert kind(other, without_state(other, 1), 5, 3) == "state-lost"
    assert kind(other, other.handler(), 6, 3) == "state-lost", "another process knows it from the disk"
    assert kind(other, other.handler(), 7, 7) == "answered"


@BOTH
def test_a_loss_of_which_no_assignment_says_when_it_was_is_missed(tmp_path, algorithm):
    """It may have answered since all began again, and its disk is from before."""
    other, copy = Other(tmp_path, task_of(), of(algorithm)), tmp_path / "copy"
    rounds(other, other.handler(), [()])
    runs = tmp_path / "device" / "runs"
    shutil.copytree(runs, copy)
    other.answer(other.handler(), other.assign(3, references_from=3))
    shutil.rmtree(runs)
    shutil.copytree(copy, runs)
    handler = other.handler()
    handler.continue_sequences({RUN: 2})
    assert kind(other, handler, 4, 3) == "state-lost"
