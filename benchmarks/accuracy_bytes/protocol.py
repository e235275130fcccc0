"""The protocol of one model, a step after the other; whatever was decided is written down before the next step runs.

    rounds      R, from fp32 alone on tuning seeds                       (rounds.py)
    rates       each chain's learning rate, by one grid, on tuning seeds
    selection   on seeds A                                               (selection.py)
    conclusion     on seeds B, for the selected chain and the baselines     (conclusion.py, bound.py)
    factors     four finalists with other data, other participation

Decisions follow from cells, so a run that was killed comes to the same ones. A written decision that differs from what
its cells say ends it: then cells or rules were changed after the fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from benchmarks.accuracy_bytes.bound import paired
from benchmarks.accuracy_bytes.conclusion import Conclusion, OnB, conclusion
from benchmarks.accuracy_bytes.decisions import Decisions, plain
from benchmarks.accuracy_bytes.lab import Found, Lab
from benchmarks.accuracy_bytes.models import BASELINES, Model
from benchmarks.accuracy_bytes.reading import accuracies, mean_curve
from benchmarks.accuracy_bytes.rounds import Rounds, rounds_needed
from benchmarks.accuracy_bytes.selection import FALLBACK, Judged, Selected, select, staying
from benchmarks.accuracy_bytes.trials import FP32, Chain, Trial
from benchmarks.document import note
from thinwire.aggregation import codecs
from thinwire.reports.sweep_results import Trial as Cell

SPLITS = ("dirichlet(0.1)", "dirichlet(1)", "iid")
PARTICIPATIONS = (1.0, 0.1)
COHORTS, OF_CLIENTS = (4, 16, 64), 100  # clients of a round, to see how the noise of a codec falls with their number
Rates = dict[Chain, float]
T = TypeVar("T")


@dataclass
class Protocol:
    """One model in one lab."""

    model: Model
    lab: Lab

    # The steps.

    def rounds(self) -> Rounds:
        work, seeds = self.model.work, self.model.seeds
        found: Rounds | None = None
        for horizon in self.model.horizons:
            trials = [Trial(work, FP32, rate, horizon) for rate in self.model.rates]
            cells = self.lab.cells(work, trials, seeds.tuning(seeds.rounds), f"fp32 over {horizon} rounds")
            curves = {trial.rate: mean_curve(cells[trial]) for trial in trials}
            found = rounds_needed(curves)
            if found is not None:
                break
        if found is None:  # a smoke that looks no further
            found = Rounds(self.model.horizons[-1] * 4 // 5, self.model.rates[0], float("inf"))
        return self._decided("rounds", found)

    def rates(self, rounds: int) -> Rates:
        """The rate with the highest mean accuracy, for each chain from the same grid and after as many rounds."""
        return self._decided("rates", self._rates((*BASELINES, *self.model.candidates), rounds))

    def beside(self, rounds: int) -> Rates:
        """The same for chains that are only told of."""
        chains = self.model.beside
        return self._decided("beside", self._rates(chains, rounds)) if chains else {}

    def _rates(self, chains: Sequence[Chain], rounds: int) -> Rates:
        work, seeds = self.model.work, self.model.seeds
        short = max(1, round(rounds * self.model.tuned_after))
        trials = [Trial(work, chain, rate, short) for chain in chains for rate in self.model.rates]
        cells = self.lab.cells(work, trials, seeds.tuning(seeds.rates), "learning rates")
        rates = {}
        for chain in chains:
            of_rate = {trial.rate: fmean(accuracies(cells[trial])) for trial in trials if trial.chain == chain}
            rates[chain] = max(of_rate, key=lambda rate: (of_rate[rate], -rate))
        return rates

    def early(self, rounds: int, rates: Rates) -> list[Judged]:
        """All candidates on the first seeds A."""
        return self._judged(self.model.candidates, rounds, rates, self.model.seeds.seeds_early, "first of A")

    def selection(self, rounds: int, rates: Rates) -> Selected:
        early = self._decided("staying", staying(self.early(rounds, rates)))
        late = self._judged([one.chain for one in early], rounds, rates, self.model.seeds.seeds_a, "all of A")
        return self._decided("selection", select(late, rates, self.model.seeds.b))

    def on_a(self, rounds: int, rates: Rates, chains: Sequence[Chain]) -> Found:
        """What is told of chains beside the figure; fp16 among them."""
        trials = [Trial(self.model.work, chain, rates[chain], rounds) for chain in (*BASELINES, *chains)]
        return self.lab.cells(self.model.work, trials, self.model.seeds.seeds_a, "baselines on A")

    def conclusion(self, rounds: int, rates: Rates, selected: Selected) -> Conclusion:
        """Seeds B: run once the selection is written down, for no candidate but the selected one."""
        cells = self.on_b(rounds, rates, [selected.chain])
        on_b = _on_b(cells, selected.chain)
        fallback: dict[Chain, OnB] = {}
        if not on_b.paired.non_inferior and selected.chain != FALLBACK:
            fallback[FALLBACK] = _on_b(self.on_b(rounds, rates, [FALLBACK]), FALLBACK)
        return self._decided("conclusion", conclusion(on_b, fallback))

    def on_b(self, rounds: int, rates: Rates, chains: Sequence[Chain]) -> Found:
        trials = [Trial(self.model.work, chain, rates[chain], rounds) for chain in (*BASELINES, *chains)]
        return self.lab.cells(self.model.work, trials, self.model.seeds.seeds_b, "seeds B")

    def round_trip(self, rounds: int, rates: Rates, selected: Chain) -> Found:
        """The selected chain with each downlink, on the first seeds A, at its rate; nothing if plans refuse one."""
        ways = [replace(selected, down=down) for down in self.model.ways_down]
        trials = [Trial(self.model.work, chain, rates[selected], rounds) for chain in ways]
        allowed = [trial for trial in trials if not trial.plan(0).check(codecs)]
        if not allowed:
            return {}
        return self.lab.cells(self.model.work, allowed, self.model.seeds.seeds_early, "ways down")

    def factors(self, rounds: int, rates: Rates, finalists: Sequence[Chain]) -> Found:
        """The finalists and fp32 where one thing differs from the centre."""
        if not self.model.factors:
            return {}
        chains = (FP32, *finalists)
        centre = [Trial(self.model.work, chain, rates[chain], rounds) for chain in chains]
        other = [replace(trial, split=split) for split in SPLITS for trial in centre]
        other += [replace(trial, participation=share) for share in PARTICIPATIONS for trial in centre]
        found = self.lab.cells(self.model.work, [*centre, *other], self.model.seeds.seeds_sweep, "one-factor sweeps")
        if not self.model.seeds.cohorts:
            return found
        shares = [cohort / OF_CLIENTS for cohort in COHORTS]
        wide = [replace(trial, participation=share, clients=OF_CLIENTS) for share in shares for trial in centre]
        return found | self.lab.cells(self.model.work, wide, self.model.seeds.seeds_cohorts, "cohorts")

    def _judged(
        self, chains: Sequence[Chain], rounds: int, rates: Rates, seeds: Sequence[int], about: str
    ) -> list[Judged]:
        trials = {chain: Trial(self.model.work, chain, rates[chain], rounds) for chain in (FP32, *chains)}
        cells = self.lab.cells(self.model.work, list(trials.values()), seeds, about)
        fp32 = cells[trials[FP32]]
        return [
            Judged(
                chain,
                rates[chain],
                ratio(cells[trials[chain]], fp32),
                paired(accuracies(cells[trials[chain]]), accuracies(fp32)),
            )
            for chain in dict.fromkeys(chains)
        ]

    @property
    def decisions(self) -> Decisions:
        return Decisions(self.lab.folder / self.model.name / "decisions")

    def _decided(self, step: str, value: T) -> T:
        self.decisions.keep(step, value)
        note(f"{self.model.name}: {step}: {plain(value)}")
        return value


def ratio(cells: Sequence[Cell], fp32: Sequence[Cell]) -> float:
    """Payload bytes up of fp32 over those of a chain, at equal rounds."""
    return payload_up(fp32) / payload_up(cells)


def payload_up(cells: Sequence[Cell]) -> int:
    return sum(one.payload_up for cell in cells for one in cell.rounds)


def _on_b(cells: Found, chain: Chain) -> OnB:
    of = {trial.chain: found for trial, found in cells.items()}
    return OnB(chain, ratio(of[chain], of[FP32]), paired(accuracies(of[chain]), accuracies(of[FP32])))
