"""Simulated clients: the device's own session, taken in turns by one thread, so that a seed decides everything."""

from __future__ import annotations

import platform
import time
from pathlib import Path

from thinwire.client.bench import Here
from thinwire.client.compute.bench import use_threads
from thinwire.client.compute.site import Site
from thinwire.client.compute.task import LoadedTask
from thinwire.client.session import Session
from thinwire.client.state import write_unsynced
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery, Hello
from thinwire.core.home import private_folder
from thinwire.simulation.local import LocalFleet, LocalLink


class SimulatedClients:
    """`count` clients on one bench; `step` lets the next of them that was asked answer, and is a LocalFleet's pump.

    They work one after the other and count as side by side: each answers at its ask's time plus what its own work
    took, on a clock of its own, and the fleet's clock moves to the latest of these. So neither the number of clients
    nor the speed of this machine makes anyone late, but work that is longer than a deadline does.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        clock: VirtualClock,
        task: LoadedTask,
        count: int,
        folder: Path,
        site: Site,
        debug: bool = False,
    ) -> None:
        bench = Here(task, site.device)
        report = bench.report()
        use_threads(0, bench.layout.size)
        width, self._turn = len(str(count - 1)), 0
        self._links, self._sessions, self._clocks = list[LocalLink](), list[Session](), list[VirtualClock]()
        self._clock = clock
        for index in range(count):
            name = f"sim-{index:0{width}}"
            place = Site(name, site.data, index, count, site.split, site.seed, site.device)
            own = private_folder(folder / name)
            session = Session(name, bench, own, place, write=write_unsynced, debug=debug)
            own_clock = VirtualClock(origin=clock.origin)
            link = LocalLink(fleet, name, own_clock)
            session.welcomed(link.hello(Hello(name, name, (report,), {"python": platform.python_version()})).sequences)
            self._links.append(link)
            self._clocks.append(own_clock)
            self._sessions.append(session)

    def step(self) -> bool:
        """Answer one ask; False when nobody was asked. The turn goes round, so that nobody is always first."""
        for offset in range(len(self._links)):
            index = (self._turn + offset) % len(self._links)
            if (delivery := self._links[index].pull(0.0)) is not None:
                self._turn = index + 1
                self._answer(self._links[index], self._sessions[index], self._clocks[index], delivery)
                return True
        return False

    def _answer(self, link: LocalLink, session: Session, clock: VirtualClock, delivery: Delivery) -> None:
        if delivery.ask.kind == "stop":
            session.stop(delivery.ask, _nothing)
            return
        began = time.perf_counter()
        reply, bundle = session.answer(delivery, lambda: False, _nothing)
        clock.advance(time.perf_counter() - began)
        self._clock.advance(max(0.0, clock.now() - self._clock.now()))
        link.push(reply, bundle)
        session.delivered(reply)


def _nothing(line: str) -> None: ...
