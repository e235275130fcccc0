"""A run of real processes behind the gate, in which something is broken at given moments, and fixed.

Or one in which nothing is broken, and which takes in what another took in (`like`).
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from subprocess import Popen

from tests.support.alike import Alike
from tests.support.gate import Gate, gate
from tests.support.journal import Journal
from tests.support.moments import Moment, Striker
from tests.support.passing import Answer
from tests.support.processes import THINWIRE, Site, kill
from thinwire.core.events import Event, RoundOpened, UpdateAccepted

DEVICES = ("pi-a", "pi-b")
PLAN = (
    "cohort.wait_for=2", "cohort.deadline_s=600", "cohort.min_updates=2", "local.steps=10", "local.codec_threads=1",
    "uplink.codec='topk(0.05) > int8'", "downlink.codec='int8'", "server.optimizer='fedavgm'",
)  # fmt: skip  # all clients, a fixed deadline that nothing reaches, one codec


@dataclass
class World:
    """What stands around a run. `programs`: what of the devices runs instead of `thinwire`, `step_s`: by how
    much longer their steps take. `moment`: at which something was broken last.
    """

    site: Site
    way: Gate
    journal: Journal
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step_s: Mapping[str, float] = field(default_factory=dict)
    clients: dict[str, Popen[bytes]] = field(default_factory=dict)
    moment: Moment = field(default_factory=lambda: Moment(0, ""))

    def start_client(self, name: str) -> None:
        part, program = DEVICES.index(name), self.programs.get(name, THINWIRE)
        self.clients[name] = self.site.start_client(
            name, part, len(DEVICES), at=self.way.address, program=program, step_s=self.step_s.get(name, 0.0)
        )

    def answers(self, device: str) -> int:
        return sum(isinstance(e, UpdateAccepted) and e.device == device for e in self.journal.look())

    def trains(self, answer: Answer) -> bool:
        """Whether the device has begun to train for it, as it says itself."""
        return f"round {answer.round}: train" in self.site.log_of(self.clients[answer.device])

    def seen(self, true: Callable[[], object], what: str) -> bool:
        """Wait until it is true; False when the run has ended before."""
        self.site.until(lambda: true() or self.over(), f"{what} after {self.moment}")
        return bool(true())

    def over(self) -> bool:
        return bool(self.journal.ended())


@dataclass(frozen=True)
class Fault:
    """What is broken at a moment, in the gate's thread or another; the gate is shut from then on.

    `meet` waits until that has cost what it is to cost, and says whether it has; it opens the gate where it has to.
    Then `mend`; None: it mends itself, from the strike on. `back` says, after the mending, whether what was broken is
    there again: the next moment is waited for after that. None: the run itself says so, by an answer that it takes or a
    round that it opens, and the next moment may come before. `shut`: no answer is approved until the next moment is
    waited for.
    """

    strike: Callable[[World], None]
    meet: Callable[[World], bool] = lambda world: True
    mend: Callable[[World], object] | None = None
    back: Callable[[World], Callable[[], bool]] | None = None
    sets: tuple[str, ...] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step_s: Mapping[str, float] = field(default_factory=dict)
    shut: bool = False


def kill_aggregator(world: World) -> None:
    assert world.site.aggregator is not None
    kill(world.site.aggregator)


def was_killed(world: World) -> bool:
    """Whether the kill met an aggregator that was there, and a run that went on."""
    assert world.site.aggregator is not None
    return world.site.aggregator.returncode == -signal.SIGKILL and not world.over()


KILLED = Fault(kill_aggregator, was_killed, lambda world: world.site.begin_aggregator(), shut=True)
NOTHING = Fault(lambda world: None)


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
    """`recovered_s`: for each fault, from where it is fixed (a new process begins) to where what was broken is back,
    as `Fault` says; of the last ones there may be none, when the run ends before.
    """

    events: list[Event]
    struck: int = 0
    met: int = 0  # of those: as `Fault.meet` says
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
    like: Alike | None = None,
) -> Gated:
    """Until the run is done. `patient`: as `Gate` says. `tell` is told of each strike.

    Whatever is waited for, `AssertionError` says what did not come within `PATIENCE_S`, and what the processes said.
    """
    journal, made, mended, like = Journal(site.home), Gated([]), list[Mended](), like or Alike()
    told = {name: ("tests.support.scripted_client", words) for name in DEVICES if (words := like.of(name))}
    striker = Striker(site, journal)
    with gate(site.listen, DEVICES, journal, striker.watch, patient=patient, not_before=like.late) as way:
        world = World(site, way, journal, {**fault.programs, **told}, fault.step_s)

        def strike() -> None:
            way.shut(True)
            fault.strike(world)

        striker.trains, striker.strike = world.trains, strike
        site.start_aggregator()
        for name in DEVICES:
            world.start_client(name)
        way.hold_from(moments[0].held_before if moments else math.inf)
        run_id = site.begin(f"run.rounds={rounds}", *PLAN, *fault.sets)
        for moment, following in itertools.zip_longest(moments, moments[1:]):
            world.moment = moment
            striker.at(moment, lambda moment=moment: way.hold_from(moment.held_for))  # type: ignore[misc]  # mypy cannot type a default
            made.struck += 1
            tell(f"struck {made.struck} of {len(moments)} times, at {moment}")
            back = fault.back(world) if fault.back else None
            mended = [*mended[:-1], *(replace(last, again_at=time.time()) for last in mended[-1:])]
            mended.append(Mended(time.time(), len(journal.look())))
            made.met += fault.meet(world)
            if fault.mend is not None:
                mended[-1] = Mended(time.time(), len(journal.look()))
                fault.mend(world)
            if not fault.shut:
                way.hold_from(following.held_before if following else math.inf)
            if back is not None and world.seen(back, "it is back"):
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
