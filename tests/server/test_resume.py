"""A round in which the aggregator ends and a device leaves: it comes to the same as without the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import Bench, ToldFleet, drive_through, every, killed, killing, outcome, work
from thinwire.core.events import ClientFailed, ClientReconnected, RoundClosed, UpdateAccepted, UpdateDropped
from thinwire.simulation import ScriptedDevice

MODES: dict[str, dict[str, Any]] = {
    "rounds": {},
    "buffered": {"cohort": {"mode": "buffered", "buffer": 3}},
    "overlap": {"local": {"lr": 1.0, "overlap": {"max_delay": 1}}},
}


def bench_of(folder: Path, seconds: dict[str, float], mode: str = "rounds", **cohort: object) -> Bench:
    """So long does each device need; nobody reaches the deadline."""
    devices = [ScriptedDevice(n, work(n), every(s), overlaps=mode == "overlap") for n, s in seconds.items()]
    sections = {"run": {"rounds": 2}, **MODES[mode]}
    sections["cohort"] = {"deadline_s": 300, **sections.get("cohort", {}), **cohort}
    return Bench(folder, devices, ToldFleet, **sections)


def goes(folder: Path, mode: str, back_s: float = 10.0, seconds: tuple[float, ...] = (30.0, 30.0, 5.0)) -> Bench:
    """The third device leaves after 2 s, and comes back."""
    bench = bench_of(folder, dict(zip("abc", seconds, strict=True)), mode)
    bench.fleet.crash("c", 2.0)
    bench.fleet.connect("c", back_s)
    return bench


def dies_at(bench: Bench, at_s: float) -> Bench:
    """The aggregator, once; then another one takes the run up."""

    def alive() -> None:
        if bench.clock.now() >= at_s:
            raise Killed

    with pytest.raises(Killed):
        bench.drive(stop=alive)
    bench.restart()
    bench.drive()
    return bench


@pytest.mark.parametrize("mode", MODES)
def test_who_left_before_the_end_and_comes_back_after_it_gets_its_assignment_again(tmp_path: Path, mode: str) -> None:
    undisturbed = goes(tmp_path / "undisturbed", mode)
    undisturbed.drive()
    bench = dies_at(goes(tmp_path / "killed", mode), 4.0)
    assert outcome(bench) == outcome(undisturbed)
    assert len(bench.events(RoundClosed)[0].aggregated) == 3
    assert bench.clock.now() == pytest.approx(undisturbed.clock.now(), abs=1.0), "nobody waited for a deadline"


@pytest.mark.parametrize("mode", MODES)
def test_who_left_and_was_back_before_the_end_is_waited_for_after_it(tmp_path: Path, mode: str) -> None:
    leaves = partial(goes, mode=mode, back_s=3.0, seconds=(6.0, 7.0, 10.0))
    undisturbed = leaves(tmp_path / "undisturbed")
    undisturbed.drive()
    bench = dies_at(leaves(tmp_path / "killed"), 8.0)
    assert outcome(bench) == outcome(undisturbed)
    assert [e.device for e in bench.events(ClientReconnected)] == ["c"]


@pytest.mark.parametrize("mode", MODES)
def test_a_kill_at_any_commit_changes_nothing_where_a_device_leaves_and_comes_back(tmp_path: Path, mode: str) -> None:
    leaves = partial(goes, mode=mode, back_s=3.0, seconds=(6.0, 7.0, 10.0))
    undisturbed = leaves(tmp_path / "undisturbed")
    places = drive_through(undisturbed)

    def check(bench: Bench, where: str) -> None:
        assert outcome(bench) == outcome(undisturbed), where

    killed(leaves, tmp_path, places, check)


def enrolled(bench: Bench) -> Bench:
    for name in bench.fleet.devices:
        bench.store.roster.enrol(name, name * 64, name.encode(), "loopback")
    return bench


def test_a_round_whose_only_answer_is_refused_at_a_restart_closes_and_the_run_goes_on(tmp_path: Path) -> None:
    """x and y left and came back, y left again: x answers, and is revoked while the aggregator is down."""
    bench = enrolled(bench_of(tmp_path, {"x": 6.0, "y": 9.0}, min_updates=1, wait_for=1, retry_limit=0))
    for name, left_s, back_s in (("y", 1.0, 1.2), ("x", 2.0, 2.2), ("y", 3.0, 60.0)):
        bench.fleet.crash(name, left_s)
        bench.fleet.connect(name, back_s)
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, UpdateAccepted)))
    bench.store.roster.revoke("x")
    bench.fleet.revoke_access(["x"])
    bench.restart()
    row = bench.drive()
    assert bench.reasons()[0] == "too-few"
    assert [(e.device, e.reason) for e in bench.events(UpdateDropped)] == [("x", "revoked")]
    assert row.status_text.startswith("1 round in a row made no step"), "and no defect of ours"
    hint = f"; try: the reason of each round: thinwire runs show {row.run_id}"
    assert row.status_text.endswith(hint)
    assert {e.kind for e in bench.events(ClientFailed)} == {"offline"}
