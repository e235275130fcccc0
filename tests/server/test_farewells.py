"""Who has not heard that a run is over when the aggregator ends is told by the next one, once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.bench import FAILS, Bench, scripted, three
from tests.server.crashes import Killed
from thinwire.core.events import DeviceTold, Event, RunStatusChanged
from thinwire.server.farewells import UNTOLD_S
from thinwire.server.service import serve
from thinwire.simulation import Script


def over(event: Event) -> bool:
    return isinstance(event, RunStatusChanged) and event.status in ("done", "failed", "stopped")


def serves(bench: Bench, seconds: float, kill: Callable[[Event], bool] = lambda event: False) -> list[str]:
    """One life of the service, of so many seconds or until such an event; gives who was sent a stop meanwhile."""
    ending, until, poll = threading.Event(), bench.clock.now() + seconds, bench.fleet.poll
    before = len(bench.fleet.sent)

    def polled(wait_s: float) -> object:
        if bench.clock.now() >= until:
            ending.set()
        return poll(wait_s)

    def on_event(run_id: str, event: Event) -> None:
        if kill(event):
            raise Killed

    bench.fleet.poll = polled  # type: ignore[method-assign, assignment]
    with contextlib.suppress(Killed):
        serve(bench.fleet, bench.store, bench.home, clock=bench.clock, ending=ending, on_event=on_event)
    bench.restart()
    return sorted(envelope.device for envelope in bench.fleet.sent[before:] if envelope.ask.kind == "stop")


def told(bench: Bench) -> list[str]:
    return sorted(event.device for event in bench.events(DeviceTold))


def two_rounds(folder: Path, third: Script | float = 1.0) -> Bench:
    return Bench(folder, three(third), run={"rounds": 2}, cohort={"deadline_s": 60})


def test_who_has_heard_it_is_not_told_again_after_a_restart(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    assert serves(bench, 100.0) == ["a", "b", "c"] == told(bench)
    assert serves(bench, 100.0) == []


@pytest.mark.parametrize("rounds", ["done", "failed"])
def test_a_kill_after_the_last_status_and_before_anybody_is_told(tmp_path: Path, rounds: str) -> None:
    bench = two_rounds(tmp_path)
    if rounds == "failed":
        bench = Bench(tmp_path / "failed", [scripted("a", lambda ask: FAILS)], cohort={"retry_limit": 0})
    assert serves(bench, 1000.0, kill=over) == [] == told(bench)
    assert bench.store.run(bench.run_id).status == rounds
    names = sorted(bench.fleet.devices)
    assert serves(bench, 100.0) == names == told(bench)
    assert serves(bench, 100.0) == []
    assert not any(device.outbox for device in bench.fleet.devices.values())


def test_who_was_sent_it_and_has_not_taken_it_is_told_when_it_comes(tmp_path: Path) -> None:
    """c goes when the run ends, and comes in the next aggregator's time."""
    bench = two_rounds(tmp_path)

    def gone(event: Event) -> bool:
        if over(event):
            bench.fleet.die("c")
        return False

    assert serves(bench, 50.0, gone) == ["a", "b", "c"]
    assert told(bench) == ["a", "b"]
    bench.fleet.come("c", 20.0)
    assert serves(bench, 10.0) == []
    assert serves(bench, 100.0) == ["c"]
    assert told(bench) == ["a", "b", "c"]


def test_who_comes_a_day_later_is_told_no_more(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    serves(bench, 1000.0, kill=over)
    bench.clock.advance(UNTOLD_S + 1.0)
    assert serves(bench, 100.0) == []


def test_who_was_asked_nothing_in_a_run_hears_nothing_of_its_end(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    serves(bench, 1000.0, kill=over)
    bench.fleet.add(scripted("d"))
    assert serves(bench, 100.0) == ["a", "b", "c"]
