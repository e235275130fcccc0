"""Who has not heard that a run is over, since it or the aggregator was away then, is told when it comes, once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import FAILS, SILENT, Bench, scripted, three
from thinwire.core.errors import Refused
from thinwire.core.events import DeviceTold, Event, RoundClosed, RunStatusChanged
from thinwire.server import run_end
from thinwire.server.run_end import UNTOLD_S, RunEndNotices
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
    stops = [envelope.ask for envelope in bench.fleet.sent if envelope.ask.kind == "stop"]
    assert {stop.identity for stop in stops} == {bench.store.run(bench.run_id).identity}


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


def test_who_was_away_at_the_end_is_told_when_it_comes_back_in_the_same_life(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    bench.fleet.die("c", 1.5)
    bench.fleet.come("c", 300.0)
    assert serves(bench, 600.0) == ["a", "b", "c"] == told(bench)
    assert [e.ask.farewell for e in bench.fleet.sent if e.ask.kind == "stop"] == [False, False, True]
    assert serves(bench, 100.0) == []


def test_a_run_that_ends_by_a_defect_is_over_for_its_devices_too(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    bench.fleet.die("c", 1.5)
    bench.fleet.come("c", 300.0)

    def defect(event: Event) -> bool:
        if isinstance(event, RoundClosed) and event.round == 2:
            raise RuntimeError("a defect")
        return False

    assert serves(bench, 600.0, defect) == ["a", "b", "c"] == told(bench)
    assert bench.store.run(bench.run_id).status == "failed"


def test_who_comes_a_day_later_in_the_same_life_is_told_no_more(tmp_path: Path) -> None:
    bench = two_rounds(tmp_path)
    serves(bench, 1000.0, kill=over)
    before, waiting = len(bench.fleet.sent), RunEndNotices(bench.fleet, bench.store, bench.clock)
    bench.clock.advance(UNTOLD_S - 1000.0)
    waiting.tell("a")
    bench.clock.advance(1001.0)
    waiting.tell("b")
    assert [envelope.device for envelope in bench.fleet.sent[before:]] == ["a"]


def test_a_plan_is_hashed_once_however_many_are_to_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, hashed = two_rounds(tmp_path), list[object]()
    serves(bench, 1000.0, kill=over)

    def digest_of(plan: object) -> str:
        hashed.append(plan)
        return "0" * 64

    monkeypatch.setattr(run_end, "digest_of", digest_of)
    RunEndNotices(bench.fleet, bench.store, bench.clock)
    assert len(hashed) == 1


@pytest.mark.parametrize("heard", [True, False])
def test_a_device_that_is_renamed_has_heard_what_it_had_heard(tmp_path: Path, heard: bool) -> None:
    """b takes over a's old name: what a heard stays a's, whatever it is called."""
    bench = two_rounds(tmp_path)
    bench.fleet.die("b", 1.5)
    serves(bench, 300.0, kill=(lambda event: False) if heard else over)
    assert told(bench) == (["a", "c"] if heard else [])
    for name in ("a", "b"):
        bench.store.roster.enrol(name, f"{name}-print", name.encode(), "manual")
    bench.store.roster.rename("a", "z")
    bench.store.roster.rename("b", "a")
    assert bench.store.untold(bench.run_id) == (["a"] if heard else ["a", "c", "z"])


@pytest.mark.parametrize("sent", [(), ("a", "b", "c")])
def test_a_device_that_is_renamed_is_told_when_it_comes_by_its_new_name(tmp_path: Path, sent: tuple[str, ...]) -> None:
    """b takes over a's old name; a stop that was sent to a name is nobody's once that name is another's."""
    bench = two_rounds(tmp_path)
    serves(bench, 1000.0, kill=over)
    waiting = RunEndNotices(bench.fleet, bench.store, bench.clock)
    for name in sent:
        waiting.tell(name)
    for name in ("a", "b"):
        bench.store.roster.enrol(name, f"{name}-print", name.encode(), "manual")
    bench.store.roster.rename("a", "z")
    bench.store.roster.rename("b", "a")
    before = len(bench.fleet.sent)
    for name in ("z", "a", "b"):
        waiting.tell(name)
    assert [envelope.device for envelope in bench.fleet.sent[before:]] == ["z", "a"]


def without_a_model(folder: Path) -> Bench:
    """Nobody can give the first model; d comes after the run has failed."""
    devices = [scripted(name, lambda ask: FAILS) for name in ("a", "b", "c", "d")]
    bench = Bench(folder, devices, run={"init": "device"}, cohort={"wait_for": 3})
    bench.fleet.die("d")
    bench.fleet.come("d", 50.0)
    return bench


def test_who_was_asked_for_a_first_model_hears_that_there_will_be_none(tmp_path: Path) -> None:
    bench = without_a_model(tmp_path)
    assert serves(bench, 100.0) == ["a", "b", "c"] == told(bench)
    assert bench.store.run(bench.run_id).status == "failed"
    assert not any(e.ask.farewell for e in bench.fleet.sent if e.ask.kind == "stop")
    assert serves(bench, 100.0) == []


def test_who_was_asked_for_a_first_model_hears_of_the_end_after_a_kill_too(tmp_path: Path) -> None:
    bench = without_a_model(tmp_path)
    assert serves(bench, 100.0, kill=over) == []
    assert serves(bench, 100.0) == ["a", "b", "c"] == told(bench)


def test_who_is_asked_for_a_first_model_is_not_renamed_meanwhile(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a", lambda ask: SILENT)], run={"init": "device"})
    serves(bench, 10.0)
    assert bench.store.run(bench.run_id).status == "running"
    bench.store.roster.enrol("a", "a-print", b"a", "manual")
    with pytest.raises(Refused, match="takes part in"):
        bench.store.roster.rename("a", "z")
