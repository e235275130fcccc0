"""Simulates many clients with the code of real ones, one after the other, so that a seed decides everything.

`SimulatedClients` decides which client replies next. A `ClientExecutor` executes the work of all clients, here in this
process (`SerialExecutor`), elsewhere in several (process_pool.py). `HandlerCache` keeps the handlers of some clients in
memory and the state of all others on disk (storage.py).
"""

from __future__ import annotations

import heapq
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from thinwire.client.admission import AdmissionController
from thinwire.client.assignment_context import HandlerEnvironment
from thinwire.client.execute import Begun
from thinwire.client.executor import InProcessExecutor
from thinwire.client.handler import AssignmentHandler
from thinwire.client.payload import BaseModelCache
from thinwire.client.run_state import RunFolder
from thinwire.client.secure import SIMULATED, Send, simulated_identity
from thinwire.client.task import LoadedTask, report
from thinwire.client.train.protocol import ClientInfo
from thinwire.client.train.runtime import use_threads
from thinwire.client.train.schedule import Clock
from thinwire.core.clock import VirtualClock
from thinwire.core.equipment import GIB
from thinwire.core.fleet import Delivery, Hello
from thinwire.core.records import replace
from thinwire.core.types import PhaseReply, Reply
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.storage import CachedRunFolder, LruPolicy, shared_folder

if TYPE_CHECKING:
    from thinwire.client.train.protocol import Tell

IN_TIME = 0.9  # of an automatic deadline: when a client replies that took longer on this machine


class ClientExecutor(Protocol):
    """Executes the work of all clients, in this process or in others."""

    @property
    def ahead(self) -> int:
        """Return how many assignments may be begun before their turn."""

    def begin(self, index: int, delivery: Delivery) -> None:
        """Begin to work on an assignment of client `index`, before its turn."""

    def answer(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment, begun before or not."""


TOGETHER = 64  # clients that work one right after the other
QUICK_S = 0.005  # of a client's work; what the processor's caches hold for longer work makes little difference


class SerialExecutor:
    """Executes the work of all clients in this process, one after the other.

    With `early`, `TOGETHER` quick clients work before the first of them replies. The processor's caches then hold the
    code and data of a client, and after that those of the aggregator, which takes a fifth less time. A client whose
    assignment is withdrawn may then have worked for it. So `early` is for plans that withdraw none (`withdraws_none`).
    """

    def __init__(
        self, population: ClientPopulation, executor: InProcessExecutor, shared: bool = False, early: bool = False
    ) -> None:
        use_threads(0, executor.layout.size)
        self._handlers = HandlerCache(population, executor, shared)
        self._early, self._answered, self._took_s = early, 0, QUICK_S  # of the latest client
        self._made: dict[int, tuple[str, TimedReply]] = {}  # client -> an assignment, and the reply before its turn

    @property
    def ahead(self) -> int:
        """Return how many assignments are begun before their turn: none, or those of the next clients."""
        return TOGETHER - 1 if self._early and self._answered % TOGETHER == 0 and self._took_s < QUICK_S else 0

    def begin(self, index: int, delivery: Delivery) -> None:
        """Make the reply of client `index` to an assignment, before its turn."""
        self._made[index] = delivery.assignment.assignment_id, self._handlers.answer(index, delivery)

    def answer(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment, made before or not."""
        self._answered += 1
        assignment_id, made = self._made.pop(index, ("", None))
        if made is None or assignment_id != delivery.assignment.assignment_id:
            made = self._handlers.answer(index, delivery)
        self._took_s = made.took_s
        return made


class SimulatedClients:
    """Holds the clients of a simulated fleet; its `step`, the pump of a `LocalFleet`, lets one of them reply.

    Clients work one after the other, but the run sees them work at the same time. Each client has its own clock, and
    replies at the time of its assignment plus the duration of its own work. The fleet's clock moves on to the latest
    reply. So the number of clients makes no reply late, but work that takes longer than a deadline does.

    With `patient`, such work is in time too. This is for deadlines that follow from the speed of this machine, which
    may be busy for a while. `turn_after` is the client that replied last before a restart.

    Invariant: the order of replies depends on the turn alone, which goes round the clients. It does not depend on which
    process works, or when.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        clock: VirtualClock,
        task: LoadedTask,
        population: ClientPopulation,
        answering: ClientExecutor,
        *,
        patient: bool = False,
        turn_after: str = "",
    ) -> None:
        reports, about = (report(task),), {"python": platform.python_version()}
        self._answering, self._patient = answering, patient
        self._fleet, self._clock = fleet, clock
        self._links: dict[str, tuple[int, LocalLink, VirtualClock]] = {}
        self._begun: dict[str, Delivery] = {}  # client -> its assignment, begun before its turn
        self._trains_until: dict[str, float] = {}  # client in a secure round -> when its training ends, by its clock
        self._turns, fleet.on_send = Turns(), self._queue_turn
        for index in range(population.count):
            name = population.name(index)
            own_clock = VirtualClock(origin=clock.origin)
            link = LocalLink(fleet, name, own_clock)
            link.hello(Hello(name, name, reports, about, secure=tuple(sorted(SIMULATED))))
            self._links[name] = index, link, own_clock
        if turn_after in self._links:
            self._turns.go_on_after(self._links[turn_after][0])

    def _queue_turn(self, name: str) -> None:
        self._turns.add(self._links[name][0], name)

    def step(self) -> bool:
        """Let one client reply; return False if no client has an assignment."""
        if not (names := self._turns.first(1 + self._answering.ahead, self._fleet.is_assigned)):
            return False
        for name in names[1:]:
            self._look_ahead(name)
        index, link, own_clock = self._links[names[0]]
        delivery = self._taken(names[0])
        self._begun.pop(names[0], None)
        self._turns.take()
        if delivery is None or delivery.assignment.kind == "stop":  # all clients' folders are removed together
            if self._fleet.is_assigned(link.name):
                self._turns.add(index, link.name)
            return True
        timed = self._answering.answer(index, delivery)
        took_s = timed.took_s
        if self._patient and delivery.assignment.deadline_s:
            took_s = min(took_s, IN_TIME * delivery.assignment.deadline_s)
        for message in timed.before:
            self._push(link, own_clock, message)
        if timed.reply is None:  # it answers phases of its secure round while it trains
            self._trains_until[names[0]] = own_clock.now() + took_s
        else:
            if not isinstance(timed.reply, PhaseReply):
                took_s += max(0.0, self._trains_until.pop(names[0], 0.0) - own_clock.now())
            own_clock.advance(took_s)
            self._push(link, own_clock, timed.reply, timed.bundle)
        if self._fleet.is_assigned(link.name):  # it has another assignment
            self._turns.add(index, link.name)
        return True

    def _push(self, link: LocalLink, own_clock: VirtualClock, reply: Reply, bundle: Path | bytes | None = None) -> None:
        """Push a reply at the time of its client's clock."""
        self._clock.advance(max(0.0, own_clock.now() - self._clock.now()))
        link.push(reply, bundle)

    def _look_ahead(self, name: str) -> None:
        if name in self._begun:
            return
        delivery = self._taken(name)
        if delivery is not None and delivery.assignment.kind != "stop":
            self._begun[name] = delivery
            self._answering.begin(self._links[name][0], delivery)

    def _taken(self, name: str) -> Delivery | None:
        """Return a client's assignment. One that was begun and has been withdrawn since does not count."""
        link = self._links[name][1]
        begun = self._begun.get(name)
        if begun is not None and begun.assignment.assignment_id not in link.cancelled():
            return begun
        return link.pull(0.0)


class Turns:
    """Holds the clients that wait for their turn, which goes round them in the order of their index.

    Each operation on a client takes O(log n) for n waiting clients.

    >>> turns = Turns()
    >>> turns.add(1, "b"), turns.take(), turns.add(2, "c"), turns.add(0, "a")
    (None, None, None, None)
    >>> turns.first(2, lambda name: True)
    ['c', 'a']
    """

    def __init__(self) -> None:
        self._pass, self._turn = 0, 0
        self._waiting: set[str] = set()
        self._heap: list[tuple[int, int, str]] = []  # (pass, index, client)

    def add(self, index: int, name: str) -> None:
        """Let client `index` wait for its turn; one that waits already keeps its place."""
        if name not in self._waiting:
            self._waiting.add(name)
            heapq.heappush(self._heap, (self._pass + (index < self._turn), index, name))

    def go_on_after(self, index: int) -> None:
        """Let the turn go on behind client `index`, before any client waits."""
        self._turn = index + 1

    def first(self, count: int, is_waiting: Callable[[str], bool]) -> list[str]:
        """Return the first clients in turn for which `is_waiting` is True, at most `count`; the others are removed."""
        found = list[tuple[int, int, str]]()
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if is_waiting(entry[2]):
                found.append(entry)
            else:
                self._waiting.discard(entry[2])
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [name for _, _, name in found]

    def take(self) -> None:
        """Give the first client its turn: it waits no more, and the turn goes on behind it."""
        self._pass, index, name = heapq.heappop(self._heap)
        self._waiting.discard(name)
        self._turn = index + 1


AWAKE_BYTES = 256 << 20  # residuals and other state that may stay in memory; the rest is on disk
HANDLER_BYTES = 16 << 10  # of a handler without state
DATA_BYTES = int(GIB)  # of clients' data in memory; a task reads other clients' data again


class TimedReply(NamedTuple):
    """Holds a client's reply, and how long it worked for it.

    In a secure round the reply to a training assignment is None: the masked update is the reply to the phase `masked`.
    `before` is what the client sent before it began to train.
    """

    reply: Reply | None
    bundle: Path | bytes | None
    took_s: float
    before: tuple[PhaseReply, ...] = ()


@dataclass(frozen=True)
class ClientPopulation:
    """The population of a simulation: `count` clients, each with a name and one part of the data.

    `client` is the template of all clients: their data, split, seed and compute device. `step_s` has the seconds of a
    training step for each client, or is empty. If given, it determines all times that a client measures, and where its
    partial work ends. Otherwise the speed of this machine ends no training early. With `durable`, a commit that is
    written to disk is also synced, so that it survives a power failure.
    """

    folder: Path
    client: ClientInfo
    count: int
    debug: bool = False
    step_s: tuple[float, ...] = ()
    durable: bool = False

    def name(self, index: int) -> str:
        """Return the device name of client `index`."""
        return f"sim-{index:0{len(str(self.count - 1))}}"

    def client_info(self, index: int) -> ClientInfo:
        """Return the data, split and compute device of client `index`."""
        return replace(self.client, name=self.name(index), partition=index, partitions=self.count)


class HandlerCache:
    """Executes the work of many clients in one process, and keeps few of their handlers in memory.

    A handler is made when its client gets an assignment. With `shared`, other processes work for the same clients, so
    each commit is on disk at once and complete.

    A client's data are evicted too, and read again by the task: least recently used first, at `DATA_BYTES`.

    Invariant: a client whose handler or data were evicted and loaded again replies as if they had stayed in memory.
    """

    def __init__(self, population: ClientPopulation, executor: InProcessExecutor, shared: bool = False) -> None:
        self.population, self.executor, self.shared = population, executor, shared
        self._admission, self._bases = AdmissionController(carries=SIMULATED), BaseModelCache()  # one plan, one model
        self._awake: dict[int, tuple[AssignmentHandler, list[RunFolder]]] = {}
        self._evicted = set[int]()  # clients with a state on disk
        self._trained: dict[int, Begun] = {}  # clients that have trained for a secure round
        self._states, self._data = LruPolicy(), LruPolicy()

    def answer(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment."""
        began = time.perf_counter()
        handler, folders = self._awake.get(index) or self._wake(index, delivery.assignment.secure is not None)
        script_at, before = handler.clock.now(), list[PhaseReply]()
        reply, file = self._reply(index, handler, delivery, before.append)
        took_s = handler.clock.now() - script_at if self.population.step_s else time.perf_counter() - began
        bundle = folders[-1].body(file) if file else None
        if bundle is None and reply is not None:  # no reply is lost in transit; one with parts is read later
            handler.delivered(reply)
        if reply is None:  # the secrets of its round are in memory only: it cannot be evicted
            self._states.drop(index)
            return TimedReply(None, None, took_s, tuple(before))
        held_bytes = sum(folder.held_bytes for folder in folders if isinstance(folder, CachedRunFolder))
        self._states.use(index, HANDLER_BYTES + handler.kept.held_bytes + held_bytes)
        for other in self._states.excess(AWAKE_BYTES):
            self.sleep(other)
        self._data.use(index, HANDLER_BYTES + self.executor.inner.split_bytes(handler.client))
        for other in self._data.excess(DATA_BYTES):
            self.executor.inner.forget(self.population.client_info(other))
        return TimedReply(reply, bundle, took_s, tuple(before))

    def _reply(
        self, index: int, handler: AssignmentHandler, delivery: Delivery, send: Send
    ) -> tuple[Reply | None, Path | None]:
        """Return a client's reply and its file; no reply if its update follows in the phase `masked`."""
        if delivery.assignment.kind == "secure":
            reply = handler.answer_phase(delivery, _nothing)
            if reply is None:
                return handler.finish(self._trained.pop(index))
            return reply, None
        begun = handler.begin(delivery, lambda: False, _nothing, send=send)
        if not isinstance(begun, Begun):
            return begun
        if delivery.assignment.secure is None:
            return handler.finish(begun)
        self._trained[index] = begun
        return None, None

    def sleep(self, index: int) -> None:
        """Evict a client: write its state to disk, so that nothing of it stays in memory."""
        _, folders = self._awake.pop(index, (None, []))
        self._states.drop(index)
        self._evicted.add(index)
        for folder in folders:
            if isinstance(folder, CachedRunFolder):
                folder.write_back()

    def _wake(self, index: int, secure: bool) -> tuple[AssignmentHandler, list[RunFolder]]:
        name, made, is_new = self.population.name(index), list[RunFolder](), index not in self._evicted

        def folder_of(own: Path, run: str) -> RunFolder:
            shared = self.shared
            durable = self.population.durable
            made.append(shared_folder(own, run, durable) if shared else CachedRunFolder(own, run, is_new))
            return made[-1]

        scripted = bool(self.population.step_s)
        executor = PacedExecutor(self.executor, self.population.step_s[index]) if scripted else self.executor
        environment = HandlerEnvironment(
            folders=folder_of, take_base=self._bases.take, clock=executor.clock, may_stop=scripted,
            debug=self.population.debug,
        )  # fmt: skip
        identity, folder = simulated_identity(name) if secure else None, self.population.folder / name
        client = self.population.client_info(index)
        handler = AssignmentHandler(executor, folder, client, self._admission, identity, environment)
        self._awake[index] = handler, made
        return self._awake[index]


class PacedExecutor(InProcessExecutor):
    """Executes in this process on a virtual clock of its own, on which each training step takes `step_s` seconds.

    Invariant: nothing else moves the clock.
    """

    def __init__(self, executor: InProcessExecutor, step_s: float = 0.0) -> None:
        virtual = VirtualClock()
        super().__init__(executor.task, executor.device, Clock(virtual.now, virtual.advance), executor)
        self.step_s = step_s

    def progress(self, tell: Tell) -> Tell:
        """Return a callback that lets each training step take its time, and tells about it."""

        def paced(what: str, done: int, total: int) -> None:
            tell(what, done, total)
            if what == "train":
                self.clock.sleep(self.step_s)

        return paced


def _nothing(line: str) -> None: ...
