"""A restart after the last round, or while the last model is measured, ends the run as no restart would have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import (
    FAILS,
    LAYOUT,
    Bench,
    drive_through,
    every,
    killed,
    killing,
    outcome,
    scripted,
    three,
)
from tests.support.server_bench import change as made_up_change
from thinwire.core.events import Evaluated, Event, RoundClosed
from thinwire.core.types import Assignment, Vector
from thinwire.server.context import RECONNECT_S, StopCommand
from thinwire.simulation import Behavior, ScriptedDevice, SyntheticUpdates


def measured(bench: Bench) -> list[tuple[int, dict[str, float], int, tuple[int, int]]]:
    events = bench.events(Evaluated)
    return [(e.version, dict(e.metrics), e.clients, (e.payload_bytes, e.models_sent)) for e in events]


def stops(bench: Bench) -> list[int]:
    """How many each device was sent."""
    return [len(bench.assignments(name, "stop")) for name in bench.fleet.devices]


def two_rounds(folder: Path) -> Bench:
    return Bench(folder, three(), run={"rounds": 2}, cohort={"deadline_s": 60})


def last_closed(event: Event) -> bool:
    return isinstance(event, RoundClosed) and event.round == 2


def killed_at_the_end(folder: Path) -> Bench:
    bench = two_rounds(folder)
    with pytest.raises(Killed):
        bench.drive(on_event=killing(last_closed))
    bench.restart()
    return bench


def test_a_kill_at_any_commit_measures_every_version_and_tells_all_that_it_is_over(tmp_path: Path) -> None:
    whole = two_rounds(tmp_path / "whole")
    places = drive_through(whole)
    assert stops(whole) == [1, 1, 1] and len(measured(whole)) == 3
    assert [models for *_, (_, models) in measured(whole)] == [0, 0, 3]
    row = whole.store.run(whole.run_id)
    assert row.dense_down == 9 * 4 * LAYOUT.size <= row.payload_down  # 3 models a round, and the last to be measured

    def check(again: Bench, where: str) -> None:
        assert (measured(again), stops(again)) == (measured(whole), [1, 1, 1]), where

    killed(two_rounds, tmp_path, places, check)


def test_who_comes_back_a_while_later_measures_and_is_told_too(tmp_path: Path) -> None:
    bench = killed_at_the_end(tmp_path)
    bench.fleet.crash("b")
    bench.fleet.connect("b", RECONNECT_S / 2)
    bench.drive()
    assert measured(bench)[-1][::2] == (2, 3) and stops(bench) == [1, 1, 1]


def test_who_does_not_come_back_is_waited_for_no_longer_than_anywhere(tmp_path: Path) -> None:
    bench = killed_at_the_end(tmp_path)
    bench.fleet.crash("b")
    bench.fleet.poll(0.0)
    bench.restart()
    began = bench.clock.now()
    row = bench.drive()
    assert row.status == "done" and RECONNECT_S <= bench.clock.now() - began < RECONNECT_S + 5.0
    assert measured(bench)[-1][::2] == (2, 2) and stops(bench) == [1, 0, 1]


def two_that_differ(folder: Path) -> Bench:
    """Of the second, five seconds slower, the model misses the target by far."""

    def device(name: str, seconds: float, loss: float) -> ScriptedDevice:
        def changed(assignment: Assignment) -> Vector:
            return made_up_change(name, assignment)

        return ScriptedDevice(
            name, SyntheticUpdates(name, LAYOUT, changed, steps=5, loss=lambda assignment: loss), every(seconds)
        )

    target = {"metric": "loss", "value": 1.0}
    devices = [device("a", 1.0, 0.1), device("b", 6.0, 9.0)]
    return Bench(folder, devices, run={"rounds": 2, "target": target}, cohort={"deadline_s": 60})


@pytest.mark.parametrize("at", [12.5, 14.0], ids=["nobody has measured", "one has"])
@pytest.mark.parametrize("how", ["service", "killed"])
@pytest.mark.parametrize("lost", [False, True], ids=["devices stay", "devices die too"])
def test_a_part_of_the_devices_is_not_taken_for_all(tmp_path: Path, at: float, how: str, lost: bool) -> None:
    """It ends while the last model is measured, from 12 s to 18 s."""
    whole, again = two_that_differ(tmp_path / "whole"), two_that_differ(tmp_path / "again")
    status = whole.drive().status_text
    assert status.endswith("did not reach 1") and 18.0 <= whole.clock.now() < 19.0

    def stop() -> StopCommand:
        if again.clock.now() < at:
            return None
        if how == "killed":
            raise Killed
        return "service"

    if how == "killed":
        with pytest.raises(Killed):
            again.drive(stop=stop)
    else:
        assert again.drive(stop=stop).status == "running"
    assert len(again.events(Evaluated)) == 2
    if lost:
        for name in "ab":
            again.fleet.crash(name)
            again.fleet.connect(name)
    again.restart()
    assert again.drive().status_text == status
    assert (measured(again), outcome(again)) == (measured(whole), outcome(whole))
    assert stops(again) == [1, 1] and not again.fleet.spool.headers()


def test_a_run_that_fails_as_soon_as_it_goes_on_tells_its_devices(tmp_path: Path) -> None:
    cohort = {"retry_limit": 0}
    bench = Bench(tmp_path, [scripted("a", lambda assignment: FAILS)], run={"rounds": 5}, cohort=cohort)
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, RoundClosed)))
    bench.restart()
    assert bench.drive().status == "failed"
    assert stops(bench) == [1]


def test_a_run_that_is_stopped_as_soon_as_it_goes_on_tells_its_devices(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: Behavior()), run={"rounds": 5})
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, RoundClosed)))
    bench.restart()
    assert bench.drive(stop=lambda: "run").status == "stopped"
    assert stops(bench) == [1, 1, 1]


def test_a_run_that_is_stopped_while_it_waits_for_devices_to_come_back_measures_nothing_more(tmp_path: Path) -> None:
    bench = killed_at_the_end(tmp_path)
    bench.fleet.crash("b")
    bench.fleet.poll(0.0)
    bench.restart()
    began, before = bench.clock.now(), measured(bench)
    row = bench.drive(stop=lambda: "run" if bench.clock.now() > began + 5.0 else None)
    assert (row.status, row.status_text) == ("stopped", "stopped by a person after 2 of 2 rounds")
    assert measured(bench) == before and not any(bench.assignments(name, "evaluate") for name in "abc")
