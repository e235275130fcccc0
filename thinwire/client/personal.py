"""Personal layers on a client: an executor that trains them beside the shared model, and their arrays by name.

A client keeps the values of its personal tensors in the state of a run (`ClientRunState.personal`), as arrays by the
tensors' names. They go to training with an assignment, come back with its result, and are committed with the reply.

Invariant: the commit of a reply replaces the values once. A failure, a withdrawn assignment and an assignment that was
answered before commit nothing, so they change no value. Neither does the outcome of the update: the values stay if the
reply arrives late or the aggregator drops the update, because no update contains them. With overlap they follow the
order of training, as the module's counters do.

When a run ends, or newer runs displace it, its values move to `personal/RUN.safetensors` in the client's folder, where
they stay until the owner deletes that file or the device leaves. A run that goes on after that, as an extended one,
goes on with them. Another run of the same id, as of an aggregator that was installed again, has a file of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from thinwire.client.errors import CannotReply
from thinwire.core.errors import PlanError
from thinwire.core.layout import Layout, Tensor
from thinwire.core.personal_layers import kept_floats, personal_tensors, shared_layout
from thinwire.core.records import replace
from thinwire.core.statedir import private_folder, write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.client.executor import Executor
    from thinwire.client.train.protocol import ClientInfo, Tell, TrainRequest, TrainResult
    from thinwire.core.fleet import TaskReport
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Vector

    Arrays = Mapping[str, NDArray[Any]]

MAX_RUNS = 64  # that have ended, of all tasks of a client
IDENTITY = "identity"  # of the run, in the metadata of a file
FOLDER = "personal"  # in the client's folder: a file for each run that has ended
OWN_METRIC = "eval/personal"  # share of the evaluated examples that saw trained personal layers of their client


@dataclass(frozen=True)
class PersonalExecutor:
    """An executor whose model is the shared part of the task's: it adds the names of the personal tensors to orders."""

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
        order: TrainRequest,
        client: ClientInfo,
        params: Vector,
        buffers: Vector | None,
        tell: Tell,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> TrainResult:
        """Execute an order; see `Executor.do`. The result's counters are all of the model's."""
        order = replace(order, personal=tuple(t.name for t in self.personal))
        return self.inner.do(order, client, params, buffers, tell, cancelled, left_s)


def bench_for(bench: Executor, plan: RunPlan) -> Executor:
    """Return the executor of a task in a run of this plan; `CannotReply` if its globs do not fit the task's model."""
    patterns = tuple(plan.local.personal_layers)
    if not patterns:
        return bench
    made = PersonalExecutor(bench, patterns)
    try:
        _ = made.personal
    except PlanError as error:
        raise CannotReply("layout-mismatch", str(error)) from error
    return made


def tensors_of(bench: Executor) -> tuple[Tensor, ...]:
    """Return the personal tensors of an executor; none without personal layers."""
    return bench.personal if isinstance(bench, PersonalExecutor) else ()


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


def put_aside(folder: Path, run: str, identity: str, arrays: Arrays) -> None:
    """Keep the values of a run that has ended, until the owner deletes them; a second call changes nothing.

    At most `MAX_RUNS` files stay, the ones written last, so that an aggregator cannot fill the disk with ended runs.
    """
    if not arrays:
        return
    private_folder(folder / FOLDER)
    path = next(path for path in _files(folder, run) if _identity(path) in (None, identity))
    write_atomically(path, save(dict(arrays), {IDENTITY: identity}))
    files = sorted((folder / FOLDER).glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-MAX_RUNS]:
        path.unlink(missing_ok=True)


def put_back(folder: Path, run: str, identity: str) -> Arrays:
    """Return the values that were put aside for this run; none if there are none, or if the disk has damaged them."""
    for path in _files(folder, run):
        if (found := _identity(path)) is None:
            break
        if found == identity:
            with contextlib.suppress(OSError, SafetensorError):
                return {name: np.array(array) for name, array in load(path.read_bytes()).items()}
    return {}


def _files(folder: Path, run: str) -> Iterator[Path]:
    """Yield the files of the runs that have had this id."""
    return (folder / FOLDER / f"{run}{f'.{n}' if n else ''}.safetensors" for n in itertools.count())


def _identity(path: Path) -> str | None:
    """Return the identity of the run whose values a file has, "" if it does not tell one; None without a file."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            return str((file.metadata() or {}).get(IDENTITY, ""))
    except (OSError, SafetensorError):
        return ""
