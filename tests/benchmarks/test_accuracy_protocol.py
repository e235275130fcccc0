"""The protocol of `benchmarks.accuracy_bytes` on made-up cells: what it decides, and from what."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.accuracy_bytes.bound import paired
from benchmarks.accuracy_bytes.conclusion import OnB, conclusion
from benchmarks.accuracy_bytes.models import FIRST_B, FULL
from benchmarks.accuracy_bytes.presets import SMALL
from benchmarks.accuracy_bytes.protocol import Protocol
from benchmarks.accuracy_bytes.rounds import rounds_needed
from benchmarks.accuracy_bytes.selection import FALLBACK, Judged, select, staying
from benchmarks.accuracy_bytes.trials import FP16, FP32, Chain
from tests.support.made_up_figures import BOLD, MILD, MODEL, MadeUp
from thinwire.core.errors import DataLost


def protocol(tmp_path: Path, lost: dict[tuple[Chain, bool], float]) -> Protocol:
    return Protocol(MODEL, MadeUp(tmp_path, lost))


def outcome(made: Protocol):
    rounds = made.rounds()
    rates = made.rates(rounds.rounds)
    selected = made.selection(rounds.rounds, rates)
    return rounds, rates, selected, made.conclusion(rounds.rounds, rates, selected)


def on_b(chain: Chain, bound: float) -> OnB:
    differences = paired([90.0 + bound] * 4, [90.0] * 4)
    return OnB(chain, 120.0, differences)


def test_rounds_are_the_first_after_which_fp32_gains_too_little_over_the_next_quarter():
    rising = {number: min(90.0, number * 0.9) for number in range(1, 201)}
    found = rounds_needed({0.1: rising})
    assert found is not None
    assert (found.rounds, found.gain < 0.3) == (140, True)  # the thirty-five rounds before it have all that there is
    assert rounds_needed({0.1: {number: value for number, value in rising.items() if number < 110}}) is None


def test_every_quarter_that_rounds_are_judged_by_is_measured():
    for model in FULL.values():
        measured = {number: 90.0 for number in range(1, 101) if number % model.work.measure_every == 0}
        found = rounds_needed({0.1: measured})
        assert found is not None
        assert found.rounds == 20


def test_rounds_are_three_hundred_where_fp32_never_stops_to_gain():
    found = rounds_needed({0.1: {number: number * 0.2 for number in range(1, 376)}})
    assert found is not None
    assert found.rounds == 300


def test_rounds_are_judged_with_the_learning_rate_that_is_best_there():
    slow, quick = dict.fromkeys(range(1, 101), 50.0), {number: 60 + number * 0.3 for number in range(1, 101)}
    assert rounds_needed({0.1: slow, 0.2: quick}) is None  # the fast one still gains


def test_every_chain_gets_its_rate_from_the_same_grid_on_tuning_seeds(tmp_path):
    made = protocol(tmp_path, {})
    rates = made.rates(40)
    assert set(rates) == {FP32, FP16, *MODEL.candidates}
    assert set(rates.values()) == {0.2}
    lab = made.lab
    assert isinstance(lab, MadeUp)
    assert {seed for _, seed in lab.selected} == {1000, 1001}
    assert len({(trial.chain, trial.rate) for trial, _ in lab.selected}) == len(rates) * len(MODEL.rates)


def test_the_highest_ratio_that_costs_nothing_is_selected_and_its_figure_comes_from_fresh_seeds(tmp_path):
    made = protocol(tmp_path, {(BOLD, False): 0.7, (BOLD, True): 0.7})
    _, _, selected, found = outcome(made)
    assert selected.chain == MILD
    assert (found.chain, found.figure) == (MILD, 160.0)
    lab = made.lab
    assert isinstance(lab, MadeUp)
    assert {trial.chain for trial, seed in lab.selected if seed >= FIRST_B} == {FP32, FP16, MILD}


def test_no_seed_serves_two_purposes():
    for model in (*FULL.values(), *SMALL.values()):
        kinds = [set(model.seeds.tuning(model.seeds.rounds)), set(model.seeds.seeds_a), set(model.seeds.seeds_b)]
        assert len(set.union(*kinds)) == sum(map(len, kinds))
    assert [model.seeds.b for model in FULL.values()] == [30, 30, 5]


def test_a_chain_that_fails_on_fresh_seeds_gives_way_to_the_one_fixed_in_advance(tmp_path):
    _, _, selected, found = outcome(protocol(tmp_path, {(BOLD, True): 0.9}))
    assert selected.chain == BOLD
    assert found.chain == FALLBACK
    assert found.figure == pytest.approx(4000 / 38)


def test_where_both_fail_the_figure_is_one(tmp_path):
    _, _, _, found = outcome(protocol(tmp_path, {(BOLD, True): 0.9, (FALLBACK, True): 0.9}))
    assert (found.figure, found.chain) == (1.0, None)


def test_the_outcome_makes_no_second_pick():
    assert conclusion(on_b(BOLD, 0.0), {}).figure == 120.0
    assert conclusion(on_b(BOLD, -0.6), {FALLBACK: on_b(FALLBACK, -0.2)}).chain == FALLBACK
    assert conclusion(on_b(FALLBACK, -0.6), {}).figure == 1.0


def test_the_bound_is_below_the_mean_by_what_the_seeds_leave_open():
    few, many = paired([89.0, 91.0] * 2, [90.0] * 4), paired([89.0, 91.0] * 20, [90.0] * 40)
    assert few.mean == many.mean == 0
    assert few.bound < many.bound < 0
    assert few.bound == pytest.approx(-2.3534 * few.sd / 2, rel=1e-4)  # Student's t, three degrees of freedom
    assert not few.non_inferior
    assert many.non_inferior
    assert not paired([90.0], [90.0]).non_inferior  # of one pair nothing is known


def test_what_loses_half_a_point_at_once_does_not_stay_and_the_fallback_always_does():
    def judged(chain: Chain, ratio: float, lost: float) -> Judged:
        return Judged(chain, 0.1, ratio, paired([90 - lost, 90 - lost], [90.0, 90.0]))

    all_of_them = [judged(BOLD, 300, 0.6), judged(MILD, 170, 0.1), judged(FALLBACK, 105, 2.0)]
    assert [one.chain for one in staying(all_of_them)] == [MILD, FALLBACK]
    assert select(all_of_them[::2], {FALLBACK: 0.1}, seeds_b=30).chain == FALLBACK


def test_seeds_a_request_more_than_seeds_b_will():
    noisy = [0.3, -1.1, 0.5, -0.9, 0.6, -0.6]
    judged = Judged(MILD, 0.1, 170, paired([90 + one for one in noisy], [90.0] * 6))
    told = select([judged], {FALLBACK: 0.1}, seeds_b=30)
    assert told.finalists[0].expected < judged.paired.mean
    assert told.chain == FALLBACK


def test_a_decision_that_its_cells_no_longer_lead_to_ends_the_run(tmp_path):
    outcome(protocol(tmp_path, {}))
    outcome(protocol(tmp_path, {}))
    with pytest.raises(DataLost):
        outcome(protocol(tmp_path, {(BOLD, False): 0.9}))


def test_the_selection_is_written_down_before_a_fresh_seed_runs(tmp_path):
    class Watching(MadeUp):
        def cells(self, work, trials, seeds, about):
            if min(seeds) >= FIRST_B:
                assert (self.folder / "digits" / "decisions" / "selection.json").exists()
            return super().cells(work, trials, seeds, about)

    outcome(Protocol(MODEL, Watching(tmp_path, {})))
