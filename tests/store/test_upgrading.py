from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import text

from thinwire.core.errors import DataLost
from thinwire.store import Store, schema
from thinwire.store.database import Database, database_url

LOGIN = "INSERT INTO logins (code_hash, expires_at) VALUES ('of before', 1.0)"
FIRST = "0001_initial"
NEXT, BROKEN = "9000_next", "9000_broken"
MORE = "op.execute('CREATE TABLE more (a INTEGER)')"
LESS = "op.execute('ALTER TABLE rounds DROP COLUMN detail')"
HALF = (
    "op.execute('DELETE FROM logins'); op.execute('CREATE TABLE half (a INTEGER)'); "
    "op.execute('SELECT no_such_column FROM logins')"
)


def made(address: str | Path) -> None:
    """Make a database at the first revision, with one row to recognise it by."""
    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text(LOGIN))
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{FIRST}'"))


@pytest.fixture
def old(address: str) -> str:
    made(address)
    return address


def with_one_more(monkeypatch: pytest.MonkeyPatch, folder: Path, revision: str, does: str) -> None:
    """Give the program one more migration."""
    shutil.copytree(schema.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / f"{revision}.py").write_text(
        f"from alembic import op\nrevision, down_revision = {revision!r}, {FIRST!r}\ndef upgrade():\n    {does}\n"
    )
    monkeypatch.setattr(schema, "MIGRATIONS", folder)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_one_more(monkeypatch, tmp_path / "migrations", NEXT, MORE)


@pytest.fixture
def with_a_broken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The migrations, and one more that gets half way."""
    with_one_more(monkeypatch, tmp_path / "migrations", BROKEN, HALF)


def at_revision(address: str) -> tuple[str | None, list[str]]:
    database = Database(database_url(address), read_only=True)
    with database.reading() as connection:
        found = schema.revision(database, connection), list(connection.scalars(text("SELECT code_hash FROM logins")))
    database.close()
    return found


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as opened:
        return list(opened.iterdump())


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("store.sqlite3.*before*")) + sorted(folder.glob(".store*"))


@pytest.mark.parametrize("read_only", [True, False])
def test_only_who_says_so_upgrades_an_old_store(old: str, newer: None, tmp_path: Path, read_only: bool) -> None:
    with pytest.raises(DataLost, match="older than this program") as refused:
        Store.open(old, read_only=read_only)
    assert refused.value.exit_code == 8
    assert "start the aggregator once" in refused.value.hint
    assert at_revision(old) == (FIRST, ["of before"])
    assert copies(tmp_path) == []


def test_an_old_store_is_upgraded_and_keeps_what_it_held(old: str, newer: None) -> None:
    with Store.open(old, upgrade=True) as store:
        assert store.invitations.all() == []
    assert at_revision(old) == (NEXT, ["of before"])
    Store.open(old, upgrade=True).close()


def test_a_file_is_copied_before_it_is_upgraded(tmp_path: Path, newer: None) -> None:
    path, copy = tmp_path / "store.sqlite3", tmp_path / f"store.sqlite3.before-{NEXT}"
    copy.write_text("of an upgrade that failed")
    made(path)
    with contextlib.closing(sqlite3.connect(path)) as reader:
        reader.execute("SELECT code_hash FROM logins").fetchall()
        with contextlib.closing(sqlite3.connect(path)) as writer, writer:
            writer.execute("DELETE FROM sessions")
        before = dump(path)  # while its log holds some of it
        Store.open(path, upgrade=True).close()
    assert dump(copy) == before
    assert copy.stat().st_mode & 0o777 == 0o600
    assert copies(tmp_path) == [copy]
    shutil.copy(copy, path)
    assert at_revision(str(path)) == (FIRST, ["of before"])


def test_a_new_store_and_one_that_is_up_to_date_are_not_copied(tmp_path: Path) -> None:
    for _ in range(2):
        Store.open(tmp_path / "store.sqlite3", upgrade=True).close()
    assert copies(tmp_path) == []


def test_a_migration_that_fails_leaves_the_old_store_in_use(old: str, with_a_broken_one: None) -> None:
    with pytest.raises(DataLost, match="as it was") as failed:
        Store.open(old, upgrade=True)
    assert failed.value.exit_code == 8
    assert "no_such_column" in failed.value.why
    assert at_revision(old) == (FIRST, ["of before"])


def test_a_migration_that_fails_writes_nothing_into_the_file(tmp_path: Path, with_a_broken_one: None) -> None:
    path = tmp_path / "store.sqlite3"
    made(path)
    before = dump(path)
    with pytest.raises(DataLost) as failed:
        Store.open(path, upgrade=True)
    assert dump(path) == before == dump(tmp_path / f"store.sqlite3.before-{BROKEN}")
    assert str(tmp_path / f"store.sqlite3.before-{BROKEN}") in failed.value.hint


def test_where_no_copy_can_be_made_nothing_is_upgraded(
    tmp_path: Path, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.sqlite3"
    made(path)

    def full(source: Path, draft: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(schema, "_back_up", full)
    with pytest.raises(DataLost, match="before-") as failed:
        Store.open(path, upgrade=True)
    assert failed.value.exit_code == 1
    assert at_revision(str(path)) == (FIRST, ["of before"])
    assert copies(tmp_path) == []


def test_a_store_newer_than_the_program_is_refused_by_who_upgrades_too(address: str, tmp_path: Path) -> None:
    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DataLost, match="newer than this program") as refused:
        Store.open(address, upgrade=True)
    assert refused.value.exit_code == 8
    assert copies(tmp_path) == []


@pytest.mark.parametrize("upgrade", [True, False])
@pytest.mark.parametrize("revision", ["0001", "0007", "0014"])
def test_a_store_from_before_the_first_release_is_refused_and_not_touched(
    tmp_path: Path, revision: str, upgrade: bool
) -> None:
    path = tmp_path / "store.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.executescript(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL);"
            f"INSERT INTO alembic_version VALUES ('{revision}'); CREATE TABLE updates (ask_id TEXT);"
        )
    before = dump(path)
    with pytest.raises(DataLost, match="before the first release") as refused:
        Store.open(path, upgrade=upgrade)
    assert refused.value.exit_code == 8
    assert f"revision {revision}" in refused.value.why and "--home" in refused.value.hint
    assert dump(path) == before
    assert copies(tmp_path) == []


@pytest.mark.parametrize("upgrade", [True, False])
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (["DROP COLUMN detail"], "but no column rounds.detail;"),
        (["ADD COLUMN later TEXT"], "but an unknown column rounds.later;"),
        (["DROP COLUMN detail", "DROP COLUMN spent"], "but no column rounds.detail, among other differences;"),
    ],
)
def test_a_store_with_other_columns_is_refused_and_not_touched(
    address: str, upgrade: bool, changed: list[str], why: str
) -> None:
    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text(LOGIN))
        for change in changed:
            connection.execute(text(f"ALTER TABLE rounds {change}"))
    for read_only in (True, False):
        with pytest.raises(DataLost, match="of another version of thinwire") as refused:
            Store.open(address, upgrade=upgrade, read_only=read_only)
        assert refused.value.exit_code == 8
        assert why in refused.value.why
        assert refused.value.hint.startswith("use another ")
    database = Database(database_url(address), read_only=True)
    with contextlib.closing(database), database.reading() as connection:
        assert list(connection.scalars(text("SELECT code_hash FROM logins"))) == ["of before"]


def test_tables_that_are_not_thinwires_are_left_alone(address: str) -> None:
    with Store.open(address) as store, store._database.writing() as connection:
        connection.execute(text("CREATE TABLE cats (name TEXT)"))
    Store.open(address).close()


def test_a_migration_that_does_not_make_todays_tables_changes_nothing(
    old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one_more(monkeypatch, tmp_path / "migrations", BROKEN, LESS)
    with pytest.raises(DataLost, match="as it was") as failed:
        Store.open(old, upgrade=True)
    assert "no column rounds.detail" in failed.value.why
    assert at_revision(old) == (FIRST, ["of before"])


def test_a_copy_of_a_damaged_file_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    Store.open(path).close()
    path.write_bytes(path.read_bytes()[:5000] + bytes(range(256)) * 100)
    with pytest.raises(DataLost):
        schema.copy_file(path, tmp_path / "copy")
    assert [found.name for found in tmp_path.iterdir() if "copy" in found.name] == []
