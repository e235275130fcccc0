"""Cells of `benchmarks.accuracy_bytes` out of nothing: what each chain loses is given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.accuracy_bytes.lab import Lab
from benchmarks.accuracy_bytes.models import FIRST_B, Model, Seeds
from benchmarks.accuracy_bytes.selection import FALLBACK
from benchmarks.accuracy_bytes.trials import FP16, FP32, Chain, Trial, Work
from thinwire.reports.sweep_results import CellRound, TrialSpec
from thinwire.reports.sweep_results import Trial as Cell

BOLD, MILD = Chain("topk(0.01) > sign > rice"), Chain("topk(0.02) > sign > rice")
BESIDE = Chain("eden(1)", feedback="none")
BYTES = {FP32: 4000, FP16: 2000, BOLD: 10, MILD: 25, FALLBACK: 38, BESIDE: 125}
MODEL = Model(
    Work("digits", "dirichlet(0.3)", steps=50, batch=32),
    (0.1, 0.2),
    (BOLD, MILD, FALLBACK),
    Seeds(rounds=2, rates=2, early=3, a=6, b=8, sweep=2, cohorts=1),
    beside=(BESIDE,),
)


class MadeUp(Lab):
    """Cells out of nothing: a chain loses what `lost` says, fp32 has reached everything after 40 rounds."""

    def __init__(self, folder: Path, lost: dict[tuple[Chain, bool], float]) -> None:
        super().__init__(folder)
        self.lost, self.selected = lost, list[tuple[Trial, int]]()

    def cells(self, work, trials, seeds, about):
        self.selected += [(trial, seed) for trial in trials for seed in seeds]
        return {trial: [self.cell(trial, seed) for seed in seeds] for trial in dict.fromkeys(trials)}

    def cell(self, trial: Trial, seed: int) -> Cell:
        lost = self.lost.get((dataclasses.replace(trial.chain, down="identity"), seed >= FIRST_B), 0.0)
        noise = 0.05 * ((seed * 7) % 5 - 2) * (trial.chain != FP32)
        best = 90.0 - lost + noise - abs(trial.rate - 0.2)
        values = [(best - max(0, 40 - number)) / 100 for number in range(1, trial.rounds + 1)]
        each = BYTES[dataclasses.replace(trial.chain, down="identity")]
        rounds = [CellRound("all", 4, 1.0, each * 4, 16_000, {"accuracy": value}) for value in values]
        made = TrialSpec(trial.plan(seed).to_json(), 20, trial.split, "", "digest")
        return Cell(made, "done", "", 0, 1000, rounds[-1].metrics, {}, 4000, 4000, rounds, 1.0)
