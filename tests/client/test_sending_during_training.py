"""A service that trains on while its answers travel."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_service import DEVICE, Running
from tests.support.small_task import Aggregator, plan_of
from thinwire.client import execute
from thinwire.client.assignment_context import AssignmentContext
from thinwire.client.calls import BackgroundSender
from thinwire.client.execute import Trained
from thinwire.core.errors import Refused
from thinwire.core.fleet import Delivery
from thinwire.core.types import ReplyHeader
from thinwire.simulation.local_fleet import LocalLink

WAIT_S = 60.0  # nothing takes that long: it only ends a test that would hang


def overlapped(running: Running) -> None:
    running.aggregator = Aggregator(
        running.folder / "assignments", running.task, plan_of("[local.overlap]\nmax_delay = 1")
    )


def ahead(running: Running, number: int) -> Delivery:
    """An assignment that starts from the first model, as the two that are sent first do."""
    made = running.aggregator.assign(number)
    return replace(made, assignment=replace(made.assignment, base_version=0))


def answers(running: Running, count: int) -> list[ReplyHeader]:
    """The next answers, in the order in which they came."""
    found, end = list[ReplyHeader](), time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < end:
        found += [arrival for arrival in running.fleet.poll(0.5) if isinstance(arrival, ReplyHeader)]
    return found


def test_the_next_training_begins_while_an_answer_is_being_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, sending, ended = threading.Event(), threading.Event(), list[bool]()
    plain = execute.train

    def train(job: AssignmentContext, *rest: Any) -> Trained:
        if job.assignment.round == 2:
            sending.wait(WAIT_S)
            training.set()
        return plain(job, *rest)

    push = LocalLink.push

    def slow(link: LocalLink, reply: Any, bundle: Any = None) -> None:
        if not sending.is_set():
            sending.set()
            ended.append(training.wait(WAIT_S))
        push(link, reply, bundle)

    monkeypatch.setattr(LocalLink, "push", slow)
    monkeypatch.setattr(execute, "train", train)
    running = Running(tmp_path)
    overlapped(running)
    thread = running.start()
    running.send(ahead(running, 1), ahead(running, 2))
    headers = answers(running, 2)
    running.stop.set()
    thread.join(WAIT_S)
    assert ended == [True], "it was trained on before the first answer was there"
    assert [header.update_id.sequence for header in headers] == [1, 2]
    assert running.code == [0]


def test_an_assignment_that_does_not_overlap_waits_until_all_is_sent(tmp_path: Path) -> None:
    running = Running(tmp_path)
    overlapped(running)
    thread = running.start()
    running.send(ahead(running, 1), ahead(running, 2), running.aggregator.assign(3, kind="evaluate"))
    headers = answers(running, 3)
    running.stop.set()
    thread.join(WAIT_S)
    assert [(header.update_id.sequence, bool(header.parts)) for header in headers] == [(1, True), (2, True), (3, False)]
    assert all(header.update_id.device == DEVICE for header in headers)


def test_jobs_run_in_order_and_the_first_error_ends_them() -> None:
    done, heard = list[int](), list[Exception]()
    sender = BackgroundSender(heard.append, threading.Event())

    def refused() -> None:
        raise Refused("no")

    sender.put(lambda: done.append(1))
    sender.put(refused)
    sender.put(lambda: done.append(2))
    assert sender.drained()
    sender.close()
    assert (done, [str(error) for error in heard]) == ([1], ["no"])


def test_who_waits_is_let_go_when_the_program_ends() -> None:
    ending, gate = threading.Event(), threading.Event()
    sender = BackgroundSender(lambda error: None, ending)

    def held() -> None:
        gate.wait(WAIT_S)

    sender.put(held)
    ending.set()
    assert not sender.drained()
    gate.set()
    sender.close()


def test_the_end_waits_for_an_encode_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits at its end: a program that ended before that would lose the update, or commit beside its last save."""
    begun, waits, done = threading.Event(), threading.Event(), list[str]()
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is None:
            waits.set()
        join(thread, timeout)

    def encode() -> None:
        begun.set()
        waits.wait(WAIT_S)
        done.append("committed")

    sender = BackgroundSender(lambda error: None, threading.Event())
    sender.put(encode)
    assert begun.wait(WAIT_S)
    monkeypatch.setattr(threading.Thread, "join", joined)
    try:
        sender.close()
        assert done == ["committed"]
    finally:
        waits.set()
