"""This module holds what all adapters share: the task that they make, the steps of one round, a library's import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thinwire.client.train.errors import BadTask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.client.train.protocol import Local


class AdaptedTask(NamedTuple):
    """A task: its functions in the order in which a task's file takes them apart.

    `train` is None if Thinwire's own loop trains the model with `loss`.
    """

    model: Callable[..., Any]
    data: Callable[..., Any]
    loss: Callable[..., Any]
    metrics: Callable[..., Any] | None
    train: Callable[..., Any] | None


@dataclass(frozen=True)
class RoundWork:
    """The steps of one call of train(), and the examples of each.

    >>> from thinwire.client.train.protocol import Local
    >>> RoundWork.of(Local(lr=0.1, epochs=2, batch=32), 100)
    RoundWork(steps=8, batch=32, examples=100)
    """

    steps: int
    batch: int
    examples: int

    @classmethod
    def of(cls, local: Local, examples: int, steps_of_a_pass: int = 0) -> RoundWork:
        """Return the work that [local] of the plan requires on a client with so many examples.

        `steps_of_a_pass` is their number if the library decides it. Steps precede epochs, which `task check` gives
        both.
        """
        batch = min(local.batch, examples)
        passes = (local.epochs or 1.0) * (steps_of_a_pass or -(-examples // batch))
        return cls(int(local.steps or 0) or max(1, round(passes)), batch, examples)

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of each step, `batch` of them, from one permutation after the other.

        They are drawn from numpy's global generator, which the client seeds for each assignment.
        """
        rows: NDArray[np.int64] = np.empty(0, np.int64)
        for _ in range(self.steps):
            while len(rows) < self.batch:
                rows = np.concatenate([rows, np.random.permutation(self.examples)])  # noqa: NPY002 -- seeded
            yield rows[: self.batch]
            rows = rows[self.batch :]

    def weight(self, done: int) -> int:
        """Return the number of examples that weigh the update: all, unless the round ended after fewer steps."""
        return max(1, round(self.examples * min(1.0, done / self.steps)))


def imported(name: str, package: str) -> Any:
    """Import a library at its first use; raise `BadTask` if the pip package is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise BadTask(
            f"the package {package} is not installed",
            why=f"this task is made with thinwire.client.adapters, which imports {name}",
            hint=f"pip install {package}, into the environment of the process that trains",
        ) from error


def require_defaults(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any], plan: Mapping[str, str]) -> None:
    """Raise `BadTask` if a parameter that would have no effect has another value than its default.

    `plan` says what decides a parameter instead; "" for one that nothing carries out.
    """
    for key, instead in plan.items():
        if key not in given or key not in defaults or given[key] == defaults[key]:
            continue
        raise BadTask(
            f"{name}({key}={given[key]!r}) has no effect here",
            why=f"{instead} of the plan decides it" if instead else "it belongs to a loop that does not run here",
            hint=f"leave {key} out" + (f", and write {instead} in the plan" if instead else ""),
        )
