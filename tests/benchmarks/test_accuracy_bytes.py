"""What `benchmarks.accuracy_bytes` makes, keeps and prints: cells, documents, archives."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.accuracy_bytes import archive, committed
from benchmarks.accuracy_bytes.__main__ import told
from benchmarks.accuracy_bytes.bound import paired
from benchmarks.accuracy_bytes.changed import CHANGED, FIRST, FIRST_BOUND, PROTOCOL
from benchmarks.accuracy_bytes.lab import Lab
from benchmarks.accuracy_bytes.links import to_target
from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.presets import Runs
from benchmarks.accuracy_bytes.protocol import Protocol, ratio
from benchmarks.accuracy_bytes.reading import accuracies
from benchmarks.accuracy_bytes.trials import FP16, FP32, Trial
from tests.support.fork_server import run_forked
from tests.support.made_up_figures import BESIDE, BOLD, MILD, MODEL, MadeUp
from tests.support.processes import environment
from thinwire.aggregation import codecs
from thinwire.reports.sweep_results import TrialStore

ROOT = Path(__file__).parents[2]


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
    assert part["conclusion"]["figure"] == 400.0
    assert {row["chain"] for row in part["b"]} == {"identity", "fp16", BOLD.name}
    assert part["to_target"][BOLD.name]["target"] == 89.0
    assert part["beside"] == [BESIDE.name] and BESIDE.name in part["to_target"]
    assert {row["chain"] for row in part["a"]} > {BESIDE.name}, "it is told of, and no seed B is spent on it"
    assert BESIDE.name not in {one["chain"] for one in (*part["first_of_a"], *part["selection"]["finalists"])}
    assert len({(row["split"], row["participation"], row["clients"]) for row in part["factors"]}) == 9
    assert part["curves"][BOLD.name][-1]["round"] == part["rounds"]["rounds"]


def test_a_lab_makes_only_the_cells_that_are_missing(tmp_path, monkeypatch):
    made = list[tuple[Trial, int]]()

    def one_made(task, what):
        trial, seed = next(pair for pair in wanted if pair[0].made(pair[1], what.task_digest) == what)
        made.append((trial, seed))
        return dataclasses.replace(MadeUp(tmp_path, {}).cell(trial, seed), made=what)

    monkeypatch.setattr("thinwire.simulation.sweep.run_trial", one_made)
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
        assert document["models"]["digits"]["conclusion"]["figure"] == 400.0
        assert said in document["models"]["later"]["reason"]


def test_what_has_not_finished_is_null_with_a_reason():
    made = told("committed", {"models": {"cnn": {"reason": "R is being looked for"}}})
    assert set(made["figures"].values()) == {None}
    assert made["reasons"]["best_ratio_within_half_point_cnn"] == "R is being looked for"
    assert made["reasons"]["best_ratio_within_half_point_digits"] == committed.NOT_THERE


def test_the_committed_figures_are_printed_with_what_made_them():
    done = run_forked(
        [sys.executable, "-m", "benchmarks.accuracy_bytes", "--preset", "committed", "--json"],
        120, cwd=ROOT, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert set(made["figures"]) == {f"best_ratio_within_half_point_{name}" for name in FULL}
    assert None not in made["figures"].values()
    assert {row["model"] for row in made["rows"]} == set(FULL)
    for row in made["rows"]:
        assert row["figure"] == pytest.approx(made["figures"][f"best_ratio_within_half_point_{row['model']}"], rel=1e-3)
        assert (row["protocol"], row["changed"]) == (PROTOCOL[row["model"]], CHANGED[row["model"]])
        assert len(row["commit"]) >= 40
        assert row["command"].startswith("python -m benchmarks.accuracy_bytes --preset full")


def test_the_first_result_is_what_the_committed_runs_say():
    cells = [archive.restored(line) for line in (archive.KEPT / "second" / "digits.jsonl").read_text().splitlines()]
    last = {
        (cell.made.plan["uplink"]["codec"], cell.made.plan["run"]["seed"]): 100 * cell.metrics["accuracy"]
        for cell in cells
        if cell.made.plan["run"]["seed"] in FIRST
    }
    chains = ([last[codec, seed] for seed in FIRST] for codec in ("stc(0.04)", "identity"))
    assert round(paired(*chains).bound, 2) == FIRST_BOUND


@pytest.mark.parametrize(("model", "codec"), [("digits", "eden(0.3)"), ("cnn", "eden(0.08)")])
def test_what_the_docs_say_of_fewer_bits_is_what_the_committed_runs_say(model, codec):
    seeds = set(FULL[model].seeds.seeds_b)
    lines = (archive.KEPT / f"{model}.jsonl").read_text().splitlines()
    cells = [cell for cell in map(archive.restored, lines) if cell.made.plan["run"]["seed"] in seeds]
    of = {name: [cell for cell in cells if cell.made.plan["uplink"]["codec"] == name] for name in ("identity", codec)}
    fp32, chain = (sorted(found, key=lambda cell: cell.made.plan["run"]["seed"]) for found in of.values())
    difference = paired(accuracies(chain), accuracies(fp32))
    assert (difference.seeds, difference.non_inferior) == (len(seeds), True)
    row = f"| `{codec}`, with half the learning rate of fp32 | " if model == "cnn" else f"| `{codec}` | "
    row += f"{ratio(chain, fp32):.3g} | {difference.mean:+.2f} | {difference.bound:+.2f} |"
    assert row in (ROOT / "docs" / "explain" / "codecs.md").read_text()


def test_a_cell_is_found_again_when_a_later_version_has_more_keys():
    told = Trial(MODEL.work, MILD, 0.1, 10).keys(1)
    assert set(told["local"]) == {"lr", "steps", "batch", "clip_grad"}
    assert Trial(MODEL.work, MILD, 0.1, 10).made(1, "digest").plan == told


def test_what_is_kept_of_a_folder_makes_the_same_folder_for_decisions(tmp_path):
    made = MadeUp(tmp_path / "made", {})
    cells = [made.cell(Trial(MODEL.work, chain, 0.1, 10), seed) for chain in (FP32, MILD) for seed in (1, 2)]
    for cell in cells:
        TrialStore(tmp_path / "made" / "digits").keep(cell)
    Protocol(MODEL, made).decisions.keep("rounds", {"rounds": 20})
    assert archive.keep(tmp_path / "made", "digits", tmp_path / "kept") == 4

    assert archive.restore(tmp_path / "again", "digits", tmp_path / "kept") == 4
    assert archive.restore(tmp_path / "again", "digits", tmp_path / "kept") == 0
    again = TrialStore(tmp_path / "again" / "digits").all()
    for cell in cells:
        found = again[cell.made.digest]
        assert [one.payload_up for one in found.rounds] == [one.payload_up for one in cell.rounds]
        assert [one.metrics["accuracy"] for one in found.rounds] == pytest.approx(
            [one.metrics["accuracy"] for one in cell.rounds], abs=1e-9
        )
    assert Protocol(MODEL, Lab(tmp_path / "again")).decisions.all()["rounds"]["decided"] == {"rounds": 20}


def test_nothing_is_restored_where_nothing_is_kept(tmp_path):
    assert archive.restore(tmp_path, "digits", tmp_path / "nowhere") == 0
