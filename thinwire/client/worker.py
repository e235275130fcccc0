"""The process that trains, as the service sees it: there when it is needed, given up when it hangs, begun anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from thinwire.aggregation import float_buffers
from thinwire.client import described
from thinwire.client.bench import Tell
from thinwire.client.child import Broken, Child
from thinwire.client.compute.errors import BadTask, BadUsage, Cancelled, Wrong
from thinwire.client.compute.order import Done, Order
from thinwire.client.compute.site import Site
from thinwire.client.described import Described
from thinwire.client.failures import CannotAnswer
from thinwire.client.interpreter import Interpreter
from thinwire.client.refusals import named
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

LOOK_S = 0.1  # between two looks whether the ask was withdrawn
LETS_GO_S = 5.0  # from hearing that the ask was withdrawn to the end of the batch
HUNG_S = 60.0  # past the deadline without a sign of life
IDLE_S = 600.0  # without an ask: its memory is given back


class Theirs(Exception):
    """The traceback of an error in the other process: of use to this device's owner alone."""


class Worker:
    """One process for all tasks of a client. Used by one thread.

    Laws: whatever becomes of the process, an ask is answered or raises `CannotAnswer("worker", ..)`, at the latest
    `hung_s` or once more the time it had past its deadline; the next one finds a fresh process. After each that hung
    the next one has twice as long: what is only slow comes to an end some time.
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
        self.device, self.threads, self.hung_s, self.idle_s, self._clock = device, threads, hung_s, idle_s, clock
        self.stopping: Callable[[], bool] = lambda: False
        self.described: list[Described] = []
        self.versions: Mapping[str, str] = {}
        self._child: Child | None = None
        self._number, self._hung, self._used_at = 0, 0, clock()

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child is not None else None

    def describe(self) -> None:
        """Know the tasks: from the last time where nothing has changed since, else from the process.

        TaskError or UsageError: the person who typed it can do something about it.
        """
        self.versions = self.interpreter.versions
        found = described.kept(self.folder, self._key, self.specs) if "torch" in self.versions else None
        if found is not None:
            self.described = found
            return
        try:
            self._started(None)
            self._require_tasks()
        except Wrong as wrong:
            raise named(wrong) from wrong

    def benches(self) -> list[There]:
        return [There(self, one.name) for one in self.described]

    def anew(self) -> None:
        """A fresh process with the code as it is now; a task that is none any more says so in its report."""
        self.close()
        try:
            self._started(None)
        except Wrong as wrong:
            raise named(wrong) from wrong

    def rest(self) -> None:
        """Give the memory back when nothing was asked for so long."""
        if self._child is not None and self._clock() - self._used_at >= self.idle_s:
            self.close()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def do(
        self,
        task: str,
        order: Order,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell,
        cancelled: Callable[[], bool],
        left_s: float | None,
    ) -> Done:
        layout, until = self.layout(task), None if left_s is None else (self._clock() + left_s, left_s)
        try:
            child = self._child if self._child is not None and self._child.alive else self._started(until)
            if self.layout(task).digest != layout.digest:
                raise CannotAnswer("layout-mismatch", "its code gives another model than it did")
            if cancelled():
                raise Cancelled
            self._number += 1
            head = {
                "do": "work", "id": self._number, "task": task, "order": order.to_json(),
                "buffers": buffers is not None, "site": {**vars(site), "data": str(site.data) if site.data else None},
            }  # fmt: skip
            child.send(head, *([params] if buffers is None else [params, buffers]))
            found = self._heard(child, tell, cancelled, until)
            with child.held_to_account():
                if "failed" in found:
                    raise self._error(child, found["failed"])
                if "cancelled" in found:
                    raise Cancelled
                done = Done.from_json(found["done"])
                sizes = [layout.size, sum(t.size for t in float_buffers(layout))]
                vectors = child.vectors(found, sizes if order.train else [])
            done.params, done.buffers = vectors or (None, None)
        except Wrong as wrong:
            raise CannotAnswer("task-error", wrong.what, str(wrong)) from wrong
        except Broken:
            self._child = None
            raise
        finally:
            self._used_at = self._clock()
        self._hung = 0
        return done

    def layout(self, task: str) -> Layout:
        found = self.find(task)
        if found.parsed is None:
            raise CannotAnswer("task-error", found.error)
        return found.parsed

    def find(self, task: str) -> Described:
        return next(one for one in self.described if one.name == task)

    def _started(self, until: tuple[float, float] | None) -> Child:
        """A process that knows the tasks. `Wrong`: it cannot be used as things are."""
        self._child = child = Child(self.interpreter, self.folder, self.hung_s)
        try:
            child.send({"do": "load", "tasks": self.specs, "device": self.device, "threads": self.threads})
            found = self._heard(child, lambda what, done, total: None, self.stopping, until)
            with child.held_to_account():
                if "missing" in found:
                    raise self._missing(str(found["missing"]))
                if "wrong" in found:
                    raise _wrong(found["wrong"])
                self.described = [_described(row) for row in found["loaded"]]
                self.versions = {**self.interpreter.versions, **found["versions"]}
        except BaseException:
            self._child = None
            child.kill()
            raise
        self._used_at = self._clock()
        described.keep(self.folder, self._key, self.described)
        return child

    def _heard(
        self, child: Child, tell: Tell, cancelled: Callable[[], bool], until: tuple[float, float] | None
    ) -> dict[str, Any]:
        """What it says when it is done; meanwhile its progress is told on, and its time runs."""
        alive_at, told_at = self._clock(), None
        while True:
            head, now = child.hear(LOOK_S), self._clock()
            if head is not None:
                if "told" not in head:
                    return head
                with child.held_to_account():
                    what, done, total = head["told"]
                    tell(str(what), int(done), int(total))
                alive_at = now
            if told_at is None and cancelled():
                told_at = now
                child.send({"do": "cancel", "id": self._number})
            if told_at is not None and now - told_at > LETS_GO_S:
                child.kill()
                self._child = None
                raise Cancelled
            if until is not None and now - max(until[0], alive_at) > self._patience_s(until[1]):
                child.kill()
                self._hung += 1
                raise Broken(f"hung: {now - alive_at:.0f} s without a sign of life, and past the deadline")

    def _patience_s(self, had_s: float) -> float:
        return max(self.hung_s, had_s) * 2.0 ** min(self._hung, 10)

    def _error(self, child: Child, raw: Mapping[str, Any]) -> CannotAnswer:
        place, said = str(raw["place"]), str(raw["said"])
        if raw["out_of_memory"]:
            child.kill()
            self._child = None
            error = CannotAnswer("worker", f"out of memory: {place}", f"out of memory: {place}: {said}")
        else:
            error = CannotAnswer(str(raw["kind"]), place, f"{place}: {said}" if said else place)
        error.__cause__ = Theirs("\n" + str(raw["trace"]))
        return error

    def _require_tasks(self) -> None:
        """At the start a task that is none ends it all; later it fails its asks."""
        for one in self.described:
            if one.wrong:
                self.close()
                raise _wrong(one.wrong)

    @property
    def _key(self) -> dict[str, Any]:
        python = str(self.interpreter.path) if self.interpreter.path else ""
        return {"interpreter": python, "device": self.device, **self.interpreter.versions}

    def _missing(self, name: str) -> Exception:
        if self.interpreter.path is None:
            return ModuleNotFoundError(f"No module named {name!r}", name=name)
        return BadUsage(f"--python {self.interpreter.path} has no {name}", "it trains with it", "install it there")


class There:
    """One of a worker's tasks, as a session sees it."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name

    @property
    def file(self) -> str:
        return self.worker.find(self.name).file

    @property
    def layout(self) -> Layout:
        return self.worker.layout(self.name)

    def report(self) -> TaskReport:
        return self.worker.find(self.name).report

    def do(
        self,
        order: Order,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell,
        cancelled: Callable[[], bool],
        left_s: float | None = None,
    ) -> Done:
        return self.worker.do(self.name, order, site, params, buffers, tell, cancelled, left_s)


def _wrong(raw: Sequence[str]) -> Wrong:
    kind, what, why, hint = (str(text) for text in raw)
    return (BadUsage if kind == "BadUsage" else BadTask)(what, why, hint)


def _described(row: Mapping[str, Any]) -> Described:
    if "wrong" in row:
        wrong = tuple(str(text) for text in row["wrong"])
        return Described(row["spec"], str(row["spec"]).partition("=")[0], error=wrong[1], wrong=wrong)
    found = Described(**row)
    _ = found.report  # ValueError here and not later
    return found
