"""How many statements a round costs: they hold the database's lock, and the aggregator's only writer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import event

from tests.support.server_bench import Bench, scripted
from thinwire.server.state import snapshot
from thinwire.store import Store, device_registry
from thinwire.store.database import Database

FEW, MANY = 3, 7  # rounds


def counted(database: Database, said: Counter[str]) -> None:
    event.listen(
        database.engine, "before_cursor_execute",
        lambda connection, cursor, statement, values, context, many: said.update([statement.split()[0]]),
    )  # fmt: skip


def of_a_round(folder: Path, names: str, seconds: float = 0.0) -> Counter[str]:
    """The statements of one further round; each reply comes `seconds` after the one before, in a commit of its own."""
    found = list[Counter[str]]()
    for rounds in (FEW, MANY):
        devices = [scripted(name, 1.0 + at * seconds) for at, name in enumerate(names)]
        bench = Bench(folder / f"{rounds}-{len(names)}", devices, run={"rounds": rounds})
        found.append(Counter())
        counted(bench.store._database, found[-1])
        assert bench.drive().status == "done"
        bench.store.close()
    return Counter({word: (found[1][word] - found[0][word]) / (MANY - FEW) for word in found[1]})


@pytest.fixture(autouse=True)
def without_what_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "LOOK_S", 1e9)
    monkeypatch.setattr(snapshot, "SNAPSHOT_ROUNDS", 100)


def test_a_round_whose_replies_come_together_costs_as_much_for_nine_devices_as_for_three(tmp_path: Path) -> None:
    three, nine = of_a_round(tmp_path, "abc"), of_a_round(tmp_path, "abcdefghi")
    assert three == nine
    assert three["SELECT"] == 0
    assert three["BEGIN"] == 3, "its opening, its replies, its end"
    assert three.total() <= 21


def test_a_reply_alone_costs_no_select(tmp_path: Path) -> None:
    three, nine = of_a_round(tmp_path, "abc", 1.0), of_a_round(tmp_path, "abcdefghi", 1.0)
    assert (three["SELECT"], nine["SELECT"]) == (0, 0)
    assert (nine.total() - three.total()) / 6 <= 7


def test_requests_assignment_the_database_once_for_all(tmp_path: Path) -> None:
    said = Counter[str]()
    with Store.open(tmp_path / "store.sqlite3") as store:
        store.roster.enrol("pi-01", "f1", b"key", "loopback")
        counted(store._database, said)
        for _ in range(50):
            assert store.roster.by_fingerprint("f1")
            assert not store.roster.revoked()
        assert said["SELECT"] == 2, "the number of the last change, and the rows"
        store.roster.approve("pi-01")
        store.roster.revoke("pi-01")
        assert store.roster.revoked() == {"pi-01"}, "its own change counts at once"
        with Store.open(tmp_path / "store.sqlite3") as other:
            other.roster.approve("pi-01")
            found = store.roster.by_fingerprint("f1")
            assert found is not None
            assert found.state == "approved", "another's too, for requests"
            assert store.roster.revoked() == set(), "and then for runs"
