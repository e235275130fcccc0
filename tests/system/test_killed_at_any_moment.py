"""An aggregator that is killed again and again, at drawn moments of real rounds: the run comes to the same bits.

The gate lets answers in one by one in the order of rounds and devices, so that the order of accepted heads is the same.
Four kills here, twenty in `benchmarks.faults --preset full`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.gated_task import DEVICES, Gated, Mended, gated_run
from tests.support.moments import APART, Moment, all_moments, drawn, spaced
from tests.support.processes import Site
from tests.support.run_outcome import double_aggregations, lost_updates, same
from thinwire.core.events import Event, ReplicaStored, RoundClosed, RoundOpened, RunStatusChanged, UpdateAccepted

ROUNDS, KILLS, SEED = 4, 4, 20261122


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return run(tmp_path_factory.mktemp("undisturbed"), kills=0).events


def run(folder: Path, kills: int) -> Gated:
    site = Site(folder / "home")
    try:
        return gated_run(site, ROUNDS, drawn(kills, ROUNDS, DEVICES, SEED))
    finally:
        site.close()


def test_moments_are_drawn_without_repetition_and_in_their_order() -> None:
    every = all_moments(ROUNDS, DEVICES)
    found = drawn(20, ROUNDS, DEVICES, SEED)
    assert found == sorted(set(found), key=every.index)
    assert found == drawn(20, ROUNDS, DEVICES, SEED)


def test_spaced_moments_are_some_rounds_apart_and_of_the_kinds_that_are_wanted() -> None:
    kinds = [Moment(0, "RoundOpened"), Moment(0, "training", "pi-b")]
    found = spaced(6, SEED, kinds)
    assert [moment.round for moment in found] == [2 + APART * number for number in range(6)]
    assert {(moment.what, moment.device) for moment in found} == {("RoundOpened", ""), ("training", "pi-b")}
    assert found == spaced(6, SEED, kinds)


def test_a_run_goes_on_by_an_answer_or_a_round_and_not_by_what_it_says_of_itself() -> None:
    mended = Mended(at=100.0, events=1)
    before, said = RunStatusChanged(99.0, "running", "", 0), RunStatusChanged(101.0, "running", "goes on", 0)
    opened = RoundOpened(103.5, 2, 9.0, 1, "", [], {}, "int8", 600.0, 2, 2)
    assert mended.went_on_s([before, said]) is None
    assert mended.went_on_s([before, said, opened]) == 3.5
    assert replace(mended, again_at=102.0).went_on_s([before, said, opened]) == 2.0


def test_the_undisturbed_run_folds_all_in_their_order_and_has_a_replica_of_every_version(
    undisturbed: list[Event],
) -> None:
    assert [e.reason for e in undisturbed if isinstance(e, RoundClosed)] == ["all"] * ROUNDS
    assert len([e for e in undisturbed if isinstance(e, ReplicaStored)]) == ROUNDS
    order = [e.device for e in undisturbed if isinstance(e, UpdateAccepted)]
    assert order == list(DEVICES) * ROUNDS


@pytest.mark.slow
def test_a_run_whose_aggregator_is_killed_at_drawn_moments_comes_to_the_same_bits(
    undisturbed: list[Event], tmp_path: Path
) -> None:
    made = run(tmp_path, KILLS)
    events = made.events
    assert (made.struck, made.met) == (KILLS, KILLS)
    assert same(events) == same(undisturbed)
    assert (double_aggregations(events), lost_updates(events)) == (0, 0)
