"""Evaluate a model of a run on the operator's own data: the part of `[run] evaluate = "holdout"` that has the task.

The task gets the data of a client with the name "holdout", the whole of part 0 of 1. The model is evaluated on their
test split, by the code that a device evaluates with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from thinwire.client.train.layout import Key
from thinwire.client.train.protocol import Local, TrainRequest, Work
from thinwire.core.errors import TaskError

if TYPE_CHECKING:
    from thinwire.client.executor import Executor
    from thinwire.client.train.protocol import ClientInfo, Split
    from thinwire.core.plan import RunPlan
    from thinwire.core.score_histogram import Histograms
    from thinwire.core.types import Metrics, Vector

NAME = "holdout"  # of the client that the task's data() is asked for


def holdout_client(client: ClientInfo) -> ClientInfo:
    """Return the client whose test split is the holdout data; path of the data, split and seed are those given."""
    return replace(client, name=NAME, partition=0, partitions=1)


def evaluate_model(
    executor: Executor,
    plan: RunPlan,
    client: ClientInfo,
    params: Vector,
    buffers: Vector,
    counters: Mapping[str, int],
) -> tuple[Metrics, Histograms]:
    """Return the metrics, as (sum, count), and the histograms of a model on the holdout data.

    Raise `TaskError` if there are no such data, `CannotReply` if the task's code raises.
    """
    request = TrainRequest(
        measure=True, train=False, local=Local.of(plan.local.model_dump(mode="json")), work=Work(),
        key=Key(plan.run.seed), counters=counters,
    )  # fmt: skip
    done = executor.do(request, holdout_client(client), params, buffers, lambda what, at, total: None, lambda: False)
    if not done.sums and not done.histograms:
        raise _without_data(plan.run.task)
    return done.sums, done.histograms


def require_holdout_data(task: str, split: Split) -> None:
    """Raise `TaskError` if the task gives no test split for the holdout client."""
    if split.test is None:
        raise _without_data(task)


def _without_data(task: str) -> TaskError:
    return TaskError(
        f"the task {task} has no holdout data",
        why=f'data(client) gave no test split for client.name == "{NAME}"',
        hint="return Split(train, test) for this client",
    )
