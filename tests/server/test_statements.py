"""How many statements a round costs: they hold the database's lock, and the aggregator's only writer."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from tests.support.server_bench import Bench, scripted
from thinwire.core.clock import VirtualClock
from thinwire.server.state import snapshot
from thinwire.store import Store, device_registry
from thinwire.store.database import Database

FEW, MANY = 3, 7  # rounds
CLOSING = 5  # selects at the end of a round, by which it is explained; none at a reply


def counted(database: Database, said: Counter[str]) -> None:
    """Count transactions, and statements by their first word; a look at the devices counts as "look" alone."""

    def heard(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        if "max(devices.change)" in statement:
            said.update({"look": 1, "BEGIN": -1})
        else:
            said.update([statement.split(maxsplit=1)[0]])

    event.listen(database.engine, "before_cursor_execute", heard)
    event.listen(database.engine, "begin", lambda _: said.update(["BEGIN"]))


def of_a_round(folder: Path, names: str, seconds: float = 0.0, **cohort: Any) -> Counter[str]:
    """The statements of one further round; each reply comes `seconds` after the one before, in a commit of its own."""
    found = list[Counter[str]]()
    for rounds in (FEW, MANY):
        devices = [scripted(name, 1.0 + at * seconds) for at, name in enumerate(names)]
        bench = Bench(folder / f"{rounds}-{len(names)}", devices, run={"rounds": rounds}, cohort=cohort)
        found.append(Counter())
        counted(bench.store._database, found[-1])
        began = time.monotonic()
        assert bench.drive().status == "done"
        assert found[-1].pop("look") <= 1 + (time.monotonic() - began) / device_registry.REGISTRY_READ_S
        bench.store.close()
    return Counter({word: (found[1][word] - found[0][word]) / (MANY - FEW) for word in found[1]})


@pytest.fixture(autouse=True)
def without_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SNAPSHOT_ROUNDS", 100)


def test_a_round_whose_replies_come_together_costs_as_much_for_nine_devices_as_for_three(tmp_path: Path) -> None:
    three, nine = of_a_round(tmp_path, "abc"), of_a_round(tmp_path, "abcdefghi")
    assert three == nine
    assert three["SELECT"] == CLOSING
    assert three["BEGIN"] == 3, "its opening, its replies, its end"
    assert three.total() <= 21 + CLOSING + 3


def test_a_reply_alone_costs_no_select(tmp_path: Path) -> None:
    three, nine = of_a_round(tmp_path, "abc", 1.0), of_a_round(tmp_path, "abcdefghi", 1.0)
    assert (three["SELECT"], nine["SELECT"]) == (CLOSING, CLOSING)
    assert (nine.total() - three.total()) / 6 <= 7


def test_a_replacement_costs_no_select(tmp_path: Path) -> None:
    """Four of six devices wait for one of the two slots, and are selected in the middle of the round."""
    six = of_a_round(tmp_path, "abcdef", 1.0, max_concurrency=2, deadline_s=100)
    assert six["SELECT"] == CLOSING


def test_requests_ask_the_database_once_a_second_for_all_whatever_is_committed(tmp_path: Path) -> None:
    said, asked, clock = Counter[str](), 0, VirtualClock()
    with Store.open(tmp_path / "store.sqlite3", clock=clock) as store:
        store.roster.enrol("pi-01", "f1", b"key", "loopback")
        counted(store._database, said)
        for _ in range(300):
            clock.advance(0.01)
            store.roster.note("join", "192.0.2.7", "a commit between two requests")
            before = said["SELECT"]
            assert store.roster.by_fingerprint("f1")
            assert not store.roster.revoked()
            asked += said["SELECT"] - before
        assert asked == 1, "the devices, which did not change since"
        assert said["look"] == 3, "one a second"
        store.roster.revoke("pi-01")
        assert store.roster.revoked() == {"pi-01"}, "its own change counts at once"
