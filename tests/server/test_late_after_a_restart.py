"""A device that is at work for a round that has closed loses its process, and the aggregator its own: it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Killed
from tests.support.server_bench import Bench, outcome, scripted
from thinwire.core.events import ClientFailed
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior

DGC = {"local": {"lr": 1.0, "steps": 1, "clip_grad": 2.0}, "uplink": {"codec": "dgc(0.1)"}}


def driven(bench: Bench, dies_at: float | None) -> Bench:
    """To the end, with one death of the aggregator at most."""
    left = [dies_at]

    def alive() -> None:
        if left[0] is not None and bench.clock.now() >= left[0]:
            left[0] = None
            raise Killed

    try:
        bench.drive(stop=alive)
    except Killed:
        bench.restart()
        bench.drive()
    return bench


def alone(folder: Path, dies_at: float | None) -> Bench:
    """One device that needs 900 s of 600 that it is given, and is away for two seconds."""
    bench = Bench(folder, [scripted("a", 900.0)], run={"rounds": 2}, cohort={"deadline_s": 600})
    bench.fleet.grace_s = 4.0
    bench.fleet.crash("a", 649.0)
    bench.fleet.connect("a", 651.0)
    return driven(bench, dies_at)


def slow_at_first(assignment: Assignment) -> Behavior:
    return Behavior(compute_s=8.0 if assignment.round == 1 else 1.0)


def among_others(folder: Path, dies_at: float | None, sections: dict[str, Any]) -> Bench:
    """The third is late in its first round, and away for half a second while it works on it."""
    devices = [scripted("a", 4.0), scripted("b", 4.0), scripted("c", slow_at_first)]
    given = {"deadline_s": 6, "min_updates": 1, **sections.get("cohort", {})}
    bench = Bench(folder, devices, **{**sections, "run": {"rounds": 5}, "cohort": given})
    bench.fleet.grace_s = 4.0
    bench.fleet.crash("c", 7.0)
    bench.fleet.connect("c", 7.5)
    return driven(bench, dies_at)


def test_nobody_stands_idle_for_the_rounds_that_it_may_be_late(tmp_path: Path) -> None:
    whole, again = alone(tmp_path / "whole", None), alone(tmp_path / "killed", 650.0)
    assert outcome(again) == outcome(whole)
    assert again.clock.now() == whole.clock.now()
    assert {(e.round, e.kind) for e in again.events(ClientFailed)} == {(3, "over")}, "at work at the end"


@pytest.mark.parametrize(
    "sections",
    [{}, {"downlink": {"codec": "int8"}}, DGC, {"cohort": {"late": "drop"}}],
    ids=["plain", "compressed downlink", "clipped", "dropped"],
)
def test_a_late_device_is_selected_again_as_it_was(tmp_path: Path, sections: dict[str, Any]) -> None:
    whole = among_others(tmp_path / "whole", None, sections)
    again = among_others(tmp_path / "killed", 7.2, sections)
    assert outcome(again) == outcome(whole)
    assert not again.events(ClientFailed)
    first, once_more = (
        replace(assignment, plan={}, parts=()) for assignment in again.assignments("c") if assignment.round == 1
    )
    assert once_more == first


def test_one_that_has_answered_meanwhile_counts_once(tmp_path: Path) -> None:
    """Its answer to the closed round is made and on its way when the aggregator ends."""

    def late(assignment: Assignment) -> Behavior:
        return Behavior(compute_s=6.5, upload_s=1.0) if assignment.round == 1 else Behavior()

    def begun(folder: Path, dies_at: float | None) -> Bench:
        devices = [scripted("a", 4.0), scripted("b", 4.0), scripted("c", late)]
        cohort = {"deadline_s": 6, "min_updates": 1}
        return driven(Bench(folder, devices, run={"rounds": 4}, cohort=cohort), dies_at)

    whole = begun(tmp_path / "whole", None)
    for at in (6.2, 6.8, 7.6):
        assert outcome(begun(tmp_path / str(at), at)) == outcome(whole), at
