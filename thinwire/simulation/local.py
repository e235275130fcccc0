"""Simulated devices in this process: real sessions with folders of their own, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.client.bench import Bench
from thinwire.client.session import Session
from thinwire.client.site import Site
from thinwire.client.state import write_unsynced
from thinwire.client.task import LoadedTask
from thinwire.core.clock import Clock, VirtualClock
from thinwire.core.fleet import Arrival, Delivery, Envelope, Hello, Spool
from thinwire.core.home import private_folder
from thinwire.core.types import Failure
from thinwire.simulation.folder_spool import FolderSpool
from thinwire.simulation.in_process import InProcessFleet, InProcessLink


def never() -> bool:
    return False


class LocalFleet(InProcessFleet):
    """Devices `client-000` .. that answer when they are polled, in the order in which they were asked.

    Law: what comes depends on what is asked alone: no thread, no clock, no network decides an order. Asks that were
    sent together are answered as if side by side: a `VirtualClock` moves by the time of the slowest, not by the sum.
    All devices work on one module in turn; each keeps a residual of its own.
    """

    def __init__(
        self,
        task: LoadedTask,
        clients: int,
        folder: Path,
        *,
        split: str = "iid",
        seed: int = 0,
        data: Path | None = None,
        device: str = "cpu",
        clock: Clock | None = None,
        spool: Spool | None = None,
        debug: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(spool or FolderSpool(folder / "spool"), folder / "downloads", clock or VirtualClock())
        bench, self._say = Bench(task, device), say
        self._task = task
        self._sessions: dict[str, Session] = {}
        self._links: dict[str, InProcessLink] = {}
        self._sent_at: dict[str, float] = {}
        self._turns: list[str] = []  # devices in the order in which they were asked
        width = max(3, len(str(clients - 1)))
        for index in range(clients):
            name = f"client-{index:0{width}d}"
            site = Site(name, data, index, clients, split, seed, device)
            own = private_folder(folder / "clients" / name)
            self._sessions[name] = Session(name, task, own, site, bench=bench, write=write_unsynced, debug=debug)
        self._joined = False

    def send(self, asks: Sequence[Envelope]) -> None:
        super().send(asks)
        for envelope in asks:
            self._sent_at[envelope.ask.ask_id] = self.clock.now()
            self._turns.append(envelope.device)

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """What has arrived; when there is nothing, let the next device answer. Virtual time passes if none can."""
        self._join()
        if came := super().poll(0.0):
            return came
        while self._turns:
            name = self._turns.pop(0)
            if name in self._links and (delivery := self._links[name].pull(0.0)) is not None:
                self._answer(name, delivery)
                if came := super().poll(0.0):
                    return came
        if isinstance(self.clock, VirtualClock):
            self.clock.advance(wait_s)
            return []
        return super().poll(wait_s)

    def _join(self) -> None:
        if self._joined:
            return
        self._joined = True
        report = self._task.report()
        for name, session in self._sessions.items():
            self._links[name] = self.link(name)
            welcome = self._links[name].hello(Hello(name, f"simulated-{name}", (report,)))
            session.welcomed(welcome.sequences)

    def _answer(self, name: str, delivery: Delivery) -> None:
        session, link, ask = self._sessions[name], self._links[name], delivery.ask
        begun = time.perf_counter()
        try:
            if ask.kind == "stop":
                session.stop(ask, self._say)
                return
            if ask.task != self._task.name:
                link.push(Failure("task-missing", "no such task on this device", ask.ask_id, name))
                return
            reply, bundle = session.answer(delivery, never, self._say)
            if isinstance(self.clock, VirtualClock):
                done = self._sent_at.pop(ask.ask_id, self.clock.now()) + time.perf_counter() - begun
                self.clock.advance(max(0.0, done - self.clock.now()))
            link.push(reply, bundle)
            session.delivered(reply)
        finally:
            if delivery.bundle is not None:
                delivery.bundle.unlink(missing_ok=True)
