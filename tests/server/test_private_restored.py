"""Private runs that go on from a restored backup: an open round releases nothing, and the ledger is settled first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.server.test_private_rounds import World
from tests.support.backups import restore_and_settle
from tests.support.crashes import Fate, Killed
from thinwire.core.events import RoundClosed, RunStatusChanged
from thinwire.core.run_events import PrivacyCommitted
from thinwire.core.types import Assignment
from thinwire.server.aggregator import Model
from thinwire.server.private_mode import PrivateAggregator
from thinwire.simulation.scripted_device import Behavior
from thinwire.store import Store
from thinwire.store.backup import back_up, restore


class Restored(World):
    """Dies as round 2 is sent, and comes back from a backup of that moment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Fate())
        self.file, self.is_dead = folder / "backup.tar", False

    def behavior(self, name: str, assignment: Assignment) -> Behavior:
        if assignment.round == 2 and not self.is_dead:
            self.is_dead = True
            raise Killed
        return super().behavior(name, assignment)

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        try:
            super()._drive(run_id, store, agreed)
        except Killed:
            restore_and_settle(self.home, self.file, store)
            raise


def test_an_open_round_of_a_restored_backup_is_aborted_and_draws_no_noise(tmp_path: Path) -> None:
    """The aggregator that was lost may have released its sum: a second one with other noise would halve the noise."""
    world, drawn = Restored(tmp_path), list[int]()
    change = PrivateAggregator._change

    def counted(aggregator: PrivateAggregator, model: Model) -> Any:
        drawn.append(1)
        return change(aggregator, model)

    with patch.object(PrivateAggregator, "_change", counted):
        made = world.live()
    assert world.is_dead
    ends = made.of(RoundClosed)
    assert [(end.round, end.reason) for end in ends] == [(1, "all"), (2, "aborted"), (3, "all")]
    assert made.of(RunStatusChanged)[-1].exit_code == 7, "its clients have spent three rounds, and the model has two"
    assert "no open reservation" in ends[1].detail
    assert (ends[1].version, ends[1].aggregated) == (1, [])
    assert [event.round for event in made.of(PrivacyCommitted)] == [end.round for end in ends if end.round != 2]
    assert len(drawn) == 2
    with Store.open(world.home.database) as store:
        states = {row.round: row.state for row in store.privacy.rows("toy") if row.round}
    assert states == {end.round: "lost" if end.round == 2 else "committed" for end in ends}


class Unsettled(Restored):
    """Comes back from a backup, with `here` of its devices connected. A person settles after 100 s."""

    def __init__(self, folder: Path, here: int) -> None:
        super().__init__(folder)
        self.here, self.settles_at = here, math.inf

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        try:
            World._drive(self, run_id, store, agreed)
        except Killed:
            back_up(self.home, self.file, "1.2.3")
            store.close()
            restore(self.file, self.home, force=True)
            self.settles_at = self.clock.now() + 100
            self.absent = dict(list(self.fleet.devices.items())[self.here :])
            for name in self.absent:
                self.fleet.devices.pop(name).link = None
            raise

    def _alive(self) -> None:
        if self.clock.now() < self.settles_at:
            return
        self.settles_at = math.inf
        with Store.open(self.home.database, durable=False) as store:
            store.privacy.settle("toy", 0, "", "ann")
        self.fleet.devices.update(self.absent)
        for name in self.absent:
            self.fleet.connect(name)


@pytest.mark.parametrize("here", [5, 0])
def test_a_restored_run_waits_until_its_ledger_is_settled(tmp_path: Path, here: int) -> None:
    """It says what a person has to do, and beside it which devices it lacks, if it lacks any."""
    made = Unsettled(tmp_path, here).live()
    says = [event.text for event in made.of(RunStatusChanged) if event.text.startswith("waiting for the privacy")]
    assert len(says) == 1
    assert "thinwire privacy ledger settle toy --rounds N, the most rounds that can have begun since then" in says[0]
    assert says[0].endswith("; waiting: 0 of 5 devices") == (here == 0)
    assert [event.round for event in made.of(PrivacyCommitted)] == [1, 3]
    assert made.of(RunStatusChanged)[-1].exit_code == 7, "its clients have spent three rounds, and the model has two"
