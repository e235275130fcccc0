"""Devices that lost an aggregator together do not come back together (virtual time)."""

from __future__ import annotations

import heapq
import random
import threading
from collections import Counter

import pytest

from thinwire.client.calls import ReconnectBackoff, Retrier
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import Refused, ThinwireError, Unreachable

DEVICES = 10_000
SPREAD_S = DEVICES / 100  # as the device API gives it: some 100 come back each second


def returns(down_s: float, devices: int = DEVICES, spread_s: float = SPREAD_S) -> list[float]:
    """When each device is connected again, after all of them lost an aggregator that is away for so long."""
    clock, seeded = VirtualClock(), random.Random(7)
    outages = [ReconnectBackoff(now=clock.now, draw=seeded.random) for _ in range(devices)]
    tries = [(outage.record_failure(within_s=spread_s)[0], device) for device, outage in enumerate(outages)]
    heapq.heapify(tries)
    back = []
    while tries:
        at, device = heapq.heappop(tries)
        clock.at = at
        if at >= down_s:
            back.append(at)
        else:
            heapq.heappush(tries, (at + outages[device].record_failure(within_s=spread_s)[0], device))
    return back


@pytest.mark.parametrize("down_s", [0.0, 0.5, 5.0, 60.0, 100.0, 600.0])
def test_ten_thousand_devices_come_back_at_a_bounded_rate(down_s: float) -> None:
    back = returns(down_s)
    a_second = Counter(int(at) for at in back)
    assert max(a_second.values()) < 200
    assert max(back) - down_s <= 300


@pytest.mark.parametrize("down_s", [1.0, 3.0, 10.0, 60.0, 400.0])
def test_a_few_devices_are_late_by_at_most_half_of_what_the_outage_lasted(down_s: float) -> None:
    assert max(returns(down_s, devices=20, spread_s=0.2)) <= down_s + max(0.5, down_s / 2)


def test_two_threads_of_a_device_wait_for_one_moment() -> None:
    clock, draws = VirtualClock(), iter([0.9, 0.1])
    outage = ReconnectBackoff(now=clock.now, draw=lambda: next(draws))
    assert outage.record_failure(within_s=100.0)[0] == 90.0
    clock.advance(30.0)
    assert outage.record_failure(within_s=100.0)[0] == 60.0
    clock.advance(60.0)
    assert outage.record_failure(within_s=100.0)[0] == pytest.approx(20.0)


def test_a_few_devices_are_back_at_once() -> None:
    assert max(returns(0.0, devices=20, spread_s=0.2)) <= 0.5


def test_who_was_told_when_to_come_again_does_not_come_before() -> None:
    clock = VirtualClock()
    outage = ReconnectBackoff(now=clock.now, draw=lambda: 0.5)
    assert outage.record_failure(after_s=7.0)[0] == 7.25
    clock.advance(7.25)
    assert outage.record_failure(after_s=7.0, within_s=10.0)[0] == 17.0


def test_a_spread_above_five_minutes_is_kept() -> None:
    clock = VirtualClock()
    outage = ReconnectBackoff(now=clock.now, draw=lambda: 1.0)
    assert outage.record_failure(within_s=1000.0)[0] == 1000.0
    clock.advance(1000.0)
    assert outage.record_failure(within_s=1000.0)[0] == 2000.0
    clock.advance(5000.0)
    assert outage.record_failure()[0] == 300.0


def test_a_long_outage_takes_few_tries() -> None:
    clock, seeded = VirtualClock(), random.Random(7)
    outages = [ReconnectBackoff(now=clock.now, draw=seeded.random) for _ in range(100)]
    tries = 0
    for outage in outages:
        clock.at = 0.0
        while clock.at < 600.0:
            clock.at += outage.record_failure()[0]
            tries += 1
    assert 20 < tries / len(outages) < 40


def test_what_why_and_what_to_try_are_said() -> None:
    said: list[str] = []
    errors = iter([Unreachable("nobody answers", "no route", "plug it in"), Refused("revoked")])

    def call() -> None:
        error: ThinwireError = next(errors)
        raise error

    with pytest.raises(Refused):
        Retrier(threading.Event(), said.append, outage=ReconnectBackoff(draw=lambda: 0.0)).until_done(call)
    assert said == ["nobody answers (no route); trying again\ntry:   plug it in"]
