"""Simulates many clients with the code of real ones, one after the other, so that a seed decides everything.

`SimulatedClients` decides which client replies next. A `ClientExecutor` executes the work of all clients:
`SerialExecutor` in this process, `ProcessExecutor` (process_pool.py) in several. `HandlerCache` keeps the handlers of
some clients in memory, and evicts the others to disk (storage.py).
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
from thinwire.core.types import PHASES, PhaseReply, Reply, phase_of
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.storage import CachedRunFolder, LruPolicy, shared_folder

if TYPE_CHECKING:
    from thinwire.client.train.protocol import OnProgress

ON_TIME_SHARE = 0.9  # of the deadline, after which a client replies that would be late and must not be (`never_late`)


class ClientExecutor(Protocol):
    """Executes the work of all clients, in this process or in others.

    `submit` and `result` are named as in `concurrent.futures`, but `result` also executes what was not submitted.
    """

    @property
    def lookahead(self) -> int:
        """Return how many assignments may be submitted before it is their client's turn to reply."""

    def submit(self, index: int, delivery: Delivery) -> None:
        """Begin to work on an assignment of client `index`, before its turn."""

    def result(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment, whether it was submitted or not."""


CLIENT_BATCH = 64  # clients whose work is executed in a row, before the first of them replies
MAX_BATCHED_S = 0.005  # longest work of a client that is batched; for longer work the processor's caches matter little


class SerialExecutor:
    """Executes the work of all clients in this process, one after the other.

    With `batched`, `CLIENT_BATCH` fast clients work before the first of them replies. The processor's caches then hold
    the code and data of clients, and afterwards those of the aggregator, which takes a fifth less time. `batched` is
    only for plans that withdraw no assignment (`withdraws_none`): otherwise a client may have worked for one in vain.
    """

    def __init__(
        self, population: ClientPopulation, executor: InProcessExecutor, shared: bool = False, batched: bool = False
    ) -> None:
        use_threads(0, executor.layout.size)
        self._handlers = HandlerCache(population, executor, shared)
        self._batched, self._replies, self._last_s = batched, 0, MAX_BATCHED_S  # replies; seconds of the last one
        self._submitted: dict[int, tuple[str, TimedReply]] = {}  # client -> assignment id and early reply

    @property
    def lookahead(self) -> int:
        """Return how many assignments are submitted before their turn: those of a batch when it begins, else none."""
        begins = self._batched and self._replies % CLIENT_BATCH == 0 and self._last_s < MAX_BATCHED_S
        return CLIENT_BATCH - 1 if begins else 0

    def submit(self, index: int, delivery: Delivery) -> None:
        """Execute the work of client `index` on an assignment before its turn, and keep the reply for `result`."""
        self._submitted[index] = delivery.assignment.assignment_id, self._handlers.execute(index, delivery)

    def result(self, index: int, delivery: Delivery) -> TimedReply:
        """Return the reply of client `index` to an assignment, whether it was submitted or not."""
        self._replies += 1
        assignment_id, timed = self._submitted.pop(index, ("", None))
        if timed is None or assignment_id != delivery.assignment.assignment_id:
            timed = self._handlers.execute(index, delivery)
        self._last_s = timed.duration_s
        return timed


class SimulatedClients:
    """The clients of a simulated fleet. Its `step`, the pump of a `LocalFleet`, lets one of them reply.

    Clients work one after the other, but the run sees them work at the same time. Each client has its own clock, and
    replies at the time of its assignment plus the duration of its own work. The fleet's clock advances to the latest
    reply. So no reply is late because there are many clients. It is late if the client's own work exceeds the deadline.

    With `never_late`, no reply is late at all. This is for deadlines that are estimated from the speed of this machine,
    which may be busy for a while. `last_replied` is the client that replied last before a restart.

    Invariant: the order of replies is round-robin over the clients that have an assignment. It does not depend on which
    process works, or when.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        clock: VirtualClock,
        task: LoadedTask,
        population: ClientPopulation,
        executor: ClientExecutor,
        *,
        never_late: bool = False,
        last_replied: str = "",
    ) -> None:
        reports, about = (report(task),), {"python": platform.python_version()}
        self._executor, self._never_late = executor, never_late
        self._fleet, self._clock = fleet, clock
        self._links: dict[str, tuple[int, LocalLink, VirtualClock]] = {}
        self._submitted: dict[str, Delivery] = {}  # client -> its assignment, submitted before its turn
        self._trains_until: dict[str, float] = {}  # client in a secure round -> when its training ends, by its clock
        self._turns, fleet.on_send = RoundRobin(), self._queue_turn
        for index in range(population.count):
            name = population.name(index)
            own_clock = VirtualClock(origin=clock.origin)
            link = LocalLink(fleet, name, own_clock)
            link.hello(Hello(name, name, reports, about, secure=tuple(sorted(SIMULATED))))
            self._links[name] = index, link, own_clock
        if last_replied in self._links:
            self._turns.start_after(self._links[last_replied][0])

    def _queue_turn(self, name: str) -> None:
        self._turns.add(self._links[name][0], name)

    def step(self) -> bool:
        """Let one client reply; return False if no client has an assignment."""
        if not (names := self._turns.first(1 + self._executor.lookahead, self._fleet.is_assigned)):
            return False
        for name in names[1:]:
            self._submit_early(name)
        index, link, own_clock = self._links[names[0]]
        delivery = self._next_delivery(names[0])
        self._submitted.pop(names[0], None)
        self._turns.pop()
        if delivery is None or delivery.assignment.kind == "stop":  # all clients' folders are removed together
            if self._fleet.is_assigned(link.name):
                self._turns.add(index, link.name)
            return True
        timed = self._executor.result(index, delivery)
        duration_s = timed.duration_s
        if self._never_late and delivery.assignment.deadline_s:
            duration_s = min(duration_s, ON_TIME_SHARE * delivery.assignment.deadline_s)
        for advertisement in timed.advertisements:
            self._push(link, own_clock, advertisement)
        if timed.reply is None:  # the client replies to phases of its secure round while it trains
            self._trains_until[names[0]] = own_clock.now() + duration_s
        else:
            if not isinstance(timed.reply, PhaseReply):
                duration_s += max(0.0, self._trains_until.pop(names[0], 0.0) - own_clock.now())
            own_clock.advance(duration_s)
            self._push(link, own_clock, timed.reply, timed.bundle)
        if self._fleet.is_assigned(link.name):  # it has another assignment
            self._turns.add(index, link.name)
        return True

    def _push(self, link: LocalLink, own_clock: VirtualClock, reply: Reply, bundle: Path | bytes | None = None) -> None:
        """Push a reply at the time of its client's clock."""
        self._clock.advance(max(0.0, own_clock.now() - self._clock.now()))
        link.push(reply, bundle)

    def _submit_early(self, name: str) -> None:
        if name in self._submitted:
            return
        delivery = self._next_delivery(name)
        if delivery is not None and delivery.assignment.kind != "stop":
            self._submitted[name] = delivery
            self._executor.submit(self._links[name][0], delivery)

    def _next_delivery(self, name: str) -> Delivery | None:
        """Return a client's assignment: the submitted one unless it was withdrawn since, else the next one."""
        link = self._links[name][1]
        submitted = self._submitted.get(name)
        if submitted is not None and submitted.assignment.assignment_id not in link.cancelled():
            return submitted
        return link.pull(0.0)


class RoundRobin:
    """A round-robin queue: the waiting clients get their turn in the order of their index, again and again.

    Each operation on a client takes O(log n) for n waiting clients.

    >>> queue = RoundRobin()
    >>> queue.add(1, "b"), queue.pop(), queue.add(2, "c"), queue.add(0, "a")
    (None, None, None, None)
    >>> queue.first(2, lambda name: True)
    ['c', 'a']
    """

    def __init__(self) -> None:
        self._pass, self._turn = 0, 0
        self._waiting: set[str] = set()
        self._heap: list[tuple[int, int, str]] = []  # (pass, index, client)

    def add(self, index: int, name: str) -> None:
        """Add client `index` to the queue; a client that is in it keeps its place."""
        if name not in self._waiting:
            self._waiting.add(name)
            heapq.heappush(self._heap, (self._pass + (index < self._turn), index, name))

    def start_after(self, index: int) -> None:
        """Begin with the client after client `index`; call this before `add`."""
        self._turn = index + 1

    def first(self, count: int, is_waiting: Callable[[str], bool]) -> list[str]:
        """Return at most `count` clients in turn, and remove from the queue those for which `is_waiting` is False."""
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

    def pop(self) -> None:
        """Remove the first client; the next turn is that of the client after it."""
        self._pass, index, name = heapq.heappop(self._heap)
        self._waiting.discard(name)
        self._turn = index + 1


MAX_STATE_BYTES = 256 << 20  # residuals and other client state in memory; the state of evicted clients is on disk
HANDLER_BYTES = 16 << 10  # of a handler without state
MAX_DATA_BYTES = int(GIB)  # training and test data in memory; the task reads those of evicted clients again


class TimedReply(NamedTuple):
    """A client's reply, with the seconds that the client worked for it.

    In a secure round `reply` is None for the training assignment: the masked update is the reply to the phase `masked`.
    `advertisements` are the messages that the client sent before it began to train.
    """

    reply: Reply | None
    bundle: Path | bytes | None
    duration_s: float
    advertisements: tuple[PhaseReply, ...] = ()


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
    """Executes the work of many clients in one process, with an LRU cache of their handlers and data.

    A client's handler is loaded when the client gets an assignment, and evicted above `MAX_STATE_BYTES`. Its data are
    read by the task, and evicted above `MAX_DATA_BYTES`. With `shared`, other processes work for the same clients, so
    each commit is written to disk at once.

    Invariant: a client whose handler or data were evicted and loaded again replies as if they had stayed in memory.
    """

    def __init__(self, population: ClientPopulation, executor: InProcessExecutor, shared: bool = False) -> None:
        self.population, self.executor, self.shared = population, executor, shared
        self._admission, self._bases = AdmissionController(carries=SIMULATED), BaseModelCache()  # one plan, one model
        self._loaded: dict[int, tuple[AssignmentHandler, list[RunFolder]]] = {}
        self._evicted = set[int]()  # clients whose state may be on disk
        self._unmasked: dict[int, Begun] = {}  # client -> its training in a secure round before the phase `masked`
        self._states, self._data = LruPolicy(), LruPolicy()

    def execute(self, index: int, delivery: Delivery) -> TimedReply:
        """Execute the work of client `index` on an assignment, and return the reply."""
        began, assignment = time.perf_counter(), delivery.assignment
        is_secure = assignment.secure is not None or assignment.kind == "secure"
        handler, folders = self._loaded.get(index) or self._load(index, is_secure)
        virtual_began, advertisements = handler.clock.now(), list[PhaseReply]()
        reply, file = self._reply(index, handler, delivery, advertisements.append)
        duration_s = handler.clock.now() - virtual_began if self.population.step_s else time.perf_counter() - began
        bundle = folders[-1].body(file) if file else None
        if bundle is None and reply is not None:  # no reply is lost in transit; one with parts is read later
            handler.mark_delivered(reply)
        in_round = reply is None or assignment.kind == "secure"
        if in_round and phase_of(assignment.assignment_id) != PHASES[-1]:
            self._states.drop(index)  # it must not be evicted: the secrets of its round are in memory only
            return TimedReply(reply, bundle, duration_s, tuple(advertisements))
        cached_bytes = sum(folder.cached_bytes for folder in folders if isinstance(folder, CachedRunFolder))
        self._states.use(index, HANDLER_BYTES + handler.runs.nbytes + cached_bytes)
        for other in self._states.excess(MAX_STATE_BYTES):
            self.evict(other)
        self._data.use(index, HANDLER_BYTES + self.executor.inner.split_bytes(handler.client))
        for other in self._data.excess(MAX_DATA_BYTES):
            self.executor.inner.evict(self.population.client_info(other))
        return TimedReply(reply, bundle, duration_s, tuple(advertisements))

    def _reply(
        self, index: int, handler: AssignmentHandler, delivery: Delivery, send: Send
    ) -> tuple[Reply | None, Path | None]:
        """Return a client's reply and its file; no reply if its update follows in the phase `masked`."""
        if delivery.assignment.kind == "secure":
            reply = handler.handle_phase(delivery, _nothing)
            if reply is None:
                return handler.finish(self._unmasked.pop(index))
            return reply, None
        begun = handler.begin(delivery, lambda: False, _nothing, send=send)
        if not isinstance(begun, Begun):
            return begun
        if delivery.assignment.secure is None:
            return handler.finish(begun)
        self._unmasked[index] = begun
        return None, None

    def evict(self, index: int) -> None:
        """Evict a client: write its state to disk, and remove it from memory."""
        _, folders = self._loaded.pop(index, (None, []))
        self._states.drop(index)
        self._evicted.add(index)
        for folder in folders:
            if isinstance(folder, CachedRunFolder):
                folder.write_back()

    def _load(self, index: int, secure: bool) -> tuple[AssignmentHandler, list[RunFolder]]:
        name, folders, is_new = self.population.name(index), list[RunFolder](), index not in self._evicted

        def folder_of(own: Path, run: str) -> RunFolder:
            shared, durable = self.shared, self.population.durable
            folders.append(shared_folder(own, run, durable) if shared else CachedRunFolder(own, run, is_new))
            return folders[-1]

        scripted = bool(self.population.step_s)
        executor = VirtualClockExecutor(self.executor, self.population.step_s[index]) if scripted else self.executor
        environment = HandlerEnvironment(
            folders=folder_of, update_replica=self._bases.update_replica, clock=executor.clock, may_stop=scripted,
            debug=self.population.debug,
        )  # fmt: skip
        identity, folder = simulated_identity(name) if secure else None, self.population.folder / name
        client = self.population.client_info(index)
        handler = AssignmentHandler(executor, folder, client, self._admission, identity, environment)
        self._loaded[index] = handler, folders
        return self._loaded[index]


class VirtualClockExecutor(InProcessExecutor):
    """An executor in this process with a virtual clock, on which each training step takes `step_s` seconds.

    Invariant: only training steps advance this clock.
    """

    def __init__(self, executor: InProcessExecutor, step_s: float = 0.0) -> None:
        virtual = VirtualClock()
        super().__init__(executor.task, executor.device, Clock(virtual.now, virtual.advance), executor)
        self.step_s = step_s

    def progress(self, on_progress: OnProgress) -> OnProgress:
        """Return a callback that passes on the progress, and advances the clock after each training step."""

        def advance(what: str, done: int, total: int) -> None:
            on_progress(what, done, total)
            if what == "train":
                self.clock.sleep(self.step_s)

        return advance


def _nothing(line: str) -> None: ...
