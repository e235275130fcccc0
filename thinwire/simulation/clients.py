"""Simulated clients: the device's own session, taken in turns by one thread, so that a seed decides everything."""

from __future__ import annotations

import platform
from pathlib import Path

from thinwire.client.bench import Bench, use_threads
from thinwire.client.evaluate import Cancelled
from thinwire.client.session import Session
from thinwire.client.site import Site
from thinwire.client.task import LoadedTask
from thinwire.core.fleet import Hello
from thinwire.core.home import private_folder
from thinwire.core.plan import RunPlan
from thinwire.core.types import Failure
from thinwire.simulation.local import LocalFleet, LocalLink


class SimulatedClients:
    """`count` clients on one bench; `step` lets the next of them that was asked answer, and is a LocalFleet's pump."""

    def __init__(
        self,
        fleet: LocalFleet,
        task: LoadedTask,
        plan: RunPlan,
        count: int,
        folder: Path,
        site: Site,
        debug: bool = False,
    ) -> None:
        bench, report = Bench(task, site.device), task.report()
        use_threads(0, bench.layout.size)
        width, self._turn = len(str(count - 1)), 0
        self._links, self._sessions = list[LocalLink](), list[Session]()
        for index in range(count):
            name = f"sim-{index:0{width}}"
            place = Site(name, site.data, index, count, site.split, site.seed, site.device)
            own = private_folder(folder / name)
            session = Session(name, task, own, place, bench=bench, write=_quickly, debug=debug)
            link = LocalLink(fleet, name)
            session.welcomed(link.hello(Hello(name, name, (report,), {"python": platform.python_version()})).sequences)
            self._links.append(link)
            self._sessions.append(session)

    def step(self) -> bool:
        """Answer one ask; False when nobody was asked. The turn goes round, so that nobody is always first."""
        for offset in range(len(self._links)):
            index = (self._turn + offset) % len(self._links)
            link, session = self._links[index], self._sessions[index]
            if (delivery := link.pull(0.0)) is not None:
                self._turn = index + 1
                try:
                    reply, bundle = session.answer(delivery, lambda: False, lambda line: None)
                except Cancelled:
                    reply, bundle = Failure("stopped", "withdrawn", delivery.ask.ask_id), None
                link.push(reply, bundle)
                session.delivered(reply)
                return True
        return False


def _quickly(path: Path, data: bytes) -> None:
    """A simulated device's state need not outlive a power cut."""
    path.write_bytes(data)
