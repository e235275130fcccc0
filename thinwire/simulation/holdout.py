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
from thinwire.store import Store


class SimulatedHoldout:
    """Evaluates the versions of one run in this process; see `Holdout`."""

    def __init__(self, plan: RunPlan, task: LoadedTask, client: ClientInfo, versions: Versions, model: Layout) -> None:
        self._plan, self._client, self._versions, self._size = plan, client, versions, model.size
        self._executor = InProcessExecutor(task, client.device)

    @classmethod
    def of(
        cls, plan: RunPlan, task: LoadedTask, client: ClientInfo, store: Store, home: AggregatorHome, run_id: str
    ) -> SimulatedHoldout | None:
        """Return the evaluator of a run's model versions; None if its plan has no holdout evaluation.

        Raise `TaskError` if the task has no holdout data, before a round is made.
        """
        if plan.run.evaluate != "holdout":
            return None
        layout = Layout.from_json(store.run(run_id).layout)
        versions = Versions(home.run(run_id), transmitted_layout(algorithm_of(plan), layout))
        found = cls(plan, task, client, versions, layout)
        with _task_errors(task):
            require_holdout_data(task.name, found._executor.inner.split(holdout_client(client)))
        return found

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        """Return the evaluations of all versions that are due."""
        found = list[HoldoutResult]()
        for version, stored in due.items():
            params, buffers = self._versions.read(stored)
            with _task_errors(self._executor.task):
                metrics, histograms = evaluate_model(
                    self._executor, self._plan, self._client, params[: self._size], buffers, stored.counters
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
