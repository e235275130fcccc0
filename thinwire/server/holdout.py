"""Evaluation of model versions on the operator's own data: `[run] evaluate = "holdout"`.

A process that has the task and the data evaluates: one of the operator beside the service, or that of a simulation. A
run gets the results from a `Holdout`. Each result becomes an `Evaluated` event, so a resumed run decides by the same
results.

A version is due if its number is a multiple of `[run] evaluate_every`, or that of the last round. Results count in the
order of versions: one that comes after that of a later version is ignored. The run keeps the model of each due version
that is not evaluated yet, but of no more than `[downlink] log_rounds` versions.

A run without results continues, and uses the metrics when they come. Only two steps wait for them, for `[run]
evaluate_wait_s` at most: the next round of a plan with `target` or `patience`, and the run's end. After a wait without
a result, no further round waits until a result has come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thinwire.core.errors import BadPayload
from thinwire.core.events import ENDED, Evaluated, ModelStored
from thinwire.core.plan_schema import Sections
from thinwire.core.score_histogram import MAX_METRIC_LETTERS, Histograms, checked, values
from thinwire.core.serialization import MAX_METRICS
from thinwire.core.types import Metrics
from thinwire.server.command_queue import CommandQueue
from thinwire.server.context import RunContext
from thinwire.server.evaluation import better
from thinwire.store import CommandRow

EVALUATED = "evaluated"  # kind of the command that brings a holdout evaluation


@dataclass(frozen=True)
class HoldoutResult:
    """Holds the evaluation of one version: metrics as (sum, count), without a prefix, and histograms of scores."""

    version: int
    metrics: Metrics
    histograms: Histograms = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {"version": self.version, "metrics": dict(self.metrics), "histograms": dict(self.histograms)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> HoldoutResult:
        """Read a result; raise `BadPayload` if it is not valid."""
        try:
            metrics = {str(name): (float(total), float(count)) for name, (total, count) in raw["metrics"].items()}
            if len(metrics) > MAX_METRICS or any(not 0 < len(name) <= MAX_METRIC_LETTERS for name in metrics):
                raise ValueError("too many metrics, or a name that is too long")
            return cls(int(raw["version"]), metrics, checked(raw.get("histograms", {})))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadPayload("cannot read a holdout evaluation", why=f"{type(error).__name__}: {error}") from error

    @property
    def means(self) -> dict[str, float]:
        """Return the metrics as they are shown, without those that are no number."""
        found = {name: total / count for name, (total, count) in self.metrics.items() if count > 0}
        for name, counts in self.histograms.items():
            found |= values(name, counts)
        return {name: value for name, value in found.items() if math.isfinite(value)}

    @property
    def examples(self) -> int:
        """Return the number of examples, by the loss if there is one."""
        counts = [count for _, count in self.metrics.values()]
        return int(self.metrics["loss"][1] if "loss" in self.metrics else max(counts, default=0.0))


class Holdout(Protocol):
    """Gives a run the evaluations of its versions."""

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        """Return the results that are here of the versions that are due."""

    def settle(self, run_id: str, versions: Sequence[int]) -> None:
        """Note that the results of these versions are in the journal."""


class CommandedHoldout:
    """The holdout evaluations of runs that the operator's process leaves as commands (cli/aggregator/evaluate.py)."""

    def __init__(self, commands: CommandQueue) -> None:
        self._commands = commands

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        """Return the results of versions that are due; others are answered, as they come too late."""
        found = list[HoldoutResult]()
        for command in self._of(run_id):
            try:
                result = HoldoutResult.from_json(command.args)
            except BadPayload as error:
                self._commands.answer(command, error.as_result())
                continue
            if result.version in due:
                found.append(result)
            else:
                self._commands.answer(command, {"version": result.version, "ignored": True})
        return found

    def settle(self, run_id: str, versions: Sequence[int]) -> None:
        """Answer the commands that brought the results of these versions."""
        for command in self._of(run_id):
            if command.args.get("version") in versions:
                self._commands.answer(command, {"version": command.args["version"]})

    def _of(self, run_id: str) -> list[CommandRow]:
        return [command for command in self._commands.about_runs(EVALUATED) if command.run_id == run_id]


def is_due(plan: Sections, version: int) -> bool:
    """Return True if the plan wants this version to be evaluated.

    >>> from thinwire.core.plan import RunPlan
    >>> plan = RunPlan.from_json({"run": {"task": "t", "rounds": 5, "evaluate_every": 2}, "local": {"lr": 1}})
    >>> [version for version in range(6) if is_due(plan, version)]
    [0, 2, 4, 5]
    """
    return version % plan.run.evaluate_every == 0 or version == plan.run.rounds


def due_versions(running: RunContext) -> dict[int, ModelStored]:
    """Return the versions of such a run that are due and not evaluated yet, oldest first."""
    run_state = running.run_state
    newest = max(run_state.scores.evaluated, default=-1)
    return {
        version: stored
        for version, stored in sorted(run_state.bases.models.items())
        if version > newest and is_due(running.plan, version) and (not version or version in run_state.bases.made_by)
    }


@dataclass
class HoldoutWatch:
    """Records the results of a run's holdout evaluation as they come, and says for which of them the run waits."""

    running: RunContext
    source: Holdout | None
    missed: bool = False  # a round waited without a result, and none has come since

    def record(self) -> None:
        """Record the results that have come, unless the run is over."""
        is_over = self.running.run_state.status in ENDED
        if is_over or self.source is None or not (due := due_versions(self.running)):
            return
        found = sorted(self.source.results(self.running.run_id, due), key=lambda result: result.version)
        for result in found:
            self.running.record(_evaluated(self.running, result))
            self.missed = False
        if found:
            self.source.settle(self.running.run_id, [result.version for result in found])

    def waits_for(self, over: bool = False) -> int | None:
        """Return the version that the next round waits for, or the end of the run if it is `over`; None if none."""
        run = self.running.plan.run
        early = run.target is not None or run.patience is not None
        if run.evaluate_wait_s == 0 or not (over or (early and not self.missed)):
            return None
        return max(due_versions(self.running), default=None)


def _evaluated(running: RunContext, result: HoldoutResult) -> Evaluated:
    """Return the event of a result; no client has a part in it."""
    run, best_yet, metrics = running.plan.run, running.run_state.scores.best, result.means
    best = run.metric in metrics and better(
        run.metric, metrics[run.metric], best_yet.decisive.get(run.metric) if best_yet else None
    )
    return Evaluated(
        running.clock.wall(), running.run_state.bases.made_by.get(result.version, 0), result.version, metrics, {},
        result.examples, 0, best=best, reached=run.target is not None and run.target.is_met(metrics),
    )  # fmt: skip
