"""A run of real processes behind the gate, in which something is broken at given moments, and mended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

from tests.system.gate import Gate, gate
from tests.system.journal import Journal
from tests.system.moments import Moment, Striker
from tests.system.processes import THINWIRE, Site, kill
from thinwire.core.events import Event, UpdateAccepted

DEVICES = ("pi-a", "pi-b")
PLAN = (
    "cohort.wait_for=2", "cohort.deadline_s=600", "cohort.min_replies=2", "local.steps=10", "local.codec_threads=1",
    "uplink.codec='topk(0.05) > int8'", "downlink.codec='int8'", "server.optimizer='fedavgm'",
)  # fmt: skip  # all clients, a fixed deadline that nothing reaches, one codec


@dataclass
class World:
    """What stands around a run. `programs`: what of the devices runs instead of `thinwire`."""

    site: Site
    way: Gate
    journal: Journal
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    clients: dict[str, Popen[bytes]] = field(default_factory=dict)

    def start_client(self, name: str) -> None:
        part, program = DEVICES.index(name), self.programs.get(name, THINWIRE)
        self.clients[name] = self.site.start_client(name, part, len(DEVICES), at=self.way.address, program=program)

    def answers(self, device: str) -> int:
        return sum(isinstance(e, UpdateAccepted) and e.device == device for e in self.journal.look())

    def over(self) -> bool:
        return bool(self.journal.ended())


@dataclass(frozen=True)
class Fault:
    """What is broken at a moment, in the gate's thread or another, and how it is mended after that.

    `back` says, after the mending, whether what was broken is there again; None: as soon as anything is journalled.
    `shut`: no answer is let in until then.
    """

    strike: Callable[[World], None]
    mend: Callable[[World], object] = lambda world: None
    back: Callable[[World], Callable[[], bool]] | None = None
    sets: tuple[str, ...] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shut: bool = False


def kill_aggregator(world: World) -> None:
    assert world.site.aggregator is not None
    kill(world.site.aggregator)


def all_joined(world: World) -> Callable[[], bool]:
    """Whether all devices have come once more than until now."""
    before = {name: world.journal.joined(name) for name in DEVICES}
    return lambda: all(world.journal.joined(name) > count for name, count in before.items())


KILLED = Fault(kill_aggregator, lambda world: world.site.start_aggregator(), all_joined, shut=True)


@dataclass
class Gated:
    """`recovered_s`: for each fault, from where it is mended (a new process begins) to where the run feels it; of the
    last ones there may be none, when the run ends before.
    """

    events: list[Event]
    struck: int = 0
    late: int = 0  # of those: some time after the moment that was drawn
    recovered_s: list[float] = field(default_factory=list)


def gated_run(
    site: Site, rounds: int, moments: Sequence[Moment], fault: Fault = KILLED, *, patient: bool = True
) -> Gated:
    """Until the run is done. `patient`: as `Gate` says."""
    journal, made = Journal(site.home), Gated([])
    striker = Striker(site, journal)
    with gate(site.listen, DEVICES, journal, striker.watch, patient=patient) as way:
        world = World(site, way, journal, fault.programs)
        striker.strike = lambda: fault.strike(world)
        site.start_aggregator()
        for name in DEVICES:
            world.start_client(name)
        way.shut(bool(moments))
        run_id = site.begin(f"run.rounds={rounds}", *PLAN, *fault.sets)
        for moment in moments:
            striker.at(moment, lambda: way.shut(False))
            way.shut(fault.shut)
            back = fault.back(world) if fault.back else _more(journal)
            made.struck += 1
            began = time.monotonic()
            fault.mend(world)
            site.until(lambda back=back: back() or world.over())  # type: ignore[misc]  # mypy cannot type a default
            if not world.over():
                made.recovered_s.append(time.monotonic() - began)
        way.shut(False)
        made.late = striker.late
        row = site.until_done(run_id)
        assert (row.status, row.version) == ("done", rounds), site.said()
        made.events = journal.look()
        journal.close()
    return made


def _more(journal: Journal) -> Callable[[], bool]:
    """Whether anything was journalled since it was first asked, which is after the mending."""
    before = list[int]()

    def more() -> bool:
        before.append(len(journal.look()))
        return before[-1] > before[0]

    return more
