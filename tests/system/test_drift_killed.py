"""SCAFFOLD over real processes: an aggregator is killed at drawn moments, and the run comes to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.gated import DEVICES, KILLED, Gated, gated_run
from tests.system.moments import drawn
from tests.system.outcome import double_folds, lost_updates, same
from tests.system.processes import Site

ROUNDS, KILLS, SEED = 3, 3, 20261122
SCAFFOLD = replace(KILLED, sets=("run.algorithm='scaffold'", "cohort.late='drop'"))


def run(folder: Path, kills: int) -> Gated:
    folder.mkdir()
    site = Site(folder / "home")
    try:
        return gated_run(site, ROUNDS, drawn(kills, ROUNDS, DEVICES, SEED), SCAFFOLD)
    finally:
        site.close()


@pytest.mark.slow
def test_control_variates_are_the_same_on_both_ends_after_any_kill(tmp_path: Path) -> None:
    whole, killed = run(tmp_path / "whole", 0), run(tmp_path / "killed", KILLS)
    assert killed.struck == KILLS
    assert same(killed.events) == same(whole.events)
    assert (double_folds(killed.events), lost_updates(killed.events)) == (0, 0)
