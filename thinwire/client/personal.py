"""Personal layers on a client: an executor that trains them beside the shared model, and their arrays by name.

A client keeps the values of its personal tensors in the state of a run (`ClientRunState.personal`), as arrays by the
tensors' names. They go to training with an assignment, come back with its result, and are committed with the reply.

Invariant: the commit of a reply replaces the values once. A failure, a withdrawn assignment and an assignment that was
answered before commit nothing, so they change no value. Neither does the outcome of the update: the values stay if the
reply arrives late or the aggregator drops the update, because no update contains them. With overlap they follow the
order of training, as the module's counters do.

When a run ends, or newer runs displace it, its values move to a file of their own (client/personal_files.py). A run
that goes on after that, as an extended one, goes on with them. `starting_values` finds them for a run that begins with
the model of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.client.errors import CannotReply
from thinwire.client.personal_files import PersonalValues, values_of
from thinwire.core.errors import PlanError
from thinwire.core.layout import Layout, Tensor
from thinwire.core.personal_layers import kept_floats, personal_tensors, shared_layout
from thinwire.core.plan_names import named_model
from thinwire.core.records import replace

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from thinwire.client.calls import Say
    from thinwire.client.executor import Executor
    from thinwire.client.train.protocol import ClientInfo, OnProgress, TrainRequest, TrainResult
    from thinwire.core.fleet import TaskReport
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Assignment, Vector

    Arrays = Mapping[str, NDArray[Any]]

RESHAPED = "of another shape"  # the state of which `ReplyHeader.lost` reports the loss
FIRST = "0"  # the model of `run:ID@0`


@dataclass(frozen=True)
class PersonalExecutor:
    """An executor whose model is the shared part of the task's: requests get the names of the personal tensors."""

    inner: Executor
    patterns: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the task's name."""
        return self.inner.name

    @property
    def file(self) -> str:
        """Return the task's source file."""
        return self.inner.file

    @property
    def layout(self) -> Layout:
        """Return the layout of the shared tensors."""
        return shared_layout(self.inner.layout, self.patterns)

    @property
    def personal(self) -> tuple[Tensor, ...]:
        """Return the personal tensors."""
        return personal_tensors(self.inner.layout, self.patterns)

    def report(self) -> TaskReport:
        """Return what a hello reports of the task."""
        return self.inner.report()

    def do(
        self,
        request: TrainRequest,
        client: ClientInfo,
        params: Vector,
        buffers: Vector | None,
        on_progress: OnProgress,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> TrainResult:
        """Execute a request; see `Executor.do`. The result's counters are all of the model's."""
        request = replace(request, personal=tuple(t.name for t in self.personal))
        return self.inner.do(request, client, params, buffers, on_progress, cancelled, left_s)


def executor_for(executor: Executor, plan: RunPlan) -> Executor:
    """Return the executor of a task in a run of this plan; `CannotReply` if its globs do not fit the task's model."""
    patterns = tuple(plan.local.personal_layers)
    if not patterns:
        return executor
    made = PersonalExecutor(executor, patterns)
    try:
        _ = made.personal
    except PlanError as error:
        raise CannotReply("layout-mismatch", str(error)) from error
    return made


def vector_of(arrays: Arrays, tensors: tuple[Tensor, ...]) -> Vector | None:
    """Return the kept values as one vector for training; None if they are not those of these tensors."""
    floats = kept_floats(tensors)
    if not floats or {name: array.shape for name, array in arrays.items()} != {t.name: t.shape for t in floats}:
        return None
    return np.concatenate([arrays[t.name].reshape(-1) for t in floats], dtype=np.float32)


def arrays_of(vector: Vector | None, tensors: tuple[Tensor, ...]) -> dict[str, NDArray[Any]]:
    """Return the values of a vector by the names of the personal tensors."""
    found, at = dict[str, "NDArray[Any]"](), 0
    for t in kept_floats(tensors) if vector is not None else ():
        assert vector is not None
        found[t.name] = vector[at : at + t.size].reshape(t.shape)
        at += t.size
    return found


@dataclass(frozen=True)
class StartingValues:
    """The personal values with which an assignment begins, None for those of `model()`.

    `lost` is `RESHAPED` if there were values that do not fit the model, and "" otherwise.
    """

    vector: Vector | None = None
    lost: str = ""


def starting_values(
    tensors: tuple[Tensor, ...], committed: Arrays, folder: Path | None, assignment: Assignment, init: str, say: Say
) -> StartingValues:
    """Return the values with which an assignment begins: the `committed` ones of its run, once there are any.

    Before that, a run whose `[run] init` is `run:ID` begins with the last values of run ID on this device; one that
    begins with the first model of ID does not. Values of other tensors or shapes are not used, and their loss is
    reported.
    """
    if not kept_floats(tensors):
        return StartingValues()
    origin = None if committed else values_of_origin(folder, init)
    run, arrays = (origin.run, origin.arrays) if origin else (assignment.run, committed)
    if not arrays:
        return StartingValues()
    if (vector := vector_of(arrays, tensors)) is None:
        say(f"{assignment.run}: the personal layers of {run} have other tensors or shapes; they begin again")
        return StartingValues(lost=RESHAPED)
    if not committed:
        say(f"{assignment.run}: the personal layers begin with those of {run}")
    return StartingValues(vector)


def values_of_origin(folder: Path | None, init: str) -> PersonalValues | None:
    """Return the values on this device of the run with whose last model a run begins; None if there are none."""
    origin = named_model(init)
    if folder is None or origin is None or origin[1] == FIRST:
        return None
    return values_of(folder, origin[0])
