"""SCAFFOLD and FedDyn over real processes: an aggregator is killed at drawn moments, and the bits are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.gated_task import DEVICES, KILLED, Gated, gated_run
from tests.support.moments import drawn
from tests.support.processes import Site
from tests.support.run_outcome import double_aggregations, lost_updates, same

ROUNDS, KILLS, SEED = 3, 2, 20261122
SETS = {
    "scaffold": ("run.algorithm='scaffold'", "cohort.late='drop'"),
    "feddyn": ("run.algorithm='feddyn'", "cohort.late='drop'", "server.optimizer='fedavg'"),  # its step is its own
}


def run(folder: Path, algorithm: str, kills: int) -> Gated:
    folder.mkdir()
    site = Site(folder / "home")
    try:
        return gated_run(site, ROUNDS, drawn(kills, ROUNDS, DEVICES, SEED), replace(KILLED, sets=SETS[algorithm]))
    finally:
        site.close()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", SETS)
def test_what_is_remembered_is_the_same_on_both_ends_after_any_kill(tmp_path: Path, algorithm: str) -> None:
    whole, killed = run(tmp_path / "whole", algorithm, 0), run(tmp_path / "killed", algorithm, KILLS)
    assert killed.struck == KILLS
    assert same(killed.events) == same(whole.events)
    assert (double_aggregations(killed.events), lost_updates(killed.events)) == (0, 0)
