"""Simulated clients: the device's own session, taken in turns, so that a seed decides everything."""

from __future__ import annotations

import heapq
import platform
from typing import Protocol

from thinwire.client.bench import Here
from thinwire.client.compute.bench import use_threads
from thinwire.client.task import LoadedTask, report
from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Delivery, Hello
from thinwire.simulation.local import LocalFleet, LocalLink
from thinwire.simulation.sessions import Answered, Crowd, Sessions

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
