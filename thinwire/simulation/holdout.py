"""Holdout evaluation in a simulation: this process has the task and evaluates each version as soon as it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.client.executor import InProcessExecutor
from thinwire.client.holdout import evaluate_model
from thinwire.client.task import LoadedTask
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.events import ModelStored
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.server.holdout import HoldoutResult
from thinwire.server.model_store import Versions


class SimulatedHoldout:
    """Evaluates the versions of one run in this process; see `Holdout`."""

    def __init__(self, plan: RunPlan, task: LoadedTask, client: ClientInfo, versions: Versions, model: Layout) -> None:
        self._plan, self._client, self._versions, self._size = plan, client, versions, model.size
        self._executor = InProcessExecutor(task, client.device)

    def results(self, run_id: str, due: Mapping[int, ModelStored]) -> list[HoldoutResult]:
        """Return the evaluations of all versions that are due."""
        found = list[HoldoutResult]()
        for version, stored in due.items():
            params, buffers = self._versions.read(stored)
            metrics, histograms = evaluate_model(
                self._executor, self._plan, self._client, params[: self._size], buffers, stored.counters
            )
            found.append(HoldoutResult(version, metrics, histograms))
        return found

    def settle(self, run_id: str, versions: Sequence[int]) -> None:
        """Do nothing: nobody waits for an answer."""
