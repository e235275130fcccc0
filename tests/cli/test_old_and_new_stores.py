"""Which command may upgrade a store, and what the others say of one that is not this program's."""

from __future__ import annotations

import sqlite3

import pytest

from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store, schema
from thinwire.store.database import Database, database_url

START = ("aggregator", "start", "--listen", "127.0.0.1:0", "--no-page")


@pytest.fixture
def place(home) -> AggregatorHome:
    return AggregatorHome.under(home)


def test_a_store_newer_than_the_program_is_8_for_the_aggregator_too(thinwire, home, place):
    Store.open(place.database).close()
    with sqlite3.connect(place.database) as opened:
        opened.execute("UPDATE alembic_version SET version_num = '9999'")
    opened.close()
    for words in (START, ("runs", "list"), ("devices", "list"), ("devices", "approve", "pi-01")):
        said = thinwire(*words, "--home", home)
        assert (said.code, "newer than this program" in said.err) == (8, True)


def test_an_old_store_is_upgraded_by_the_aggregator_alone(thinwire, home, place):
    database = Database(database_url(place.database), read_only=False)
    with database.writing() as connection:
        schema.migrate(connection, "0001")
    database.close()
    for words in (("runs", "list"), ("devices", "revoke", "pi-01")):
        said = thinwire(*words, "--home", home)
        assert (said.code, "start the aggregator once" in said.err) == (8, True)
    copy = place.root / f"store.sqlite3.before-{schema.revisions()[-1]}"
    assert not copy.exists()
    said = thinwire(*START, "--cert", "nowhere.pem", "--key", "nowhere.key", "--home", home)
    assert said.code != 0  # so that it ends: the certificate is read when the store stands
    assert copy.exists()
    assert thinwire("runs", "list", "--home", home).code == 0
