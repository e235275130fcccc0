"""The protocol of `benchmarks.accuracy_bytes` on made-up cells: what it decides, and from what."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy_bytes import archive, committed
from benchmarks.accuracy_bytes.__main__ import told
from benchmarks.accuracy_bytes.bound import paired
from benchmarks.accuracy_bytes.lab import Lab
from benchmarks.accuracy_bytes.links import to_target
from benchmarks.accuracy_bytes.models import FIRST_B, FULL, Model, Seeds
from benchmarks.accuracy_bytes.presets import SMALL, Runs
from benchmarks.accuracy_bytes.protocol import Protocol
from benchmarks.accuracy_bytes.rounds import rounds_needed
from benchmarks.accuracy_bytes.selection import FALLBACK, Judged, select, staying
from benchmarks.accuracy_bytes.trials import FP16, FP32, Chain, Trial, Work
from benchmarks.accuracy_bytes.verdict import OnB, verdict
from thinwire.aggregation import codecs
from thinwire.core.errors import DataLost
from thinwire.store.cells import Cell, CellRound, Cells, Made

ROOT = Path(__file__).parents[2]
BOLD, MILD = Chain("topk(0.01) > sign > rice"), Chain("topk(0.02) > sign > rice")
BYTES = {FP32: 4000, FP16: 2000, BOLD: 10, MILD: 25, FALLBACK: 38}
MODEL = Model(
    Work("digits", "dirichlet(0.3)", steps=50, batch=32),
    (0.1, 0.2),
    (BOLD, MILD, FALLBACK),
    Seeds(rounds=2, rates=2, early=3, a=6, b=8, sweep=2),
)


class MadeUp(Lab):
    """Cells out of nothing: a chain loses what `lost` says, fp32 has reached everything after 40 rounds."""

    def __init__(self, folder: Path, lost: dict[tuple[Chain, bool], float]) -> None:
        super().__init__(folder)
        self.lost, self.asked = lost, list[tuple[Trial, int]]()

    def cells(self, work, trials, seeds, about):
        self.asked += [(trial, seed) for trial in trials for seed in seeds]
        return {trial: [self.cell(trial, seed) for seed in seeds] for trial in dict.fromkeys(trials)}

    def cell(self, trial: Trial, seed: int) -> Cell:
        lost = self.lost.get((dataclasses.replace(trial.chain, down="identity"), seed >= FIRST_B), 0.0)
        noise = 0.05 * ((seed * 7) % 5 - 2) * (trial.chain != FP32)
        best = 90.0 - lost + noise - abs(trial.rate - 0.2)
        values = [(best - max(0, 40 - number)) / 100 for number in range(1, trial.rounds + 1)]
        each = BYTES[dataclasses.replace(trial.chain, down="identity")]
        rounds = [CellRound("all", 4, 1.0, each * 4, 16_000, {"accuracy": value}) for value in values]
        made = Made(trial.plan(seed).to_json(), 20, trial.split, "", "digest")
        return Cell(made, "done", "", 0, 1000, rounds[-1].metrics, {}, 4000, 4000, rounds, 1.0)


def protocol(tmp_path: Path, lost: dict[tuple[Chain, bool], float]) -> Protocol:
    return Protocol(MODEL, MadeUp(tmp_path, lost))


def outcome(made: Protocol):
    rounds = made.rounds()
    rates = made.rates(rounds.rounds)
    selected = made.selection(rounds.rounds, rates)
    return rounds, rates, selected, made.verdict(rounds.rounds, rates, selected)


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
    assert rounds_needed({0.1: slow, 0.2: quick}) is None  # the quick one still gains


def test_every_chain_gets_its_rate_from_the_same_grid_on_tuning_seeds(tmp_path):
    made = protocol(tmp_path, {})
    rates = made.rates(40)
    assert set(rates) == {FP32, FP16, *MODEL.candidates}
    assert set(rates.values()) == {0.2}
    lab = made.lab
    assert isinstance(lab, MadeUp)
    assert {seed for _, seed in lab.asked} == {1000, 1001}
    assert len({(trial.chain, trial.rate) for trial, _ in lab.asked}) == len(rates) * len(MODEL.rates)


def test_the_highest_ratio_that_costs_nothing_is_selected_and_its_figure_comes_from_fresh_seeds(tmp_path):
    made = protocol(tmp_path, {(BOLD, False): 0.7, (BOLD, True): 0.7})
    _, _, selected, found = outcome(made)
    assert selected.chain == MILD
    assert (found.chain, found.figure) == (MILD, 160.0)
    lab = made.lab
    assert isinstance(lab, MadeUp)
    assert {trial.chain for trial, seed in lab.asked if seed >= FIRST_B} == {FP32, FP16, MILD}


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


def test_the_verdict_makes_no_second_pick():
    assert verdict(on_b(BOLD, 0.0), {}).figure == 120.0
    assert verdict(on_b(BOLD, -0.6), {FALLBACK: on_b(FALLBACK, -0.2)}).chain == FALLBACK
    assert verdict(on_b(FALLBACK, -0.6), {}).figure == 1.0


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


def test_seeds_a_ask_for_more_than_seeds_b_will():
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


def test_a_target_that_half_of_the_seeds_do_not_reach_is_never_reached(tmp_path):
    lab, trial = MadeUp(tmp_path, {}), Trial(MODEL.work, MILD, 0.2, 50)
    cells = [lab.cell(trial, seed) for seed in range(4)]
    there, never = to_target(cells, 80.0, round_s=0.1), to_target(cells, 99.0, round_s=0.1)
    assert (there.reached, there.rounds, there.payload_up) == (4, 30.5, 30.5 * 100)
    thin, wide = there.seconds["1 Mb/s, 200 ms"], there.seconds["100 Mb/s, 20 ms"]
    assert thin is not None
    assert wide is not None
    assert thin > wide > 30 * 0.14
    assert (never.reached, never.rounds, set(never.seconds.values())) == (0, None, {None})


def test_every_trial_is_a_plan_that_is_allowed():
    for model in FULL.values():
        for chain in (FP32, FP16, *model.candidates):
            assert Trial(model.work, chain, model.rates[0], 10).plan(1).check(codecs) == []


def test_cells_do_not_depend_on_how_long_the_machine_is_stopped():
    assert Trial(MODEL.work, FP32, 0.1, 10).plan(1).cohort.deadline_s == 1e6


def test_all_evidence_of_a_model_comes_from_its_cells(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.accuracy_bytes.presets.Lab", lambda folder, workers: MadeUp(folder, {}))
    monkeypatch.setattr("benchmarks.accuracy_bytes.presets.hours", lambda *about: 1.0)
    monkeypatch.setattr(
        "benchmarks.accuracy_bytes.presets.round_seconds", lambda work, rates: dict.fromkeys(rates, 0.05)
    )
    found = Runs({"digits": MODEL}, tmp_path, 2, True, "the command").all()
    assert json.loads((tmp_path / "accuracy-bytes.json").read_text()) == json.loads(json.dumps(found))
    part = found["models"]["digits"]
    assert part["verdict"]["figure"] == 400.0
    assert {row["chain"] for row in part["b"]} == {"identity", "fp16", BOLD.name}
    assert part["to_target"][BOLD.name]["target"] == 89.0
    assert len({(row["split"], row["participation"]) for row in part["factors"]}) == 6
    assert part["curves"][BOLD.name][-1]["round"] == part["rounds"]["rounds"]


def test_a_lab_makes_only_the_cells_that_are_missing(tmp_path, monkeypatch):
    made = list[tuple[Trial, int]]()

    def one_made(task, what):
        trial, seed = next(pair for pair in wanted if pair[0].made(pair[1], what.task_digest) == what)
        made.append((trial, seed))
        return dataclasses.replace(MadeUp(tmp_path, {}).cell(trial, seed), made=what)

    monkeypatch.setattr("thinwire.simulation.sweep.run_cell", one_made)
    few, more = [Trial(MODEL.work, FP32, 0.2, 4)], [Trial(MODEL.work, chain, 0.2, 4) for chain in (FP32, BOLD)]
    wanted = [(trial, seed) for trial in more for seed in (1, 2, 3)]
    first = Lab(tmp_path, workers=1).cells(MODEL.work, few, (1, 2), "a few")
    again = Lab(tmp_path, workers=1).cells(MODEL.work, more, (1, 2, 3), "all")
    assert again[few[0]][:2] == first[few[0]]
    assert len(made) == len(set(made))


def test_a_model_that_was_cut_off_stands_in_the_document_with_how_far_it_came(tmp_path, monkeypatch):
    class CutOff(MadeUp):
        def cells(self, work, trials, seeds, about):
            if (work.name, about) == ("later", "learning rates"):
                raise KeyboardInterrupt
            return super().cells(work, trials, seeds, about)

    monkeypatch.setattr("benchmarks.accuracy_bytes.presets.Lab", lambda folder, workers: CutOff(folder, {}))
    monkeypatch.setattr("benchmarks.accuracy_bytes.presets.hours", lambda *about: 1.0)
    monkeypatch.setattr("benchmarks.accuracy_bytes.presets.round_seconds", lambda work, rates: dict.fromkeys(rates, 1))
    later = dataclasses.replace(MODEL, work=dataclasses.replace(MODEL.work, name="later"))
    runs = Runs({"digits": MODEL, "later": later}, tmp_path, 2, True, "the command")
    for said in ("nothing is decided", "decided so far: rounds"):
        with pytest.raises(KeyboardInterrupt):
            runs.all()
        document = json.loads((tmp_path / "accuracy-bytes.json").read_text())
        assert document["models"]["digits"]["verdict"]["figure"] == 400.0
        assert said in document["models"]["later"]["reason"]


def test_what_has_not_finished_is_null_with_a_reason():
    made = told("committed", {"models": {"cnn": {"reason": "R is being looked for"}}})
    assert set(made["figures"].values()) == {None}
    assert made["reasons"]["best_ratio_within_half_point_cnn"] == "R is being looked for"
    assert made["reasons"]["best_ratio_within_half_point_digits"] == committed.NOT_THERE


def test_the_committed_figures_are_printed_with_what_made_them():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accuracy_bytes", "--preset", "committed", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert set(made["figures"]) == {f"best_ratio_within_half_point_{name}" for name in FULL}
    for row in made["rows"]:
        if row.get("figure") is not None:
            assert len(row["commit"]) >= 40
            assert row["command"].startswith("python -m benchmarks.accuracy_bytes --preset full")


def test_a_cell_is_found_again_when_a_later_version_has_more_keys():
    told = Trial(MODEL.work, MILD, 0.1, 10).keys(1)
    assert set(told["local"]) == {"lr", "steps", "batch", "clip_grad"}
    assert Trial(MODEL.work, MILD, 0.1, 10).made(1, "digest").plan == told


def test_what_is_kept_of_a_folder_makes_the_same_folder_for_decisions(tmp_path):
    made = MadeUp(tmp_path / "made", {})
    cells = [made.cell(Trial(MODEL.work, chain, 0.1, 10), seed) for chain in (FP32, MILD) for seed in (1, 2)]
    for cell in cells:
        Cells(tmp_path / "made" / "digits").keep(cell)
    Protocol(MODEL, made).decisions.keep("rounds", {"rounds": 20})
    assert archive.keep(tmp_path / "made", "digits", tmp_path / "kept") == 4

    assert archive.restore(tmp_path / "again", "digits", tmp_path / "kept") == 4
    assert archive.restore(tmp_path / "again", "digits", tmp_path / "kept") == 0
    again = Cells(tmp_path / "again" / "digits").all()
    for cell in cells:
        found = again[cell.made.digest]
        assert [one.payload_up for one in found.rounds] == [one.payload_up for one in cell.rounds]
        assert [one.metrics["accuracy"] for one in found.rounds] == pytest.approx(
            [one.metrics["accuracy"] for one in cell.rounds], abs=1e-9
        )
    assert Protocol(MODEL, Lab(tmp_path / "again")).decisions.all()["rounds"]["decided"] == {"rounds": 20}


def test_nothing_is_restored_where_nothing_is_kept(tmp_path):
    assert archive.restore(tmp_path, "digits", tmp_path / "nowhere") == 0
