"""A secure run in a backup: no open round is in it, and a restored run uses no round of an identity twice."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.server import test_secure_rounds as honest
from tests.support import crashes
from tests.support.crashes import Fate, Killed, Outcome
from tests.support.secure_fleet import SecureBehavior
from thinwire.core.events import RoundClosed
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.store import FileSpool, Store
from thinwire.store.backup import back_up, restore


class World(honest.World):
    """Five devices. The aggregator dies at `dies_at`, and its folder comes back from a backup of that moment."""

    def __init__(self, folder: Path, fate: Fate, dies_at: float) -> None:
        super().__init__(folder, fate)
        self.dies_at, self.file = dies_at, folder / "backup.tar"
        self.identities = list[str]()
        self.damages = ""  # a phase whose file is damaged in place of the restore

    def behavior_of(self, name: str):  # a Script
        return lambda assignment: SecureBehavior(compute_s=2.0 if name < "d" else 6.0)

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        self.identities.append(store.run(run_id).identity)
        try:
            super()._drive(run_id, store, agreed)
        except Killed:
            if self.damages:
                (self.home.run(run_id) / "secure" / "1" / self.damages).write_bytes(b"{}")
            else:
                back_up(self.home, self.file, "1.2.3")
                store.close()
                restore(self.file, self.home, force=True)
            raise

    def lived(self) -> Outcome:
        return crashes.World.live(self)  # its identities are random


def phases(made: Outcome, number: int = 1) -> list[str]:
    return [event.phase for event in made.of(PhaseClosed) if event.round == number]


def test_an_open_round_is_in_no_backup_and_a_restore_ends_it_as_aborted(tmp_path: Path) -> None:
    world = World(tmp_path, Fate(), dies_at=3.0)
    made = world.lived()
    with tarfile.open(world.file) as tar:
        names = tar.getnames()
    assert not [name for name in names if name.startswith("spool/") or "/secure/" in name]
    assert phases(made) == ["advertise", "share"]
    first, *rest = made.of(RoundClosed)
    assert (first.reason, first.version, first.aggregated) == ("aborted", 0, [])
    assert [event.reason for event in rest] == ["all"] * 3
    assert [event.round for event in made.of(SumUnmasked)] == [2, 3, 4]
    assert made.status == "done"


def test_a_restored_run_has_another_identity(tmp_path: Path) -> None:
    """Its devices take it for another run, so a round that the lost aggregator made after the backup is a new one."""
    world = World(tmp_path, Fate(), dies_at=3.0)
    world.lived()
    assert len(set(world.identities)) == 2


@pytest.mark.parametrize("phase", ["advertise", "share"])
def test_a_damaged_file_of_messages_ends_the_round_and_not_the_run(tmp_path: Path, phase: str) -> None:
    world = World(tmp_path, Fate(), dies_at=3.0)
    world.damages = phase
    made = world.lived()
    closed = made.of(RoundClosed)[0]
    assert (closed.reason, closed.detail) == ("aborted", f"the messages of the phase {phase} are damaged")
    assert [event.round for event in made.of(SumUnmasked)] == [2, 3, 4]
    assert FileSpool(world.home.spool).headers() == []
