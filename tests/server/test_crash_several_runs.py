"""A crash anywhere of a service with three runs changes none of them: after each append, each commit and each fsync."""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Fate, Place, each_death, unequal
from tests.support.server_bench import SILENT
from tests.support.several_runs import Site, steady
from thinwire.core.events import RoundClosed, RoundOpened
from thinwire.core.types import Assignment
from thinwire.server.round_close import AggregationQueue, AggregationResult
from thinwire.simulation import Behavior

SHARES = 2  # of all places: one test each
SPEEDS = {"a": 1.0, "b": 1.4, "c": 2.3, "d": 0.9, "e": 7.0}


def lives(folder: Path, fate: Fate, *third: dict[str, Any]) -> Site:
    """Three runs of different shape before five devices, of which one is slow and one loses an assignment."""
    site = Site(folder, steady(SPEEDS), fate)

    def loses(assignment: Assignment) -> Behavior:
        if assignment.run == site.runs[0] and assignment.round == 2:
            return SILENT
        return Behavior(compute_s=SPEEDS["c"])

    site.fleet.devices["c"].script = loses
    site.submit(cohort={"clients": 3, "deadline_s": 20, "min_updates": 1})
    site.submit(run={"seed": 1, "priority": 2.0}, cohort={"clients": 2, "deadline_s": 40, "min_updates": 1})
    for cohort in third or ({"clients": 2, "over_select": 0.5, "deadline_s": 30},):
        site.submit(run={"seed": 2}, cohort=cohort)
    site.serve()
    return site


@cache
def undisturbed(folder: Path) -> tuple[list[tuple[object, ...]], list[Place]]:
    site = lives(folder, fate := Fate())
    assert [site.store.run(run_id).status for run_id in site.runs] == ["done"] * 3
    first, second, third = ([e.at for e in site.events(run_id, RoundOpened)] for run_id in site.runs)
    assert max(first[0], second[0], third[0]) < min(first[-1], second[-1], third[-1]), "the runs go on at once"
    return [site.result(run_id) for run_id in site.runs], fate.places


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_no_run(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, share: int) -> None:
    results, places = undisturbed(tmp_path_factory.getbasetemp())

    def check(site: Site, where: str) -> None:
        assert [site.result(run_id) for run_id in site.runs] == results, where

    each_death(tmp_path, unequal(places)[share::SHARES], lives, check)


def test_a_crash_anywhere_beside_a_buffered_run_loses_and_repeats_nothing(tmp_path: Path) -> None:
    buffered = {"mode": "buffered", "buffer": 2, "max_concurrency": 2, "deadline_s": 30}
    lives(tmp_path / "undisturbed", fate := Fate(), buffered)

    def live(folder: Path, fate: Fate) -> Site:
        return lives(folder, fate, buffered)

    def check(site: Site, where: str) -> None:
        for run_id in site.runs:
            status, *_ = site.result(run_id)
            assert (status, len(site.events(run_id, RoundClosed))) == ("done", 3), f"{run_id}, {where}"

    each_death(tmp_path, unequal(fate.places)[::5], live, check)


def test_how_long_a_sum_takes_changes_no_run(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, asked = AggregationQueue.finished, count()

    def late(queue: AggregationQueue, wait_s: float = 0.0) -> list[AggregationResult]:
        return finished(queue, wait_s) if next(asked) % 3 == 0 else []

    monkeypatch.setattr(AggregationQueue, "finished", late)
    site = lives(tmp_path, Fate())
    assert [site.result(run_id) for run_id in site.runs] == undisturbed(tmp_path_factory.getbasetemp())[0]
