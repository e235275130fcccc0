"""A crash anywhere changes nothing either where asks go ahead: late, bad and failed answers in a line of rounds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.server.test_crash_anywhere import LAYOUT, Fate, Killed, Outcome, change, deadly
from tests.store.agreement import empty_database
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateAccepted, UpdateDropped
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Ask
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.simulation import MadeUp, ScriptedDevice, ScriptedFleet, Turn, reported
from thinwire.store import FileSpool, Store

SHARES = 4  # of all places: one test each
PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 4
[cohort]
wait_for = 3
deadline_s = 20
min_replies = 1
[local]
lr = 1.0
overlap = { max_delay = 1 }
[uplink]
codec = "topk(0.2) > int8"
[downlink]
codec = "int8"
""")
TURNS = {
    ("b", 1): Turn(compute_s=2.0, upload_s=1.5, again=("same",)),
    ("b", 2): Turn(compute_s=2.0, garbage=True),
    ("c", 2): Turn(held=2),  # late: it leaves when round 4 asks, and c holds the ask of round 3 too
    ("b", 3): Turn(failure=("task-error", "x")),
}


def turn(name: str, ask: Ask) -> Turn:
    return TURNS.get((name, ask.round), Turn(upload_s=0.5)) if ask.kind == "train" else Turn(compute_s=0.0)


class World:
    """Devices that work while they send; `away`: from and until when each is gone."""

    def __init__(
        self,
        folder: Path,
        fate: Fate,
        plan: RunPlan = PLAN,
        turn: Callable[[str, Ask], Turn] = turn,
        names: str = "abc",
        away: Mapping[str, Sequence[tuple[float, float]]] = {},
    ) -> None:
        self.fate, self.home, self.clock, self.plan = fate, AggregatorHome.under(folder), VirtualClock(), plan
        self.home.database.write_bytes(empty_database())
        self.dies_at = math.inf  # on the clock, beside what the fate says
        works = {n: MadeUp(n, LAYOUT, partial(change, n, LAYOUT.size)) for n in names}
        devices = [ScriptedDevice(n, w, partial(turn, n), away.get(n, ()), overlaps=True) for n, w in works.items()]
        self.fleet = ScriptedFleet(FileSpool(self.home.spool), self.clock, reported(plan, LAYOUT), devices)

    def live(self) -> Outcome:
        nothing, first = np.zeros(0, np.float32), np.zeros(LAYOUT.size, np.float32)
        with Store.open(self.home.database, durable=False) as store:
            run_id = submit(store, self.home, self.plan, LAYOUT, first, nothing, {}, reported(self.plan, LAYOUT))
            with deadly(self.fate, store):
                try:
                    self._drive(run_id, store)
                except Killed:
                    self.fleet = self.fleet.restart(FileSpool(self.home.spool))
                    self._drive(run_id, store)
            return Outcome(store, run_id, self.fleet)

    def _drive(self, run_id: str, store: Store) -> None:
        drive(run_id, store=store, fleet=self.fleet, home=self.home, clock=self.clock, stop=self._alive)

    def _alive(self) -> None:
        if self.clock.now() >= self.dies_at:
            self.dies_at = math.inf
            raise Killed("its hour has come")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    fate = Fate()
    return World(tmp_path_factory.mktemp("undisturbed"), fate).live(), fate.places


def test_the_line_has_late_bad_and_failed_answers_in_it(undisturbed: tuple[Outcome, list[str]]) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    assert [e.base_version for e in made.of(RoundOpened)] == [0, 0, 1, 2]
    assert [(e.round, e.reason) for e in made.of(RoundClosed)] == [
        (1, "all"), (2, "deadline"), (3, "enough"), (4, "all"),
    ]  # fmt: skip
    assert [(e.round, e.device) for e in made.of(UpdateAccepted) if e.late] == [(4, "c")]
    assert [e.kind for e in made.of(ClientFailed)] == ["task-error"]
    assert [e.reason.split(":")[0] for e in made.of(UpdateDropped)] == ["bad-payload"]
    assert "c" not in made.of(RoundOpened)[3].asks, "it held two asks when round 2 closed"


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: tuple[Outcome, list[str]], tmp_path: Path, share: int) -> None:
    made, places = undisturbed
    for at, place in list(enumerate(places, start=1))[share::SHARES]:
        again = World(tmp_path / str(at), Fate(at)).live()
        assert again.same() == made.same(), f"killed at place {at}: {place}"
        shutil.rmtree(tmp_path / str(at))
