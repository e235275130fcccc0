"""A run of real processes behind the gate, in which something is broken at given moments, and mended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from subprocess import Popen

from tests.system.gate import Gate, gate
from tests.system.journal import Journal
from tests.system.moments import Moment, Striker
from tests.system.processes import THINWIRE, Site, kill
from thinwire.core.events import Event, RoundOpened, UpdateAccepted

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

    `back` says, after the mending, whether what was broken is there again: the next moment is waited for after that.
    None: the run itself says so, by an answer that it takes or a round that it opens, and the next moment may come
    before. `shut`: no answer is let in until the next moment is waited for.
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


KILLED = Fault(kill_aggregator, lambda world: world.site.begin_aggregator(), shut=True)


@dataclass(frozen=True)
class Mended:
    """When the mending began, in seconds since 1970, and how many events there were; `again_at`: the next strike."""

    at: float
    events: int
    again_at: float = math.inf

    def went_on_s(self, events: Sequence[Event]) -> float | None:
        """Seconds from the mending until the run goes on: a strike that comes first is at something that goes on.

        None for the last one, when the run has ended before.
        """
        on = (e.at for e in events[self.events :] if isinstance(e, (RoundOpened, UpdateAccepted)))
        found = min(next(on, math.inf), self.again_at)
        return None if math.isinf(found) else max(0.0, found - self.at)


@dataclass
class Gated:
    """`recovered_s`: for each fault, from where it is mended (a new process begins) to where what was broken is back,
    as `Fault` says; of the last ones there may be none, when the run ends before.
    """

    events: list[Event]
    struck: int = 0
    late: int = 0  # of those: some time after the moment that was drawn
    recovered_s: list[float] = field(default_factory=list)


def gated_run(
    site: Site,
    rounds: int,
    moments: Sequence[Moment],
    fault: Fault = KILLED,
    *,
    patient: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Gated:
    """Until the run is done. `patient`: as `Gate` says. `tell` is told of each strike.

    Whatever is waited for, `AssertionError` says what did not come within `PATIENCE_S`, and what the processes said.
    """
    journal, made, mended = Journal(site.home), Gated([]), list[Mended]()
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
            made.struck += 1
            tell(f"struck {made.struck} of {len(moments)} times, at {moment}")
            back = fault.back(world) if fault.back else None
            mended = [*mended[:-1], *(replace(last, again_at=time.time()) for last in mended[-1:])]
            mended.append(Mended(time.time(), len(journal.look())))
            fault.mend(world)
            if back is not None:
                site.until(lambda back=back: back() or world.over(), f"it is back after {moment}")  # type: ignore[misc]  # mypy cannot type a default
                if not world.over():
                    made.recovered_s.append(time.time() - mended[-1].at)
        way.shut(False)
        made.late = striker.late
        row = site.until_done(run_id)
        assert (row.status, row.version) == ("done", rounds), site.said()
        made.events = journal.look()
        journal.close()
    if not fault.back:
        made.recovered_s = [took for one in mended if (took := one.went_on_s(made.events)) is not None]
    return made
