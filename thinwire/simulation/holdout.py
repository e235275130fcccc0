"""Holdout evaluation in a simulation: this process has the task, and evaluates each model version at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.client.errors import place
from thinwire.client.executor import InProcessExecutor
from thinwire.client.holdout import evaluate_model, holdout_client, require_holdout_data
from thinwire.client.task import LoadedTask
from thinwire.client.train.errors import task_code
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import TaskError, ThinwireError
from thinwire.core.events import ModelStored
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome
from thinwire.server.holdout import HoldoutResult
from thinwire.server.model_store import Versions


class SimulatedHoldout:
    """Evaluates the versions of one run in this process; see `Holdout`."""

    def __init__(
        self, plan: RunPlan, task: LoadedTask, client: ClientInfo, home: AggregatorHome, layout: Layout
    ) -> None:
        self._plan, self._client, self._home, self._layout = plan, client, home, layout
        self._executor = InProcessExecutor(task, client.device)

    @classmethod
    def of(
        cls, plan: RunPlan, task: LoadedTask, client: ClientInfo, home: AggregatorHome, layout: Layout
    ) -> SimulatedHoldout | None:
        """Return the evaluator of a run's model versions; None if its plan has no holdout evaluation.

        Raise `TaskError` if the task has no holdout data, before the run begins.
        """
        if plan.run.evaluate != "holdout":
            return None
        found = cls(plan, task, client, home, layout)
        with _task_errors(task):
            require_holdout_data(task.name, found._executor.inner.split(holdout_client(client)))
        return found

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        """Return the evaluations of all versions that are due."""
        found, size = list[HoldoutResult](), self._layout.size
        versions = Versions(self._home.run(run_id), transmitted_layout(algorithm_of(self._plan), self._layout))
        for version, stored in due.items():
            params, buffers = versions.read(stored)
            with _task_errors(self._executor.task):
                metrics, histograms = evaluate_model(
                    self._executor, self._plan, self._client, params[:size], buffers, stored.counters
                )
            found.append(HoldoutResult(version, metrics, histograms))
        return found

    def settle(self, run_id: str, versions: Sequence[int]) -> None:
        """Do nothing: no other process waits for the evaluations."""


@contextlib.contextmanager
def _task_errors(task: LoadedTask) -> Iterator[None]:
    """Turn an exception of the task's code in this block into a `TaskError` with its place in that code."""
    try:
        with task_code():
            yield
    except ThinwireError:
        raise
    except Exception as error:
        raise TaskError(
            f"the task {task.name} raised {place(error, task.file)} in its holdout evaluation", why=str(error)
        ) from error
