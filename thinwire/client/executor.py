"""Execute training and evaluation of a task, in this process or in a worker.

`Executor` is the protocol. `InProcessExecutor` executes in this process, for simulations. A `Worker` runs one process
for all tasks of a client (client/worker_process.py, client/train/worker.py) and `SubprocessExecutor` is one of its
tasks. The worker starts when it is needed, is killed when it hangs, and starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.aggregation import float_buffers
from thinwire.client.errors import CannotReply, as_thinwire_error
from thinwire.client.private_noise import DeviceSecrets
from thinwire.client.task import TaskManifest
from thinwire.client.train.errors import BadTask, BadUsage, Cancelled, TrainError
from thinwire.client.train.protocol import ClientInfo, Local, TrainRequest, TrainResult
from thinwire.client.train.schedule import REAL, Clock
from thinwire.client.train.task import LoadedTask
from thinwire.client.worker_process import HUNG_S, LOG, Deadline, Interpreter, Watchdog, WorkerDied, WorkerProcess
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout, differences
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.client.train import runtime
    from thinwire.client.train.protocol import OnProgress
    from thinwire.core.plan_schema import LocalSection


class Executor(Protocol):
    """The executor of one task."""

    @property
    def name(self) -> str:
        """Return the task's name."""

    @property
    def file(self) -> str:
        """Return the task's source file, by which failures give an error's place."""

    @property
    def layout(self) -> Layout:
        """Return the layout of the task's model."""

    def report(self) -> TaskReport:
        """Return what a hello reports of the task."""

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
        """Execute a request from these parameters and buffers, and return its result.

        `on_progress` receives the progress as (stage, done, total). If `cancelled` returns True, `Cancelled` is raised.
        `left_s` are the seconds to the deadline.
        """


class InProcessExecutor:
    """The executor in this process, in which a task that hangs is never ended.

    Clients that take turns share one: `shared` is an executor whose model and data a client uses with its own clock.
    """

    def __init__(
        self, task: LoadedTask, device: str = "cpu", clock: Clock = REAL, shared: InProcessExecutor | None = None
    ) -> None:
        self.task, self.device, self.clock, self._shared = task, device, clock, shared

    @property
    def name(self) -> str:
        """Return the task's name."""
        return self.task.name

    @property
    def file(self) -> str:
        """Return the task's source file."""
        return self.task.file

    @cached_property
    def inner(self) -> runtime.TaskRuntime:
        """Return the runtime of the task, made at the first use."""
        from thinwire.client.train.runtime import TaskRuntime as Inner

        if self._shared is not None:
            return self._shared.inner
        return Inner(self.task, self.device, DeviceSecrets)

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the task's model."""
        return Layout.from_json(self.inner.layout.to_json())

    def report(self) -> TaskReport:
        """Return what a hello reports of the task."""
        from thinwire.client.task import report

        return report(self.task)

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
        """Execute a request in this process; see `Executor.do`."""
        return self.inner.do(request, client, params, buffers, self.progress(on_progress), cancelled, self.clock)

    def progress(self, on_progress: OnProgress) -> OnProgress:
        """Return the callback that receives the progress; a subclass may let each step take its time."""
        return on_progress


IDLE_S = 600.0  # without an assignment, after which the process is ended to free its memory


class RemoteTraceback(Exception):
    """The traceback of an error in the worker process, for this device's owner alone."""


class Worker:
    """The worker process for all tasks of a client, used by one thread.

    `specs` name the tasks. After `idle_s` without work the process is ended, and after `hung_s` without a sign of life
    it is killed.

    Invariant: an assignment gets a reply or raises `CannotReply` ("worker") within the time that `Watchdog` gives it.
    The next assignment finds a fresh process.
    """

    def __init__(
        self,
        specs: Sequence[str],
        interpreter: Interpreter,
        *,
        device: str = "auto",
        threads: int = 0,
        hung_s: float = HUNG_S,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.specs, self.interpreter, self.folder = tuple(specs), interpreter, interpreter.folder
        self.device, self.threads, self.idle_s, self._clock = device, threads, idle_s, clock
        self.watchdog = Watchdog(hung_s, clock)
        self.stopping: Callable[[], bool] = lambda: False
        self.say: Callable[[str], object] = lambda line: None
        self.trains_on = ""  # the torch device of the last process
        self.manifests: list[TaskManifest] = []
        self.versions: Mapping[str, str] = {}
        self._child: WorkerProcess | None = None
        self._number, self._used_at, self._loaded_at = 0, clock(), clock()

    @property
    def pid(self) -> int | None:
        """Return the id of the process, None if there is none."""
        return self._child.process.pid if self._child is not None else None

    def describe(self) -> None:
        """Start the process, and read the manifests of the tasks from it.

        This is done at every start: a digest of the task's files does not tell that its model is the same, because the
        model also depends on packages, data and environment.
        Raises TaskError or UsageError if the person who typed the command can fix it, ModuleNotFoundError if torch is
        missing, and another ThinwireError if the process ended, after which another start may succeed.
        """
        self.versions = self.interpreter.versions
        try:
            self._start(None)
            self._require_tasks()
        except TrainError as wrong:
            raise as_thinwire_error(wrong) from wrong
        except WorkerDied as broken:
            hint = f"what it printed last: {self.folder / LOG}"
            raise ThinwireError("the process that trains ended before it knew the tasks", str(broken), hint) from broken

    def executors(self) -> list[SubprocessExecutor]:
        """Return an executor for each task."""
        return [SubprocessExecutor(self, one.name) for one in self.manifests]

    def restart(self) -> None:
        """Start a fresh process with the current code. A task that fails to load has the error in its report."""
        self._loaded_at = self._clock()
        self.close()
        try:
            self._start(None)
        except TrainError as wrong:
            raise as_thinwire_error(wrong) from wrong

    def is_due(self) -> bool:
        """Return True if a task failed to load `idle_s` ago: its cause may be over, as on a GPU that was full."""
        return any(one.error for one in self.manifests) and self._clock() - self._loaded_at >= self.idle_s

    def stop_if_idle(self) -> None:
        """End the process if it was idle for `idle_s`, to free its memory."""
        if self._child is not None and self._clock() - self._used_at >= self.idle_s:
            self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _forget_dead(self) -> None:
        """Forget a process that has ended, and end all that it started."""
        if self._child is not None and not self._child.alive:
            self._child.kill()
            self._child = None

    def do(
        self,
        task: str,
        request: TrainRequest,
        client: ClientInfo,
        params: Vector,
        buffers: Vector | None,
        on_progress: OnProgress,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> TrainResult:
        """Execute a request of `task` in the process, starting it if needed; see `Executor.do`."""
        layout, deadline, began = self.layout(task), self.watchdog.deadline(left_s), self._clock()
        try:
            self._forget_dead()
            if (child := self._child) is None:
                on_progress("load", 0, 0)
                child = self._start(deadline)
            if self.layout(task).digest != layout.digest:
                differs = differences(self.layout(task), layout)
                raise CannotReply("layout-mismatch", f"its code gives another model than it did: {differs}")
            if cancelled():
                raise Cancelled
            self._number += 1
            start_s = self._clock() - began
            request = request.after(start_s)
            header = {
                "do": "work", "id": self._number, "task": task, "order": request.to_json(),
                "buffers": buffers is not None, "shift": request.shift is not None, "kept": request.kept is not None,
                "client": {**vars(client), "data": str(client.data) if client.data else None},
            }  # fmt: skip
            vectors = [vector for vector in (params, buffers, request.shift, request.kept) if vector is not None]
            child.send(header, *vectors, arrays=request.state or None)
            found = self.watchdog.wait_for_result(child, on_progress, cancelled, deadline, self._number)
            with child.translated_errors():
                if "failed" in found:
                    raise self._error(child, found["failed"])
                if "cancelled" in found:
                    raise Cancelled
                done = TrainResult.from_json(found["done"])
                done.load_s += start_s
                sizes = _sizes(layout, request.personal, request.train)
                vectors = child.vectors(found, sizes if request.train or request.first else [])
                done.state = child.arrays(found, request.max_state_bytes)
            done.params, done.buffers, done.kept = (*vectors, None, None, None)[:3]
        except TrainError as wrong:
            raise CannotReply("task-error", wrong.what, str(wrong)) from wrong
        finally:
            self._used_at = self._clock()
            self._forget_dead()
        self.watchdog.reset()
        return done

    def layout(self, task: str) -> Layout:
        """Return the layout of a task's model; `CannotReply` if its code failed to load."""
        found = self.find(task)
        if found.parsed is None:
            raise CannotReply("task-error", found.error)
        return found.parsed

    def find(self, task: str) -> TaskManifest:
        """Return the description of a task."""
        return next(one for one in self.manifests if one.name == task)

    def _start(self, deadline: Deadline | None) -> WorkerProcess:
        """Start a process, and let it load the tasks; raise `TrainError` if tasks or interpreter are unusable."""
        self._child = child = WorkerProcess(self.interpreter, self.folder, self.watchdog.hung_s)
        try:
            child.send({"do": "load", "tasks": self.specs, "device": self.device, "threads": self.threads})
            found = self.watchdog.wait_for_result(child, lambda what, done, total: None, self.stopping, deadline)
            with child.translated_errors():
                if "missing" in found:
                    raise self._missing(str(found["missing"]))
                if "wrong" in found:
                    raise _wrong(found["wrong"])
                self.manifests = [TaskManifest.from_message(row) for row in found["loaded"]]
                self.versions = {**self.interpreter.versions, **found["versions"]}
                before, self.trains_on = self.trains_on, str(found["device"])
            if before not in ("", self.trains_on):
                self.say(f"the worker trains on {self.trains_on}; before on {before}")
        except BaseException:
            self._child = None
            child.kill()
            raise
        self._used_at = self._loaded_at = self._clock()
        return child

    def _error(self, child: WorkerProcess, raw: Mapping[str, Any]) -> CannotReply:
        place, said = str(raw["place"]), str(raw["said"])
        if raw["out_of_memory"] or raw["broken"]:
            child.kill()
        if raw["out_of_memory"]:
            error = CannotReply("worker", f"out of memory: {place}", f"out of memory: {place}: {said}")
        else:
            named = said.startswith(place)  # an error of Thinwire's own, which names its place already
            error = CannotReply(str(raw["kind"]), place, said if named else f"{place}: {said}" if said else place)
        error.__cause__ = RemoteTraceback("\n" + str(raw["trace"]))
        return error

    def _require_tasks(self) -> None:
        """Raise the error of a task that failed to load.

        At the start it ends the client; later it fails the task's assignments.
        """
        for one in self.manifests:
            if one.wrong:
                self.close()
                raise _wrong(one.wrong)

    def _missing(self, name: str) -> Exception:
        if self.interpreter.path is None:
            return ModuleNotFoundError(f"No module named {name!r}", name=name)
        return BadUsage(f"--python {self.interpreter.path} has no {name}", "it trains with it", "install it there")


class SubprocessExecutor:
    """Executes one task in the worker process, as a handler uses it."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name
        self.do = partial(worker.do, name)  # see `Executor.do`

    @property
    def file(self) -> str:
        """Return the task's source file."""
        return self.worker.find(self.name).file

    @property
    def layout(self) -> Layout:
        """Return the layout of the task's model."""
        return self.worker.layout(self.name)

    def report(self) -> TaskReport:
        """Return what a hello reports of the task."""
        return self.worker.find(self.name).report


def _sizes(layout: Layout, personal: Collection[str], trains: bool) -> list[int]:
    """Return the sizes of a result's vectors: shared parameters and buffers, and after training the personal floats."""
    groups = layout.trained, float_buffers(layout)
    shared = [sum(t.size for t in group if t.name not in personal) for group in groups]
    own = sum(t.size for group in groups for t in group if t.name in personal)
    return [*shared, own] if personal and trains else shared


def _wrong(raw: Sequence[str]) -> TrainError:
    kind, what, why, hint = (str(text) for text in raw)
    return (BadUsage if kind == "BadUsage" else BadTask)(what, why, hint)


@lru_cache(maxsize=8)  # computed once for each run, not for each round and simulated client
def local_of(section: LocalSection, clip: float = 0.0, prox: float = 0.0) -> Local:
    """Return the plan's [local], with what the round and the algorithm set in its place."""
    instead = {"clip_grad": clip} if clip else {}
    instead |= {"prox": prox} if prox else {}
    return Local.of(section.model_dump(mode="json") | instead)
