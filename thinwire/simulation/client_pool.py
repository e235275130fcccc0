"""Simulates many clients with the code of real ones, one after the other, so that a seed decides everything.

`SimulatedClients` decides which client replies next. A `ClientExecutor` executes the work of all clients, here in this
process (`SerialExecutor`), elsewhere in several (process_pool.py). `SessionCache` keeps the sessions of some clients in
memory and the state of all others on disk (`CachedRunFolder`, `SharedFolder`).
"""

from __future__ import annotations

import heapq
import platform
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from thinwire.client.admission import AdmissionController
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import BaseModelCache
from thinwire.client.run_state import STATE, ClientRunState, Entry, RunFolder, run_folder, write_unsynced
from thinwire.client.run_store import Reply
from thinwire.client.task import LoadedTask, report
from thinwire.client.train.protocol import Site
from thinwire.client.train.runtime import use_threads
from thinwire.client.train.schedule import REAL, Clock
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery, Hello
from thinwire.core.statedir import disk_error
from thinwire.simulation.local_fleet import LocalFleet, LocalLink

IN_TIME = 0.9  # of an automatic deadline: when a client replies that took longer on this machine


class ClientExecutor(Protocol):
    """Executes the work of all clients, in this process or in others."""

    @property
    def ahead(self) -> int:
        """Return how many assignments may be begun before their turn."""

    def begin(self, index: int, delivery: Delivery) -> None:
        """Begin to work on an assignment of client `index`, before its turn."""

    def answer(self, index: int, delivery: Delivery) -> Answered:
        """Return the reply of client `index` to an assignment, begun before or not."""


class SerialExecutor:
    """Executes the work of all clients in this process, one after the other; nothing begins before its turn."""

    ahead: int = 0

    def __init__(self, crowd: ClientPopulation, bench: InProcessExecutor) -> None:
        use_threads(0, bench.layout.size)
        self._sessions = SessionCache(crowd, bench)

    def begin(self, index: int, delivery: Delivery) -> None:
        """Do nothing, because no work begins before its turn."""

    def answer(self, index: int, delivery: Delivery) -> Answered:
        """Return the reply of client `index` to an assignment."""
        return self._sessions.answer(index, delivery)


class SimulatedClients:
    """Holds the clients of a simulated fleet; its `step`, the pump of a `LocalFleet`, lets one of them reply.

    Clients work one after the other, but the run sees them work at the same time. Each client has its own clock, and
    replies at the time of its assignment plus the duration of its own work. The fleet's clock moves on to the latest
    reply. So the number of clients makes no reply late, but work that takes longer than a deadline does.

    With `patient`, such work is in time too. This is for deadlines that follow from the speed of this machine, which
    may be busy for a while.

    Invariant: the order of replies depends on the turn alone, which goes round the clients. It does not depend on which
    process works, or when.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        clock: VirtualClock,
        task: LoadedTask,
        crowd: ClientPopulation,
        answering: ClientExecutor,
        *,
        patient: bool = False,
    ) -> None:
        reports, about = (report(task),), {"python": platform.python_version()}
        self._answering, self._patient = answering, patient
        self._fleet, self._clock, self._count, self._turn = fleet, clock, crowd.count, 0
        self._links: dict[str, tuple[int, LocalLink, VirtualClock]] = {}
        self._begun: dict[str, Delivery] = {}  # client -> its assignment, begun before its turn
        for index in range(crowd.count):
            name = crowd.name(index)
            own_clock = VirtualClock(origin=clock.origin)
            link = LocalLink(fleet, name, own_clock)
            link.hello(Hello(name, name, reports, about))
            self._links[name] = index, link, own_clock

    def step(self) -> bool:
        """Let one client reply; return False if no client has an assignment."""
        if not (names := self._in_turn()):
            return False
        for name in names[1:]:
            self._look_ahead(name)
        index, link, own_clock = self._links[names[0]]
        delivery = self._taken(names[0])
        self._begun.pop(names[0], None)
        self._turn = index + 1
        if delivery is None or delivery.ask.kind == "stop":  # all clients' folders are removed together
            return True
        reply, bundle, took_s = self._answering.answer(index, delivery)
        if self._patient and delivery.ask.deadline_s:
            took_s = min(took_s, IN_TIME * delivery.ask.deadline_s)
        own_clock.advance(took_s)
        self._clock.advance(max(0.0, own_clock.now() - self._clock.now()))
        link.push(reply, bundle)
        return True

    def _in_turn(self) -> list[str]:
        """Return the clients with an unanswered assignment: the one whose turn it is, then those that may begin before
        theirs.
        """
        asked = self._fleet.asked()
        return heapq.nsmallest(
            1 + self._answering.ahead, asked, key=lambda name: (self._links[name][0] - self._turn) % self._count
        )

    def _look_ahead(self, name: str) -> None:
        if name in self._begun:
            return
        delivery = self._taken(name)
        if delivery is not None and delivery.ask.kind != "stop":
            self._begun[name] = delivery
            self._answering.begin(self._links[name][0], delivery)

    def _taken(self, name: str) -> Delivery | None:
        """Return a client's assignment. One that was begun and has been withdrawn since does not count."""
        link = self._links[name][1]
        begun = self._begun.get(name)
        if begun is not None and begun.ask.ask_id not in link.cancelled():
            return begun
        return link.pull(0.0)


AWAKE_BYTES = 256 << 20  # residuals and other state that may stay in memory; the rest is on disk


class Answered(NamedTuple):
    """Holds a client's reply, and how long it worked for it."""

    reply: Reply
    bundle: Path | None
    took_s: float


@dataclass(frozen=True)
class ClientPopulation:
    """Holds what simulated clients have in common: client `index` is `name(index)`, with part `index` of `count` of the
    data.

    `step_s` holds the seconds that a step takes on each client, if a script decides them. Then all measurements on a
    client follow from it, and partial work ends where it says. Without it, the speed of this machine ends no training
    early.
    """

    folder: Path
    site: Site
    count: int
    debug: bool = False
    step_s: tuple[float, ...] = ()

    def name(self, index: int) -> str:
        """Return the device name of client `index`."""
        return f"sim-{index:0{len(str(self.count - 1))}}"

    def place(self, index: int) -> Site:
        """Return the data, split and compute device of client `index`."""
        return replace(self.site, name=self.name(index), partition=index, partitions=self.count)


class SessionCache:
    """Executes the work of many clients in one process, and keeps few of their sessions in memory.

    A session is made when its client gets an assignment. With `shared`, other processes work for the same clients, so
    each commit is on disk at once and complete.

    Invariant: a client whose session was evicted and loaded again replies as if it had stayed in memory.
    """

    def __init__(self, crowd: ClientPopulation, bench: InProcessExecutor, shared: bool = False) -> None:
        self.crowd, self.bench, self.shared = crowd, bench, shared
        self._gate, self._bases = AdmissionController(), BaseModelCache()  # all clients have the same plan and model
        self._awake: OrderedDict[int, tuple[AssignmentHandler, list[RunFolder]]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def answer(self, index: int, delivery: Delivery) -> Answered:
        """Return the reply of client `index` to an assignment."""
        began = time.perf_counter()
        session, _ = self._awake.get(index) or self._wake(index)
        script_at = session.clock.now()
        reply, bundle = session.answer(delivery, lambda: False, _nothing)
        took_s = session.clock.now() - script_at if self.crowd.step_s else time.perf_counter() - began
        if bundle is None:  # no reply is lost in transit; one with parts is read later
            session.delivered(reply)
        self._awake.move_to_end(index)
        self._bytes[index] = session.held_bytes
        while sum(self._bytes.values()) > AWAKE_BYTES and len(self._awake) > 1:
            self.sleep(next(iter(self._awake)))
        return Answered(reply, bundle, took_s)

    def sleep(self, index: int) -> None:
        """Evict a client: write its state to disk, so that nothing of it stays in memory."""
        _, folders = self._awake.pop(index, (None, []))
        self._bytes.pop(index, None)
        for folder in folders:
            if isinstance(folder, CachedRunFolder):
                folder.put_down()

    def _wake(self, index: int) -> tuple[AssignmentHandler, list[RunFolder]]:
        name, made = self.crowd.name(index), list[RunFolder]()

        def folder_of(own: Path, run: str) -> RunFolder:
            made.append(shared_folder(own, run) if self.shared else CachedRunFolder(own, run))
            return made[-1]

        scripted = bool(self.crowd.step_s)
        clock, step_s = (_script(), self.crowd.step_s[index]) if scripted else (REAL, 0.0)
        session = AssignmentHandler(
            name, self.bench.at(clock), self.crowd.folder / name, self.crowd.place(index), debug=self.crowd.debug,
            gate=self._gate, folders=folder_of, take_base=self._bases.take, slow_step_s=step_s, clock=clock,
            may_stop=scripted,
        )  # fmt: skip
        self._awake[index] = session, made
        return self._awake[index]


def _script() -> Clock:
    """Return a clock that moves only by the sleep on it."""
    virtual = VirtualClock()
    return Clock(virtual.now, virtual.advance)


def _nothing(line: str) -> None: ...


class CachedRunFolder(RunFolder):
    """Holds a client's run state, in memory while it works and on disk after `put_down`.

    Encoded updates are files from the start. They are next to the clients' folders, which exist only for clients that
    were put down. A thousand folders take longer to make and to remove than a round.

    Invariant: `load` after `put_down` returns the state that was committed last.
    """

    def __init__(self, own: Path, run: str) -> None:
        super().__init__(run_folder(own, run).folder, write_unsynced)
        self._beside, self._called = own.parent, f"{own.name}.{run}"
        self._answers: frozenset[str] = frozenset()
        self._held: ClientRunState | None = None  # committed, but not on disk yet

    def load(self) -> tuple[ClientRunState, list[str]]:
        state, said = super().load()
        self._answers = _answers(state)
        return state, said

    def path(self, entry: Entry) -> Path | None:
        """Return the file of an entry's update; None if the entry has none."""
        return self._place(entry.file) if entry.file else None

    def commit(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        for file, data in (parts or {}).items():
            write_unsynced(self._place(file), data)
        for file in self._answers - _answers(state):
            self._place(file).unlink(missing_ok=True)
        self._answers, self._held = _answers(state), state

    def put_down(self) -> None:
        """Write the state that was committed last to disk, unless it is there already."""
        if self._held is not None:
            super().commit(self._held)
            self._held = None

    def _place(self, file: str) -> Path:
        return self._beside / f"{self._called}.{file}"


def _answers(state: ClientRunState) -> frozenset[str]:
    return frozenset(entry.file for entry in state.outbox if entry.file)


PRIVATE = 0o600


class SharedFolder(RunFolder):
    """Holds the run state of a client that several processes serve in turn: each commit is on disk for the next
    process.

    Invariant: if a process is killed at any moment, `load` returns the complete state before or after a commit. A power
    failure may leave another state.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_swapped)

    def load(self) -> tuple[ClientRunState, list[str]]:
        path = self.folder / STATE
        if not path.exists() and (draft := draft_of(path)).exists():
            draft.rename(path)
        return super().load()


def write_swapped(path: Path, data: bytes) -> None:
    """Replace a file without syncing it: write the new one under another name, remove the old one, then rename the new
    one.

    A rename over the old file would be one step. But ext4 then writes the new file to disk at once, which takes longer
    than all other work of a small client.
    """
    draft = draft_of(path)
    try:
        draft.touch(PRIVATE)
        draft.write_bytes(data)
        path.unlink(missing_ok=True)
        draft.rename(path)
    except OSError as error:
        raise disk_error(error, path) from error


def draft_of(path: Path) -> Path:
    """Return the name under which a new file is written before it replaces `path`."""
    return path.with_name(f".{path.name}.draft")


def shared_folder(folder: Path, run: str) -> SharedFolder:
    """Return the shared folder of a run in a client's own folder."""
    return SharedFolder(run_folder(folder, run).folder)
