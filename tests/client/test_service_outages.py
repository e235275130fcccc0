"""The service while its aggregator is away, or refuses it: how long it waits, and the code that it ends with."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import Forked
from tests.support.processes import environment
from tests.support.small_task import task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.calls import ReconnectBackoff, Retrier
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import DataLost, Refused, Unreachable, UsageError
from thinwire.core.fleet import Delivery, Hello, Welcome
from thinwire.core.types import Failure, PhaseReply, Reply

DEVICE = "pi-01"


class BrokenLink:
    """Every call fails in a way that the test chooses."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.calls = 0

    def hello(self, hello: Hello) -> Welcome:
        self.calls += 1
        error = self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        if error is not None:
            raise error
        return Welcome(hello.name)

    def pull(self, wait_s: float) -> Delivery | None:
        raise Refused("revoked", why="an operator revoked this device")

    def push(self, reply: Reply, bundle: Path | None = None) -> None: ...

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        return self.pull(wait_s)

    def cancelled(self) -> frozenset[str]:
        return frozenset()

    def close(self) -> None: ...


def device_in(folder: Path) -> Device:
    return Device(ClientInfo(DEVICE), folder, AdmissionController(folder=folder))


def served(folder: Path, link: BrokenLink, **options: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    return serve(link, [task_of()], device_in(folder), threading.Event(), say=said.append, **options), said


def test_once_without_an_aggregator_ends_with_4(tmp_path: Path) -> None:
    code, said = served(tmp_path, BrokenLink(Unreachable("nobody answers at URL", hint="start it")), once=True)
    assert code == 4
    assert said[-1].startswith("error: nobody answers at URL")


def test_who_is_refused_ends_with_5(tmp_path: Path) -> None:
    code, said = served(tmp_path, BrokenLink(Refused("the name is taken", why="by another key")))
    assert code == 5
    assert "why:   by another key" in said[-1]


def test_who_is_revoked_while_waiting_ends_with_5(tmp_path: Path) -> None:
    assert served(tmp_path, BrokenLink(None))[0] == 5


def test_after_an_outage_the_first_pull_is_short_so_that_it_is_soon_said_to_be_over(tmp_path: Path) -> None:
    waits: list[float] = []

    class Back(BrokenLink):
        def hello(self, hello: Hello) -> Welcome:
            return Welcome(hello.name, poll_s=240.0)

        def pull(self, wait_s: float) -> Delivery | None:
            waits.append(wait_s)
            if len(waits) == 1:
                raise Unreachable("nobody answers")
            if len(waits) == 3:
                raise Refused("revoked")
            return None

    _, said = served(tmp_path, Back(None))
    assert (waits[0], waits[1] <= 1.0, waits[2]) == (240.0, True, 240.0)
    assert "connected again" in said


def calls_with(
    clock: VirtualClock, said: list[str], tries: int, give_up: bool = False
) -> tuple[Retrier, Callable[[], str], list[float]]:
    """Calls on a virtual clock, one that fails so many times before it works, and when it is tried."""
    tried_at: list[float] = []
    failures = iter([Unreachable("nobody answers")] * tries)

    def call() -> str:
        tried_at.append(clock.now())
        if (error := next(failures, None)) is not None:
            raise error
        return "done"

    outage = ReconnectBackoff(now=clock.now, draw=lambda: 1.0)
    return Retrier(Waiting(clock), said.append, give_up, outage), call, tried_at


class Waiting(threading.Event):
    """Time passes by waiting for it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self.clock.advance(timeout or 0.0)
        return False


def test_an_outage_is_waited_out_and_said_once_a_minute() -> None:
    said: list[str] = []
    clock = VirtualClock()
    calls, call, tried_at = calls_with(clock, said, tries=30)
    assert calls.until_done(call) == "done"
    for before, at in pairwise(tried_at):
        assert at - before == pytest.approx(min(300.0, max(0.5, before / 2)))
    assert said[-1] == "connected again"
    assert len(said) - 1 == len(spaced(tried_at[:-1], 60.0))


def test_who_waits_tries_again_as_soon_as_another_thread_got_through() -> None:
    clock, outage, ticks = VirtualClock(), ReconnectBackoff(draw=lambda: 1.0), list[float]()
    outage.now = clock.now

    class AnotherGetsThrough(Waiting):
        def wait(self, timeout: float | None = None) -> bool:
            ticks.append(clock.now())
            if clock.now() > 100.0:
                outage.record_success()
            return super().wait(timeout)

    tried_at: list[float] = []

    def call() -> None:
        tried_at.append(clock.now())
        if clock.now() <= 100.0:
            raise Unreachable("nobody answers")

    Retrier(AnotherGetsThrough(clock), lambda line: None, outage=outage).until_done(call)
    assert 100.0 < tried_at[-1] <= 101.0, "its own wait would have lasted half a minute"


def test_a_call_that_fails_though_others_go_through_is_tried_less_and_less_often() -> None:
    clock = VirtualClock()
    outage, tried_at = ReconnectBackoff(now=clock.now, draw=lambda: 1.0), list[float]()

    class OthersGetThrough(Waiting):
        def wait(self, timeout: float | None = None) -> bool:
            outage.record_success()
            return super().wait(timeout)

    def call() -> None:
        tried_at.append(clock.now())
        if len(tried_at) < 12:
            raise Unreachable("the line was cut")

    Retrier(OthersGetThrough(clock), lambda line: None, outage=outage).until_done(call)
    waits = [after - before for before, after in pairwise(tried_at)]
    assert waits[0] <= 0.5, "once it follows another's success"
    assert waits[1:] == pytest.approx([min(300.0, max(0.5, at / 2)) for at in tried_at[1:-1]])


def test_who_was_given_a_time_waits_for_it_whatever_another_thread_does() -> None:
    clock = VirtualClock()
    outage = ReconnectBackoff(now=clock.now, draw=lambda: 1.0)

    class AnotherGetsThrough(Waiting):
        def wait(self, timeout: float | None = None) -> bool:
            outage.record_success()
            return super().wait(timeout)

    errors = iter([Unreachable("busy", after_s=7.0)])

    def call() -> None:
        if (error := next(errors, None)) is not None:
            raise error

    Retrier(AnotherGetsThrough(clock), lambda line: None, outage=outage).until_done(call)
    assert clock.now() == pytest.approx(7.5)


def spaced(times: Sequence[float], least_s: float) -> list[float]:
    """Of these times the first, and each that is so long after the one taken before."""
    taken = list(times[:1])
    for at in times[1:]:
        if at - taken[-1] >= least_s:
            taken.append(at)
    return taken


def test_the_waits_have_full_jitter_and_grow_with_the_time_and_not_with_the_tries() -> None:
    clock = VirtualClock()
    outage = ReconnectBackoff(now=clock.now, draw=lambda: 0.25)
    assert [outage.record_failure()[0] for _ in range(3)] == [0.125] * 3
    clock.advance(8.0)
    assert outage.record_failure()[0] == 1.0
    assert outage.record_success()
    assert not outage.record_success()
    assert outage.record_failure() == (0.125, True)


def test_with_once_an_outage_ends_it_after_a_minute() -> None:
    calls, call, _ = calls_with(VirtualClock(), [], tries=100, give_up=True)
    with pytest.raises(Unreachable):
        calls.until_done(call)


def test_once_ends_with_the_code_of_whatever_fails(tmp_path: Path) -> None:
    code, said = served(tmp_path, BrokenLink(UsageError("HTTPS_PROXY is not usable")), once=True)
    assert (code, said[-1]) == (2, "error: HTTPS_PROXY is not usable")


def test_a_full_disk_is_tried_again_and_a_refusal_is_not() -> None:
    said: list[str] = []
    errors = iter([DataLost("cannot write"), Refused("revoked")])
    calls = Retrier(threading.Event(), said.append, outage=ReconnectBackoff(draw=lambda: 0.0))

    def call() -> None:
        raise next(errors)

    with pytest.raises(Refused):
        calls.until_done(call)
    assert said == ["cannot write; trying again"]


def test_sigterm_ends_a_client_cleanly_while_nobody_answers(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import threading
from tests.client.test_service_outages import BrokenLink, device_in, serve, task_of
from thinwire.core.errors import Unreachable
from thinwire.core.signals import ended_by_signals
link, folder = BrokenLink(Unreachable("nobody")), Path({str(tmp_path)!r})
with ended_by_signals(threading.Event()) as ending:
    sys.exit(serve(link, [task_of()], device_in(folder), ending, say=lambda line: print(line, flush=True)))
"""
    process = Forked([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if "trying again" in line).startswith("nobody")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
