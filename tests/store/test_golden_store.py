"""A folder that version 0.1.0 left behind, its round still open, is taken up by whatever this program has become."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.support.server_bench import LAYOUT, REPORT, scripted, seed_of, work
from tests.support.store_agreement import assert_sums_agree
from thinwire.compression import feedback, parse
from thinwire.core import Key
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import DataLost
from thinwire.core.events import RoundClosed, RoundOpened
from thinwire.core.fleet import Delivery
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Ask, Vector
from thinwire.server.run import drive
from thinwire.simulation import ScriptedDevice, ScriptedFleet, SyntheticUpdates, Turn
from thinwire.simulation.scripted_device import Kept
from thinwire.store import FileSpool, Store, schema
from thinwire.store.backup import back_up
from thinwire.store.restore import restore

GOLDEN = Path(__file__).parents[1] / "golden" / "store" / "before-issue-4"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
RUN = EXPECTED["run_id"]
SECONDS = {"a": 1.0, "b": 2.0, "c": 3.0}  # until each answers, as when it was made


@pytest.fixture(params=["as it lay there", "backed up and restored"])
def home(tmp_path: Path, request: pytest.FixtureRequest) -> AggregatorHome:
    home = AggregatorHome.under(tmp_path)
    with contextlib.closing(sqlite3.connect(home.database)) as opened:
        opened.executescript((GOLDEN / "store.sql").read_text())
    for part in ("runs", "spool"):
        shutil.copytree(GOLDEN / part, home.root / part)
    if request.param == "backed up and restored":
        back_up(home, tmp_path / "backup.tar", "test")
        restore(tmp_path / "backup.tar", home, force=True)
    return home


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as opened:
        return list(opened.iterdump())


class AsItWas(SyntheticUpdates):
    """Encodes as the devices did that made the folder."""

    def encoded(self, ask: Ask, segment: int, change: Vector) -> bytes:
        codec = feedback(parse(ask.codec)).bind(LAYOUT)
        return codec.encode(change, codec.init(), Key(seed_of(self.name, ask))).payload


def devices_as_they_are(spool: FileSpool, store: Store) -> list[ScriptedDevice]:
    """Each goes on above what it has sent; whose answer lies in the spool has it in its outbox too."""
    devices = []
    for name, seconds in SECONDS.items():
        sent = [head for head in spool.heads() if head.update_id.device == name]
        known = [*(head.update_id.sequence for head in sent), *store.roster.sequences(name).values()]
        device = scripted(name, seconds, work(name, AsItWas, sequence=max(known, default=0)))
        for head in sent:
            asked = Delivery(Ask(head.ask_id, RUN, "toy", "train", {}), None)
            device.outbox[head.ask_id] = Kept(asked, Turn(), head, b"".join(spool.open(head.update_id)), pushed=True)
        devices.append(device)
    return devices


def test_it_is_not_touched_by_who_may_not_upgrade_it(home: AggregatorHome) -> None:
    for read_only in (True, False):
        with pytest.raises(DataLost, match="older than this program"):
            Store.open(home.database, read_only=read_only)


def test_it_is_upgraded_with_all_that_it_held(home: AggregatorHome) -> None:
    before = dump(home.database)
    with Store.open(home.database, upgrade=True) as store:
        assert [(row.name, row.state, row.how) for row in store.roster.rows()] == [
            ("a", "approved", "loopback"), ("b", "approved", "loopback"), ("c", "approved", "loopback"),
            ("waits", "pending", "manual"),
        ]  # fmt: skip
        assert store.roster.sequences("a") == {RUN: 2}
        assert store.folded_rounds("a") == [(RUN, [1])]
        assert [(row.round, row.reason) for row in store.rounds(RUN)] == [(1, "all"), (2, "")]
        assert_sums_agree(store, RUN)
        assert store.run(RUN).metrics0 == {"accuracy": 0.5, "loss": 0.0}
        known = hashlib.sha256(f"{RUN} {store.run(RUN).created_at!r}".encode()).hexdigest()[:16]
        assert store.run(RUN).identity == known, "its devices have kept that one with what they hold of the run"
        assert (store.invitations.all(), store.device_actions(), store.door_notes()) == ([], [], [])
    assert dump(home.root / f"store.sqlite3.before-{schema.revisions()[-1]}") == before


def test_its_run_goes_on_and_ends_as_if_nobody_had_killed_it(home: AggregatorHome) -> None:
    with Store.open(home.database, upgrade=True) as store:
        spool, clock = FileSpool(home.spool), VirtualClock()
        assert {str(head.update_id) for head in spool.heads()} == {f"{RUN}/a/2", f"{RUN}/b/2"}
        fleet = ScriptedFleet(spool, clock, REPORT, devices_as_they_are(spool, store))
        row = drive(RUN, store=store, fleet=fleet, home=home, clock=clock)
        assert (row.status, row.model_digest) == (EXPECTED["status"], EXPECTED["model_digest"])
        events = [event for _, event in store.events(RUN)]
        closed = [[e.round, e.reason, e.version, list(e.folded)] for e in events if isinstance(e, RoundClosed)]
        assert closed == EXPECTED["rounds"]
        assert [e.round for e in events if isinstance(e, RoundOpened)] == [1, 2, 3, 4]
        assert spool.heads() == [], "everything was acked"
        assert_sums_agree(store, RUN)
