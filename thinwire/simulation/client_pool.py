"""Simulated clients: the device's own session, taken in turns, so that a seed decides everything."""

from __future__ import annotations

import heapq
import platform
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from thinwire.client.admission import Gate
from thinwire.client.executor import Here
from thinwire.client.handler import Session
from thinwire.client.payload import Bases
from thinwire.client.run_state import STATE, Entry, RunFolder, RunState, run_folder, write_unsynced
from thinwire.client.run_store import Reply
from thinwire.client.task import LoadedTask, report
from thinwire.client.train.protocol import Site
from thinwire.client.train.runtime import use_threads
from thinwire.client.train.schedule import REAL, Clock
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery, Hello
from thinwire.core.statedir import disk_error
from thinwire.simulation.local_fleet import LocalFleet, LocalLink

IN_TIME = 0.9  # of an automatic deadline: when who took longer on this machine answers


class Answering(Protocol):
    """Whoever does the work of all clients, here or in other processes."""

    @property
    def ahead(self) -> int: ...  # asks that may be worked on before it is their turn

    def begin(self, index: int, delivery: Delivery) -> None: ...
    def answer(self, index: int, delivery: Delivery) -> Answered: ...


class InTurn:
    """One after the other, in this process: nothing is begun before its turn."""

    ahead: int = 0

    def __init__(self, crowd: Crowd, bench: Here) -> None:
        use_threads(0, bench.layout.size)
        self._sessions = Sessions(crowd, bench)

    def begin(self, index: int, delivery: Delivery) -> None: ...

    def answer(self, index: int, delivery: Delivery) -> Answered:
        return self._sessions.answer(index, delivery)


class SimulatedClients:
    """Clients of a fleet; `step` lets the next of them that was asked answer, and is a LocalFleet's pump.

    They answer one after the other and count as side by side: each answers at its ask's time plus what its own work
    took, on a clock of its own, and the fleet's clock moves to the latest of these. So the number of clients makes
    nobody late, but work that is longer than a deadline does; unless `patient`, which is for deadlines that follow from
    what this machine took, for it may be busy now: then who took longer answers in time. Law: the order of answers
    does not depend on who works or when: only the turn decides it, which goes round.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        clock: VirtualClock,
        task: LoadedTask,
        crowd: Crowd,
        answering: Answering,
        *,
        patient: bool = False,
    ) -> None:
        reports, about = (report(task),), {"python": platform.python_version()}
        self._answering, self._patient = answering, patient
        self._fleet, self._clock, self._count, self._turn = fleet, clock, crowd.count, 0
        self._links: dict[str, tuple[int, LocalLink, VirtualClock]] = {}
        self._begun: dict[str, Delivery] = {}  # client -> what was taken from the fleet before its turn
        for index in range(crowd.count):
            name = crowd.name(index)
            own_clock = VirtualClock(origin=clock.origin)
            link = LocalLink(fleet, name, own_clock)
            link.hello(Hello(name, name, reports, about))
            self._links[name] = index, link, own_clock

    def step(self) -> bool:
        """Answer one ask; False when nobody was asked."""
        if not (names := self._in_turn()):
            return False
        for name in names[1:]:
            self._look_ahead(name)
        index, link, own_clock = self._links[names[0]]
        delivery = self._taken(names[0])
        self._begun.pop(names[0], None)
        self._turn = index + 1
        if delivery is None or delivery.ask.kind == "stop":  # a client's folder goes with all others'
            return True
        reply, bundle, took_s = self._answering.answer(index, delivery)
        if self._patient and delivery.ask.deadline_s:
            took_s = min(took_s, IN_TIME * delivery.ask.deadline_s)
        own_clock.advance(took_s)
        self._clock.advance(max(0.0, own_clock.now() - self._clock.now()))
        link.push(reply, bundle)
        return True

    def _in_turn(self) -> list[str]:
        """Who was asked and has not answered: first whose turn it is, then as many as may be looked ahead to."""
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
        """A client's ask; one that was taken before and withdrawn since is none any more."""
        link = self._links[name][1]
        begun = self._begun.get(name)
        if begun is not None and begun.ask.ask_id not in link.cancelled():
            return begun
        return link.pull(0.0)


# The sessions of many simulated clients in one process: each is made when it is asked, few are kept in memory.


AWAKE_BYTES = 256 << 20  # of residuals and the like that may stay in memory; the rest lies on disk


class Answered(NamedTuple):
    """What a client sends, and how long it worked for it."""

    reply: Reply
    bundle: Path | None
    took_s: float


@dataclass(frozen=True)
class Crowd:
    """What simulated clients have in common: client `index` is `name(index)` with part `index` of `count`.

    `step_s` are seconds that a step takes on each of them, by a script: then all that is measured on a client comes of
    it, and partial work ends where it says. Without it this machine's own speed ends nobody's training.
    """

    folder: Path
    site: Site
    count: int
    debug: bool = False
    step_s: tuple[float, ...] = ()

    def name(self, index: int) -> str:
        return f"sim-{index:0{len(str(self.count - 1))}}"

    def place(self, index: int) -> Site:
        return replace(self.site, name=self.name(index), partition=index, partitions=self.count)


class Sessions:
    """Law: who is put to sleep and woken answers as if it had been awake all the time.

    With `shared` other processes work for the same clients: each commit is on disk at once, whole.
    """

    def __init__(self, crowd: Crowd, bench: Here, shared: bool = False) -> None:
        self.crowd, self.bench, self.shared = crowd, bench, shared
        self._gate, self._bases = Gate(), Bases()  # the plan and the model that is sent are the same for all
        self._awake: OrderedDict[int, tuple[Session, list[RunFolder]]] = OrderedDict()
        self._bytes: dict[int, int] = {}

    def answer(self, index: int, delivery: Delivery) -> Answered:
        began = time.perf_counter()
        session, _ = self._awake.get(index) or self._wake(index)
        script_at = session.clock.now()
        reply, bundle = session.answer(delivery, lambda: False, _nothing)
        took_s = session.clock.now() - script_at if self.crowd.step_s else time.perf_counter() - began
        if bundle is None:  # nothing is lost on the way; parts are read after this
            session.delivered(reply)
        self._awake.move_to_end(index)
        self._bytes[index] = session.held_bytes
        while sum(self._bytes.values()) > AWAKE_BYTES and len(self._awake) > 1:
            self.sleep(next(iter(self._awake)))
        return Answered(reply, bundle, took_s)

    def sleep(self, index: int) -> None:
        """Nothing of a client stays in memory."""
        _, folders = self._awake.pop(index, (None, []))
        self._bytes.pop(index, None)
        for folder in folders:
            if isinstance(folder, HeldFolder):
                folder.put_down()

    def _wake(self, index: int) -> tuple[Session, list[RunFolder]]:
        name, made = self.crowd.name(index), list[RunFolder]()

        def folder_of(own: Path, run: str) -> RunFolder:
            made.append(shared_folder(own, run) if self.shared else HeldFolder(own, run))
            return made[-1]

        scripted = bool(self.crowd.step_s)
        clock, step_s = (_script(), self.crowd.step_s[index]) if scripted else (REAL, 0.0)
        session = Session(
            name, self.bench.at(clock), self.crowd.folder / name, self.crowd.place(index), debug=self.crowd.debug,
            gate=self._gate, folders=folder_of, take_base=self._bases.take, slow_step_s=step_s, clock=clock,
            may_stop=scripted,
        )  # fmt: skip
        self._awake[index] = session, made
        return self._awake[index]


def _script() -> Clock:
    """A clock that moves by what is slept on it."""
    virtual = VirtualClock()
    return Clock(virtual.now, virtual.advance)


def _nothing(line: str) -> None: ...


# A run's folder for one of many simulated clients: on disk when it is put down, in memory while it is at work.


class HeldFolder(RunFolder):
    """Law: what `load` gives after `put_down` is what was committed last.

    Answers' parts are files from the start. They stand beside the clients' own folders, which are made for those only
    that are put down: a thousand folders take longer to make and to remove than a round.
    """

    def __init__(self, own: Path, run: str) -> None:
        super().__init__(run_folder(own, run).folder, write_unsynced)
        self._beside, self._called = own.parent, f"{own.name}.{run}"
        self._answers: frozenset[str] = frozenset()
        self._held: RunState | None = None  # committed, and not on disk yet

    def load(self) -> tuple[RunState, list[str]]:
        state, said = super().load()
        self._answers = _answers(state)
        return state, said

    def path(self, entry: Entry) -> Path | None:
        return self._place(entry.file) if entry.file else None

    def commit(self, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        for file, data in (parts or {}).items():
            write_unsynced(self._place(file), data)
        for file in self._answers - _answers(state):
            self._place(file).unlink(missing_ok=True)
        self._answers, self._held = _answers(state), state

    def put_down(self) -> None:
        if self._held is not None:
            super().commit(self._held)
            self._held = None

    def _place(self, file: str) -> Path:
        return self._beside / f"{self._called}.{file}"


def _answers(state: RunState) -> frozenset[str]:
    return frozenset(entry.file for entry in state.outbox if entry.file)


# A run's folder of a client whom several processes serve in turn: what one of them commits is on disk for the next.


PRIVATE = 0o600


class SharedFolder(RunFolder):
    """Law: whoever is killed at any moment, `load` gives the state before or after a commit, whole; a power cut may
    leave another.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_swapped)

    def load(self) -> tuple[RunState, list[str]]:
        path = self.folder / STATE
        if not path.exists() and (draft := draft_of(path)).exists():
            draft.rename(path)
        return super().load()


def write_swapped(path: Path, data: bytes) -> None:
    """The old file goes when the new one is whole under another name, and only then is that one renamed.

    Renamed over the old file it would be one step, but ext4 then has the disk write it at once, which takes longer
    than all else that a small client does.
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
    return path.with_name(f".{path.name}.draft")


def shared_folder(folder: Path, run: str) -> SharedFolder:
    return SharedFolder(run_folder(folder, run).folder)
