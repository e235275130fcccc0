"""Executes the work of simulated clients in several processes, to the same bits as in one.

A free worker takes the next job of the queue. A client's state is on disk between its replies, so any worker may
execute its work. The order of replies stays round-robin (client_pool.py). A worker that was killed is replaced, and the
new one makes the same reply. If the work on one reply ends two workers, the run ends.

This module is also the program of a worker (`main`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from thinwire.client.task import LoadedTask
from thinwire.core.errors import ThinwireError, UsageError
from thinwire.core.fleet import Delivery
from thinwire.core.plan import digest_of
from thinwire.simulation.client_pool import ClientPopulation, TimedReply

MAX_CRASHES = 2  # of workers at the same job: the second one is no coincidence
# With `-m` Python would import this module twice, because its package imports it, and print a warning.
WORKER_SCRIPT = f"""
import sys
if sys.path[:1] == [""]: del sys.path[0]  # the folder of the caller may hold another thinwire/
from {__name__} import run_worker
run_worker()
"""
GRACE_S = 5.0  # for a worker to end by itself

Key = tuple[int, str]  # client, id of the assignment


@dataclass(frozen=True, eq=False)
class Job:
    """Holds one assignment and the client that works on it."""

    index: int
    delivery: Delivery

    @property
    def key(self) -> Key:
        """Return the client's index and the assignment's id."""
        return self.index, self.delivery.assignment.assignment_id


class Worker:
    """A worker process. It ends when this process ends for any reason, because its end of a pipe (lifeline) closes."""

    def __init__(self, spec: str, population: ClientPopulation) -> None:
        ours, theirs = Pipe()
        read, self._lifeline = os.pipe()
        self.connection: Connection = ours
        self.job: Job | None = None
        self.plans: set[str] = set()  # digests of the plans that it was given
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER_SCRIPT, str(theirs.fileno()), str(read)],
            pass_fds=(theirs.fileno(), read),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C interrupts this process only, which ends the others
        )
        theirs.close()
        os.close(read)
        self.connection.send((spec, population, sys.path))

    def close(self) -> None:
        """Terminate the process, and kill it if it has not ended after GRACE_S seconds."""
        self.process.terminate()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()
        os.close(self._lifeline)


def require_processes(processes: int, task: LoadedTask, debug: bool) -> None:
    """Raise `UsageError` if there is no process, or if several processes cannot execute the task."""
    if processes < 1:
        raise UsageError(
            f"processes = {processes} is not valid", why="clients work in one process or more", hint="processes=1"
        )
    if processes == 1:
        return
    if debug:
        raise UsageError(
            "--debug shows an error where it happens: in one process", hint="leave --processes out while you debug"
        )
    if not task.spec:
        raise UsageError(
            f"this task does not run in {processes} processes",
            why="each imports the task for itself, and an object of this process has no name to import it by",
            hint='simulate("NAME=path/to/task.py", plan, processes=2)',
        )


@dataclass
class ProcessExecutor:
    """Executes the work of a population's clients in `count` worker processes; none of them remains after `close`.

    With `early`, clients work before their turn. Otherwise they work one after the other, as in one process: a client
    must not work on an assignment that is withdrawn before its turn, if that changes its later replies.
    """

    spec: str  # NAME=MODULE
    population: ClientPopulation
    count: int
    early: bool = True
    _workers: list[Worker] = field(init=False, default_factory=list)
    _queue: deque[Job] = field(init=False, default_factory=deque)
    _done: dict[Key, TimedReply] = field(init=False, default_factory=dict)
    _last_worker: dict[int, Worker] = field(init=False, default_factory=dict)  # client -> the worker of its last job
    _crashes: Counter[Key] = field(init=False, default_factory=Counter)
    _plans: dict[str, Mapping[str, Any]] = field(init=False, default_factory=dict)  # by digest

    def __post_init__(self) -> None:
        try:
            for _ in range(self.count):
                self._workers.append(Worker(self.spec, self.population))
        except BaseException:
            self.close()
            raise

    @property
    def lookahead(self) -> int:
        """Return how many assignments are submitted before their turn: enough that no worker is idle, or none."""
        return 2 * self.count if self.early else 0

    def submit(self, index: int, delivery: Delivery) -> None:
        """Queue an assignment of client `index`, and send it to a worker if one is free."""
        self._queue.append(Job(index, delivery))
        self._assign_jobs()

    def result(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment; wait until a worker has made it."""
        job = Job(index, delivery)
        submitted = {*self._done, *(j.key for j in self._queue), *(w.job.key for w in self._workers if w.job)}
        if job.key not in submitted:
            self._queue.appendleft(job)
        while job.key not in self._done:
            self._assign_jobs()
            self._receive()
        self._assign_jobs()
        return self._done.pop(job.key)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _assign_jobs(self) -> None:
        for worker in self._workers:
            if worker.job is None and (job := self._next_for(worker)) is not None:
                self._queue.remove(job)
                worker.job = job
                delivery = self._with_plan(job.delivery, worker)
                with contextlib.suppress(OSError):  # the worker has ended, which _receive notices
                    worker.connection.send((job.index, delivery, self._last_worker.get(job.index) is worker))

    def _with_plan(self, delivery: Delivery, worker: Worker) -> Delivery:
        """Add the plan for a worker that does not have it: else its client would request the plan out of turn."""
        plan = delivery.assignment.plan
        digest = plan if isinstance(plan, str) else digest_of(plan)
        if not isinstance(plan, str):
            self._plans[digest] = plan
        if digest in worker.plans or digest not in self._plans:
            return delivery
        worker.plans.add(digest)
        return replace(delivery, assignment=replace(delivery.assignment, plan=self._plans[digest]))

    def _next_for(self, worker: Worker) -> Job | None:
        """Return the next job for a worker: the first one of a client that is not busy, or None.

        A client whose last job this worker had is preferred, because its handler may still be in memory there.
        """
        busy = {other.job.index for other in self._workers if other.job is not None}
        free = [job for job in self._queue if job.index not in busy]
        return next((job for job in free if self._last_worker.get(job.index) is worker), free[0] if free else None)

    def _receive(self) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
        for ready in wait(list(busy)):
            worker = busy[ready]  # type: ignore[index]  # wait gives what it was given
            try:
                key, timed = worker.connection.recv()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            self._done[key] = timed
            self._last_worker[key[0]] = worker
            worker.job = None

    def _replace(self, worker: Worker) -> None:
        """Replace a worker that has ended, and queue its job again; raise `ThinwireError` at its last crash."""
        worker.close()
        job, code = worker.job, worker.process.returncode
        assert job is not None
        self._crashes[job.key] += 1
        if self._crashes[job.key] >= MAX_CRASHES:
            self._workers.remove(worker)
            raise ThinwireError(
                f"the work of {self.population.name(job.index)} ended its process twice",
                why=f"signal {-code}: the system kills so where memory is short" if code < 0 else f"exit code {code}",
                hint="fewer --processes; with one, an error of the task is shown where it happens: --debug",
            )
        self._last_worker = {index: by for index, by in self._last_worker.items() if by is not worker}
        self._workers[self._workers.index(worker)] = Worker(self.spec, self.population)
        self._queue.appendleft(job)


def run_worker() -> None:
    """Run a worker with the two file descriptors of its command line: its connection and its lifeline."""
    main(Connection(int(sys.argv[1])), int(sys.argv[2]))


def main(connection: Connection, lifeline: int) -> None:
    """Run a worker: execute jobs from `connection` until the process that started it closes it or ends."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    spec, population, path = connection.recv()
    sys.path += [folder for folder in path if folder not in sys.path]

    from thinwire.client.executor import InProcessExecutor
    from thinwire.client.task import load_task
    from thinwire.client.train.errors import note_signals
    from thinwire.client.train.module import keep_generators
    from thinwire.client.train.runtime import use_threads
    from thinwire.simulation.client_pool import HandlerCache

    executor = InProcessExecutor(load_task(spec), population.client.device)
    use_threads(0, executor.layout.size)
    handlers = HandlerCache(population, executor, shared=True)
    with keep_generators(), note_signals():
        while True:
            try:
                index, delivery, is_current = connection.recv()
            except EOFError:
                return
            if not is_current:  # another process has worked for this client since
                handlers.evict(index)
            connection.send(((index, delivery.assignment.assignment_id), handlers.execute(index, delivery)))


def _end_with(lifeline: int) -> None:
    """End this process when its lifeline closes, whatever it is doing: nothing waits for its work."""
    os.read(lifeline, 1)
    os._exit(1)
