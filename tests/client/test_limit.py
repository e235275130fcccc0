"""Work that a device's owner ends: by the clock, by what its steps will take, and with the hours."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_private_assignments import Private
from tests.support.gated_client import NOON, Device
from tests.support.small_task import cross_entropy
from thinwire.client.admission import WorkLimit
from thinwire.client.policy import Policy
from thinwire.client.train.schedule import Clock
from thinwire.core.types import Failure, ReplyHeader, Work


class Hour:
    """A clock and a time of day that go on together."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def local(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds - 100.0)

    def limit(self, **policy: Any) -> WorkLimit:
        return WorkLimit(Policy(**policy), Clock(lambda: self.seconds), self.local)


def test_work_ends_after_the_minutes_that_are_allowed() -> None:
    hour = Hour()
    limit = hour.limit(max_assignment_minutes=2)
    hour.seconds += 119.9
    assert limit.exceeded() is None
    hour.seconds += 0.1
    ended = limit.exceeded()
    assert ended is not None
    assert ended.text == "max_assignment_minutes: stopped after 2 minutes, the most that is allowed here"
    hour.seconds = 100.0
    assert limit.exceeded() == ended


def test_work_ends_with_the_hours_and_says_when_they_begin_again() -> None:
    hour = Hour()
    limit = hour.limit(max_assignment_minutes=0, hours="11:00-13:00")
    assert limit.left_s == 3600
    hour.seconds += 3600
    ended = limit.exceeded()
    assert ended is not None
    assert ended.text == (
        "hours: hours_end_work = true: work ends with 11:00-13:00 of this device's time (again in 79200 s)"
    )
    assert hour.limit(max_assignment_minutes=0, hours="11:00-13:00", hours_end_work=False).exceeded() is None


def test_steps_that_would_take_far_too_long_are_declined_after_a_sample_of_them() -> None:
    hour = Hour()
    limit = hour.limit(max_assignment_minutes=120)
    for done in range(1, 40):
        assert limit.exceeded() is None
        limit.record_progress(done, 10**12)
        hour.seconds += 1.0
        if limit.exceeded() is not None:
            break
    ended = limit.exceeded()
    assert ended is not None
    assert hour.seconds <= 132.0
    assert ended.text.startswith("max_assignment_minutes: 1,000,000,000,000 steps would take 16,666,666,667 minutes")


@pytest.mark.parametrize("steps", [0, 7200, 2 * 7200])
def test_steps_that_may_be_done_in_time_are_not(steps: int) -> None:
    hour = Hour()
    limit = hour.limit(max_assignment_minutes=120)
    for done in range(1, 100):
        limit.record_progress(done, steps)
        hour.seconds += 1.0
    assert limit.exceeded() is None


def test_training_is_stopped_by_the_clock_whatever_its_steps(tmp_path: Path) -> None:
    device = Device(tmp_path, Policy(max_assignment_minutes=0.003))
    assert device.rule(1, work=Work(10**12, 8)) == "max_assignment_minutes"
    device.admission.set_policy(Policy())
    assert isinstance(device.assign(2), ReplyHeader)


@pytest.mark.parametrize("minutes", [0.003, 0.03])  # stopped, or declined by an estimate
def test_a_protected_failure_does_not_tell_how_long_a_step_takes(tmp_path: Path, minutes: float) -> None:
    """An aggregator that assigns 10^12 steps would read the time of one to many digits: it grows with the data."""
    device = Private(tmp_path, Policy(max_assignment_minutes=minutes))
    failure = device.assign(1, work=Work(10**12, 8))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.text) == ("declined", "max_assignment_minutes: the work takes longer than is allowed")
    assert "minutes" in device.aggregator.said[-1].partition("max_assignment_minutes")[2], "the owner reads how long"


def test_work_under_way_ends_with_the_hours(tmp_path: Path) -> None:
    device = Device(tmp_path, Policy(hours="11:00-13:00"))
    steps: list[datetime] = []

    def loss(model: Any, batch: Any) -> Any:
        steps.append(device.at)
        device.at += timedelta(minutes=7)
        return cross_entropy(model, batch)

    device.handler.executor.task.module.loss = loss  # type: ignore[attr-defined]  # a test has its executor in this process
    assert device.rule(1, work=Work(10**6, 8)) == "hours"
    assert max(steps) < NOON + timedelta(hours=1)


def test_with_partial_work_what_was_done_by_then_is_sent(tmp_path: Path) -> None:
    device = Device(tmp_path, Policy(max_assignment_minutes=0.05), text="partial = true")  # 3 s, also on a busy machine
    header = device.assign(1, work=Work(10**12, 8))
    assert isinstance(header, ReplyHeader)
    assert 0 < header.steps < 10**12 == header.planned
    assert header.parts


@pytest.mark.parametrize(("assigned", "batch"), [(2**41, 8), (3, 9), (3, 0), (3, 10**12)])
def test_work_that_no_aggregator_requests_is_refused(tmp_path: Path, assigned: int, batch: int) -> None:
    device = Device(tmp_path, Policy())
    failure = device.assign(1, work=Work(assigned, batch))
    assert isinstance(failure, Failure)
    assert (failure.kind, str(batch) in failure.text) == ("protocol", True)
    assert isinstance(device.assign(2, work=Work(3, 4)), ReplyHeader)
