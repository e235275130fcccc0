"""What is recorded of a round in the middle of which no aggregator was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.bench import Bench, ToldFleet, scripted
from tests.server.crashes import Killed
from thinwire.core.events import RoundClosed, RoundTakenUp
from thinwire.simulation import ScriptedDevice
from thinwire.store import RoundRow
from thinwire.store.why import Why, why

REAL_S = 2.0  # that a step may really take, which on this clock takes no time
MODES: dict[str, dict[str, Any]] = {"rounds": {}, "overlap": {"local": {"lr": 1.0, "overlap": {"max_delay": 1}}}}


def bench_of(folder: Path, mode: str, *devices: ScriptedDevice) -> Bench:
    for device in devices:
        device.overlaps = mode == "overlap"
    return Bench(folder, devices, ToldFleet, run={"rounds": 1}, cohort={"deadline_s": 600}, **MODES[mode])


def dies(bench: Bench, at_s: float, *, away_s: float, known: bool = True) -> None:
    """The aggregator at this time, and the next one starts so much later."""

    def alive() -> None:
        if bench.clock.now() >= at_s:
            raise Killed

    with pytest.raises(Killed):
        bench.drive(stop=alive)
    gone_at = bench.clock.wall()
    bench.clock.advance(away_s)
    if known:
        bench.store._clock = bench.clock  # that of the service
        bench.store.record_restart(gone_at)
    bench.restart()


def first_round(bench: Bench) -> tuple[RoundRow, Why]:
    (found,) = bench.store.rounds(bench.run_id)
    return found, why(found, bench.store.updates(bench.run_id, 1), 620)


@pytest.mark.parametrize("mode", MODES)
def test_the_time_before_a_kill_and_that_without_an_aggregator_are_of_the_round(tmp_path: Path, mode: str) -> None:
    bench = bench_of(tmp_path, mode, scripted("a", 2.0), scripted("b", 20.0))
    began = bench.clock.wall()
    dies(bench, 10.0, away_s=100.0)
    bench.drive()
    found, told = first_round(bench)
    assert found.seconds == pytest.approx(bench.events(RoundClosed)[0].at - began, abs=0.1)
    assert found.seconds is not None
    assert found.seconds > 100.0
    ((gone_at, back_at),) = found.away
    assert (gone_at - began, back_at - gone_at) == pytest.approx((10.0, 100.0), abs=0.5)
    assert sum(told.stages.values()) == pytest.approx(found.seconds, abs=REAL_S)
    assert told.stages["away"] > 80.0
    assert ": the aggregator was away for 1 min 40 s; waited" in told.sentence
    assert found.missed_s == pytest.approx(100.0 + 8.0, abs=0.5), "it goes on from the last event before"


def test_each_of_two_absences_is_counted(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    began = bench.clock.wall()
    dies(bench, 5.0, away_s=3.0)
    dies(bench, 12.0, away_s=4.0)
    bench.drive()
    found, told = first_round(bench)
    assert [until - since for since, until in found.away] == pytest.approx([3.0, 4.0], abs=0.5)
    assert found.seconds is not None
    assert found.seconds - found.missed_s == pytest.approx(bench.events(RoundClosed)[0].elapsed_s, abs=0.1)
    assert found.seconds == pytest.approx(bench.events(RoundClosed)[0].at - began, abs=0.1)
    assert sum(told.stages.values()) == pytest.approx(found.seconds, abs=REAL_S)
    assert told.sentence.endswith("; the aggregator was away for 7.0 s meanwhile.")


def test_where_nobody_noted_when_the_aggregator_ended_its_last_event_tells(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    dies(bench, 10.0, away_s=50.0, known=False)
    before = [event.at for _, event in bench.store.events(bench.run_id)][-1]
    bench.drive()
    assert [event.gone_at for event in bench.events(RoundTakenUp)] == [before]


def test_a_round_that_nobody_interrupted_was_never_without_an_aggregator(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0))
    bench.drive()
    found, told = first_round(bench)
    assert (found.away, "away" in told.stages, bench.events(RoundTakenUp)) == ([], False, [])
