"""Schema versions of the database: creating and upgrading the tables, and copying a SQLite file before an upgrade."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from pathlib import Path
from typing import cast
from urllib.parse import quote

from sqlalchemy import Connection, inspect, text

from thinwire.core.errors import DataLost
from thinwire.core.statedir import disk_error, sync_path
from thinwire.store.database import Database

MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADING = threading.Lock()  # Alembic keeps its context in a global
_made: dict[str, list[str]] = {}  # revision -> the statements that create its tables in an empty database


def revisions() -> list[str]:
    """Return all revisions that this program knows, oldest first.

    Revisions are numbers, and a migration's file name begins with its revision.
    """
    return sorted(path.name.split("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def prepare(database: Database, upgrade: bool) -> None:
    """Create the tables if there are none; upgrade an older database only if `upgrade` is set.

    Several processes may call this at the same time. A SQLite file is copied to `FILE.before-REVISION` first. Raise
    `DataLost` if this fails.

    Invariant: after an error or a kill the database is as it was.
    """
    with database.reading() as connection:
        found = revision(database, connection)
    if found == revisions()[-1]:
        if not database.read_only:
            with database.writing() as connection:  # an unwritable disk fails here, not in the middle of a round
                connection.execute(text("UPDATE alembic_version SET version_num = version_num"))
        return
    if database.read_only or not (upgrade or found is None):
        raise DataLost(
            f"{database.name} is older than this program",
            why=f"it has revision {found}, this program works on {revisions()[-1]}",
            hint="start the aggregator once: it keeps a copy and upgrades it",
        )
    with database.writing() as connection:
        found = revision(database, connection)
        if found is None:
            _make(database, connection)
        elif found != revisions()[-1]:
            _upgrade(database, connection, found)


def _make(database: Database, connection: Connection) -> None:
    """Create the tables by running the migrations.

    For SQLite this happens once a process; further databases get the same statements.
    """
    newest = revisions()[-1]
    for statement in _made.get(newest, []) if database.sqlite else []:
        connection.exec_driver_sql(statement)
    if revision(database, connection) is None:
        migrate(connection)
        if database.sqlite:
            driver = cast(sqlite3.Connection, connection.connection.driver_connection)
            _made[newest] = [line for line in driver.iterdump() if line not in ("BEGIN TRANSACTION;", "COMMIT;")]


def _upgrade(database: Database, connection: Connection, found: str) -> None:
    """Upgrade in one transaction, which excludes other writers.

    So the copy, which is read outside this transaction, has the same content as the database before the upgrade.
    """
    copy = ""
    if database.sqlite:
        path = Path(database.name)
        copy = str(copy_file(path, path.with_name(f"{path.name}.before-{revisions()[-1]}")))
    try:
        migrate(connection)
    except Exception as error:  # a migration may raise anything; the transaction is rolled back
        said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        raise DataLost(
            f"{database.name} could not be upgraded and is as it was",
            why=f"from revision {found} to {revisions()[-1]}: {said}",
            hint="the version of thinwire that wrote it goes on with it" + (f"; a copy is {copy}" if copy else ""),
        ) from error


def migrate(connection: Connection, to: str = "head") -> None:
    """Run the migrations in the transaction of `connection`."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _UPGRADING:
        command.upgrade(config, to)


def revision(database: Database, connection: Connection) -> str | None:
    """Return the database's revision, or None if it is empty; refuse a newer one, and another program's."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        if tables:
            raise DataLost(f"{database.name} is not Thinwire's", why=f"it holds the table {min(tables)!r}")
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if found is not None and found not in revisions():
        raise DataLost(
            f"the database {database.name} is newer than this program",
            why=f"it has revision {found}, this program knows up to {revisions()[-1]}",
            hint="upgrade thinwire, or use another folder: --home FOLDER",
        )
    return None if found is None else str(found)


def copy_file(source: Path, target: Path) -> Path:
    """Copy a SQLite file to which others may be writing: whole, as of one moment, and durable before it has its name.

    `target` gets mode 0600 and is replaced if it exists. Raise `DataLost` on an error, which leaves `target` unchanged.
    """
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            _back_up(source, draft)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        sync_path(target.parent)
    except OSError as error:
        raise disk_error(error, target) from error
    except sqlite3.Error as error:
        raise DataLost(
            f"cannot copy {source}", why=str(error), hint="free some space, or restore a backup where it is damaged"
        ) from error
    return target


def check_file(path: Path) -> None:
    """Raise `DataLost` unless SQLite finds the whole file consistent; no side files are created."""
    try:
        with contextlib.closing(sqlite3.connect(_address(path, "mode=ro&immutable=1"), uri=True)) as opened:
            found = opened.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        found = str(error)
    if found != "ok":
        raise DataLost(f"{path} is damaged", why=str(found), hint="take another copy")


def _back_up(source: Path, draft: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(_address(source, "mode=ro"), uri=True)) as theirs,
        contextlib.closing(sqlite3.connect(draft)) as ours,
    ):
        theirs.backup(ours)
        ours.execute("PRAGMA journal_mode=DELETE")  # one file: the content of the log moves into it
    check_file(draft)
    sync_path(draft)


def _address(path: Path, query: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{query}"
