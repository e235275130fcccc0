"""Which command may upgrade a store, and what the others say of one that is not this program's."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3

import pytest

from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store, schema

START = ("aggregator", "start", "--listen", "127.0.0.1:0", "--no-dashboard")
NEXT = "from alembic import op\nrevision, down_revision = '9000_next', '0001_initial'\ndef upgrade():\n    pass\n"


@pytest.fixture
def place(home) -> AggregatorHome:
    return AggregatorHome.under(home)


@pytest.mark.parametrize(
    ("change", "said_of_it"),
    [
        ("UPDATE alembic_version SET version_num = '9999'", "newer than this program"),
        ("UPDATE alembic_version SET version_num = '0011'", "before the first release"),
        ("ALTER TABLE rounds DROP COLUMN detail", "of another version of thinwire"),
    ],
)
def test_a_store_of_another_program_is_8_for_the_aggregator_too(thinwire, home, place, change, said_of_it):
    Store.open(place.database).close()
    with contextlib.closing(sqlite3.connect(place.database)) as opened, opened:
        opened.execute(change)
    for words in (START, ("runs", "list"), ("devices", "list"), ("devices", "approve", "pi-01")):
        said = thinwire(*words, "--home", home)
        assert (said.code, said_of_it in said.err, "--home FOLDER" in said.err) == (8, True, True), said.err


def test_an_old_store_is_upgraded_by_the_aggregator_alone(thinwire, home, place, tmp_path, monkeypatch):
    Store.open(place.database).close()
    newer = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, newer, ignore=shutil.ignore_patterns("__pycache__"))
    (newer / "9000_next.py").write_text(NEXT)
    monkeypatch.setattr(schema, "MIGRATIONS", newer)
    for words in (("runs", "list"), ("devices", "revoke", "pi-01")):
        said = thinwire(*words, "--home", home)
        assert (said.code, "start the aggregator once" in said.err) == (8, True)
    copy = place.root / "store.sqlite3.before-9000_next"
    assert not copy.exists()
    said = thinwire(*START, "--cert", "nowhere.pem", "--key", "nowhere.key", "--home", home)
    assert said.code != 0  # so that it ends: the certificate is read when the store is open
    assert copy.exists()
    assert thinwire("runs", "list", "--home", home).code == 0
