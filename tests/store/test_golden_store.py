"""A state directory with an open round is resumed by every later version of this program."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.store.write_golden_store import GOLDEN, SECONDS, AsItWas
from tests.support.server_bench import REPORT, scripted, work
from tests.support.store_agreement import assert_sums_agree
from thinwire.core.clock import VirtualClock
from thinwire.core.events import RoundClosed, RoundOpened
from thinwire.core.fleet import Delivery
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment
from thinwire.server.run import drive
from thinwire.simulation import Behavior, ScriptedDevice, ScriptedFleet
from thinwire.simulation.scripted_device import OutboxEntry
from thinwire.store import FileSpool, Store
from thinwire.store.backup import back_up, restore

EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
RUN = EXPECTED["run_id"]


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


def devices_as_they_are(spool: FileSpool, store: Store) -> list[ScriptedDevice]:
    """Each goes on above what it has sent; whose answer lies in the spool has it in its outbox too."""
    devices = []
    for name, seconds in SECONDS.items():
        sent = [header for header in spool.headers() if header.update_id.device == name]
        known = [*(header.update_id.sequence for header in sent), *store.roster.sequences(name).values()]
        device = scripted(name, seconds, work(name, AsItWas, sequence=max(known, default=0)))
        for header in sent:
            assigned = Delivery(Assignment(header.assignment_id, RUN, "toy", "train", {}), None)
            device.outbox[header.assignment_id] = OutboxEntry(
                assigned, Behavior(), header, b"".join(spool.open(header.update_id)), pushed=True
            )
        devices.append(device)
    return devices


def test_it_has_all_that_it_held(home: AggregatorHome) -> None:
    before = dump(home.database)
    with Store.open(home.database) as store:
        assert [(row.name, row.state, row.how) for row in store.roster.rows()] == [
            ("a", "approved", "loopback"), ("b", "approved", "loopback"), ("c", "approved", "loopback"),
            ("waits", "pending", "manual"),
        ]  # fmt: skip
        assert store.roster.sequences("a") == {RUN: 2}
        assert store.aggregated_rounds("a") == [(RUN, [1])]
        assert [(row.round, row.reason) for row in store.rounds(RUN)] == [(1, "all"), (2, "")]
        assert_sums_agree(store, RUN)
        assert store.run(RUN).metrics0 == {"loss": 0.0}
        assert len(store.run(RUN).identity) == 16
        assert (store.invitations.all(), store.audit.notes()) == ([], [])
    assert dump(home.database) == before


def test_its_run_goes_on_and_ends_as_if_nobody_had_killed_it(home: AggregatorHome) -> None:
    with Store.open(home.database) as store:
        spool, clock = FileSpool(home.spool), VirtualClock()
        assert {str(header.update_id) for header in spool.headers()} == {f"{RUN}/a/2", f"{RUN}/b/2"}
        fleet = ScriptedFleet(spool, clock, REPORT, devices_as_they_are(spool, store))
        row = drive(RUN, store=store, fleet=fleet, home=home, clock=clock)
        assert (row.status, row.model_digest) == (EXPECTED["status"], EXPECTED["model_digest"])
        events = [event for _, event in store.events(RUN)]
        closed = [[e.round, e.reason, e.version, list(e.aggregated)] for e in events if isinstance(e, RoundClosed)]
        assert closed == EXPECTED["rounds"]
        assert [e.round for e in events if isinstance(e, RoundOpened)] == [1, 2, 3, 4]
        assert spool.headers() == [], "everything was acked"
        assert_sums_agree(store, RUN)
