"""What is recorded of a round in the middle of which no aggregator was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import Bench, ToldFleet, scripted
from thinwire.core.events import RoundClosed, RoundOpened, RoundResumed
from thinwire.server.state.run_state import RunState
from thinwire.simulation import ScriptedDevice
from thinwire.store import RoundRow
from thinwire.store.round_explanation import RoundExplanation, explain_round

DAY_S = 86_400.0
REAL_S = 2.0  # that a step may really take, which on this clock takes no time
MODES: dict[str, dict[str, Any]] = {"rounds": {}, "overlap": {"local": {"lr": 1.0, "overlap": {"max_delay": 1}}}}


def bench_of(folder: Path, mode: str, *devices: ScriptedDevice) -> Bench:
    for device in devices:
        device.overlaps = mode == "overlap"
    return Bench(folder, devices, ToldFleet, run={"rounds": 1}, cohort={"deadline_s": 600}, **MODES[mode])


def dies(bench: Bench, at_s: float, *, away_s: float, known: bool = True, set_by_s: float = 0.0) -> None:
    """The aggregator at this time, and the next one starts so much later; meanwhile somebody sets the wall clock."""

    def alive() -> None:
        if bench.clock.now() >= at_s:
            raise Killed

    with pytest.raises(Killed):
        bench.drive(stop=alive)
    down_since = bench.clock.wall()
    bench.clock.advance(away_s)
    bench.clock.origin += set_by_s
    if known:
        bench.store.record_restart(bench.clock.wall(), down_since)
    bench.restart()


def first_round(bench: Bench) -> tuple[RoundRow, RoundExplanation]:
    (found,) = bench.store.rounds(bench.run_id)
    return found, explain_round(found, bench.store.updates(bench.run_id, 1))


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
    ((down_since, back_at),) = found.downtimes
    assert (down_since - began, back_at - down_since) == pytest.approx((10.0, 100.0), abs=0.5)
    assert sum(told.stages.values()) == pytest.approx(found.seconds, abs=REAL_S)
    assert told.stages["downtime"] > 80.0
    assert ": the aggregator was offline for 1 min 40 s; waited" in told.sentence
    assert found.missed_s == pytest.approx(100.0 + 8.0, abs=0.5), "it goes on from the last event before"


def test_each_of_two_absences_is_counted(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    began = bench.clock.wall()
    dies(bench, 5.0, away_s=3.0)
    dies(bench, 12.0, away_s=4.0)
    bench.drive()
    found, told = first_round(bench)
    assert [until - since for since, until in found.downtimes] == pytest.approx([3.0, 4.0], abs=0.5)
    assert found.seconds is not None
    assert found.seconds - found.missed_s == pytest.approx(bench.events(RoundClosed)[0].elapsed_s, abs=0.1)
    assert found.seconds == pytest.approx(bench.events(RoundClosed)[0].at - began, abs=0.1)
    assert sum(told.stages.values()) == pytest.approx(found.seconds, abs=REAL_S)
    assert told.sentence.endswith("; the aggregator was offline for 7.0 s meanwhile.")


def test_where_nobody_noted_when_the_aggregator_ended_its_last_event_tells(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    dies(bench, 10.0, away_s=50.0, known=False)
    before = [event.at for _, event in bench.store.events(bench.run_id)][-1]
    bench.drive()
    assert [event.down_since for event in bench.events(RoundResumed)] == [before]


def test_a_round_that_nobody_interrupted_was_never_without_an_aggregator(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0))
    bench.drive()
    found, told = first_round(bench)
    assert (found.downtimes, "downtime" in told.stages, bench.events(RoundResumed)) == ([], False, [])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("set_by_s", [3 * 365 * DAY_S, -DAY_S])
def test_a_wall_clock_that_was_set_meanwhile_gives_no_downtime_and_no_stage(
    tmp_path: Path, mode: str, set_by_s: float
) -> None:
    bench = bench_of(tmp_path, mode, scripted("a", 2.0), scripted("b", 20.0))
    dies(bench, 10.0, away_s=4.0, set_by_s=set_by_s)
    bench.drive()
    found, told = first_round(bench)
    assert found.seconds == pytest.approx(20.0 - 4.0, abs=0.5)
    assert found.missed_s == pytest.approx(8.0, abs=0.5), "from the last event before on"
    assert (
        told.sentence
        == "Round 1 took 16 s; the aggregator was offline meanwhile for an unknown time: the clock was set."
    )
    assert (told.stages, told.device, told.waited_for) == ({}, "", ())


def test_an_absence_after_the_clock_was_set_back_is_found_by_the_order_of_the_journal(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    dies(bench, 5.0, away_s=3.0, set_by_s=-DAY_S)
    dies(bench, 12.0, away_s=4.0)
    bench.drive()
    found, told = first_round(bench)
    assert [until - since for since, until in found.downtimes] == pytest.approx([3.0 - DAY_S, 4.0], abs=0.5)
    assert found.missed_s == pytest.approx(3.0 + 4.0 + 4.0, abs=0.5), "of the first what was before it"
    assert told.sentence.endswith("; the aggregator was offline meanwhile for an unknown time: the clock was set.")


def test_where_the_clocks_contradict_each_other_the_heartbeat_tells_what_the_run_s_clock_missed() -> None:
    past = RunState()
    past.apply(RoundOpened(1000.0, 1, 0.0, 0, "", ["a"], {"a": "toy-1.1.a"}, "", 600.0, 1, 1))
    assert past.missed_s(down_since=1010.0, at=1110.0, elapsed_s=0.0) == 110.0, "from the last event on"
    assert past.missed_s(down_since=400.0, at=500.0, elapsed_s=0.0) == 100.0, "the clock was set back before the end"
    assert past.missed_s(down_since=1e9, at=1e9 + 100.0, elapsed_s=0.0) == 100.0, "or forward"
    assert past.missed_s(down_since=1010.0, at=1e9, elapsed_s=0.0) == 10.0, "how long it was away is not known"


def test_an_absence_of_less_than_a_second_is_not_worth_a_word(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "rounds", scripted("a", 2.0), scripted("b", 20.0))
    dies(bench, 10.0, away_s=0.4)
    bench.drive()
    assert "downtime" not in first_round(bench)[1].sentence
