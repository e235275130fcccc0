"""Where cells are made and kept: a folder for each model, each cell found again by all that it was made of.

What was killed goes on where it was: `thinwire.reports.sweep_results` names a cell by its plan, clients, split and
task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accuracy_bytes.trials import Trial, Work
from benchmarks.document import note
from thinwire.client.task import load_task
from thinwire.reports.sweep_results import Trial as Cell
from thinwire.reports.sweep_results import TrialSpec, TrialStore
from thinwire.simulation.sweep import Progress, Sweep, run_sweep

Found = dict[Trial, list[Cell]]


@dataclass
class Lab:
    """`cells` gives those of each trial in the order of the seeds, and makes what is missing on so many workers."""

    folder: Path
    workers: int = 2
    digests: dict[str, str] = field(default_factory=dict)

    def cells(self, work: Work, trials: Sequence[Trial], seeds: Sequence[int], about: str) -> Found:
        made = {trial: [trial.made(seed, self._digest(work)) for seed in seeds] for trial in dict.fromkeys(trials)}
        all_made = tuple(one for seed in zip(*made.values(), strict=True) for one in seed)  # a seed after the other
        there = self.run(work, all_made, about)
        return {trial: [there[one.digest] for one in ones] for trial, ones in made.items()}

    def run(self, work: Work, made: tuple[TrialSpec, ...], about: str) -> dict[str, Cell]:
        def shown(progress: Progress) -> None:
            hours = f", about {progress.left_s / 3600:.2f} hours" if progress.left_s is not None else ""
            if progress.trial is None:
                note(f"{work.name}: {about}: {progress.missing} of {len(made)} runs to be made{hours}")
            elif progress.done % 10 == 0 or progress.done == progress.missing:
                took = f"the last took {progress.trial.took_s:.0f} s"
                note(f"{work.name}: {about}: {progress.done} of {progress.missing}; {took}{hours}")

        sweep = Sweep(work.task, tuple({one.digest: one for one in made}.values()))
        cells = run_sweep(sweep, TrialStore(self.folder / work.name), workers=self.workers, on_progress=shown)
        return {cell.made.digest: cell for cell in cells}

    def _digest(self, work: Work) -> str:
        if work.name not in self.digests:
            self.digests[work.name] = load_task(work.task).source_digest
        return self.digests[work.name]
