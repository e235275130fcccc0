"""Schema versions of the database: creating and upgrading the tables, and copying a SQLite file before an upgrade.

A new database gets today's tables at once; an older one gets the migrations that came after its revision.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, inspect, text
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

import thinwire.store.alerts
import thinwire.store.privacy_devices
import thinwire.store.sessions  # noqa: F401 - they define the tables
from thinwire.core.errors import DataLost
from thinwire.core.statedir import disk_error, sync_path
from thinwire.store.database import METADATA, Database

MIGRATIONS = Path(__file__).parent / "migrations"
UNRELEASED = re.compile(r"00\d\d")  # revisions from before the first release, whose tables have other names
COLUMNS = {  # one statement, since each command opens the store: SQLAlchemy's inspector takes 2 to 6 ms
    "sqlite": "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c WHERE m.type = 'table'",
    "postgresql": "SELECT table_name, column_name FROM information_schema.columns"
    " WHERE table_schema = current_schema()",
}
INDEXES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'index'",
    "postgresql": "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()",
}
_UPGRADING = threading.Lock()  # Alembic keeps its context in a global


def revisions() -> list[str]:
    """Return all revisions that this program knows, oldest first: the names of the migrations' files."""
    return sorted(path.stem for path in MIGRATIONS.glob("[0-9]*.py"))


def prepare(database: Database, upgrade: bool) -> None:
    """Create the tables if there are none, and indexes that are missing; upgrade an older database only if `upgrade` is
    set.

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
                _add_indexes(connection)
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
            _make(connection)
        elif found != revisions()[-1]:
            _upgrade(database, connection, found)
            _add_indexes(connection)


def _make(connection: Connection) -> None:
    """Create today's tables in an empty database, and mark it with the newest revision: no migration has to run."""
    for statement in _statements(connection.dialect):
        connection.exec_driver_sql(statement)
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revisions()[-1]})


def _add_indexes(connection: Connection) -> None:
    """Create the indexes that the database lacks: they change only how fast a query is, so they need no revision."""
    found = set(connection.scalars(text(INDEXES[connection.dialect.name])))
    for table in METADATA.tables.values():
        for index in table.indexes:
            if index.name not in found:
                connection.execute(CreateIndex(index))


@cache
def _statements(dialect: Dialect) -> list[str]:
    """Return the statements that create all tables; all SQLite databases of a process share them."""
    version = "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    tables = METADATA.sorted_tables
    indexes = [CreateIndex(index) for table in tables for index in sorted(table.indexes, key=lambda one: str(one.name))]
    made: list[CreateTable | CreateIndex] = [*map(CreateTable, tables), *indexes]
    return [version, *(str(one.compile(dialect=dialect)) for one in made)]


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
        revision(database, connection)  # refuses tables of other columns
    except Exception as error:  # a migration may raise anything; the transaction is rolled back
        said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        raise DataLost(
            f"{database.name} could not be upgraded and is as it was",
            why=f"from revision {found} to {revisions()[-1]}: {said}",
            hint="the version of thinwire that wrote it goes on with it" + (f"; a copy is {copy}" if copy else ""),
        ) from error


def migrate(connection: Connection) -> None:
    """Run the migrations in the transaction of `connection`."""
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.runtime.migration import MigrationStep, RevisionStep
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(MIGRATIONS, version_locations=[MIGRATIONS])

    def steps(found: Any, _: object) -> list[RevisionStep]:
        newest_first = scripts.iterate_revisions("head", found, implicit_base=True)
        return [MigrationStep.upgrade_from_script(scripts.revision_map, one) for one in reversed([*newest_first])]

    with _UPGRADING, EnvironmentContext(Config(), scripts, fn=steps) as environment:
        environment.configure(connection, transactional_ddl=True)  # SQLite too: its driver does not commit by itself
        environment.run_migrations()


def revision(database: Database, connection: Connection) -> str | None:
    """Return the database's revision, or None if it is empty.

    Refuse a newer one, one from before the first release, one with other columns, and another program's.
    """
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" not in tables:
        if tables:
            raise DataLost(f"{database.name} is not Thinwire's", why=f"it holds the table {min(tables)!r}")
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if found is None:
        return None
    hint = "use another state directory: --home FOLDER" if database.sqlite else "use another database"
    require_known(connection, found, f"the database {database.name}", hint)
    return str(found)


def require_known(connection: Connection, found: str, what: str, hint: str) -> None:
    """Raise `DataLost` unless this program knows the revision `found` of `what`, and the columns if it is the last."""
    if UNRELEASED.fullmatch(found):
        raise DataLost(
            f"{what} is from before the first release",
            why=f"it has revision {found}, whose tables and files have other names; nothing was read",
            hint=hint,
        )
    if found not in revisions():
        why = f"it has revision {found}, this program knows up to {revisions()[-1]}"
        raise DataLost(f"{what} is newer than this program", why=why, hint=f"upgrade thinwire, or {hint}")
    if found == revisions()[-1]:
        _require_columns(connection, what, hint)


def _require_columns(connection: Connection, what: str, hint: str) -> None:
    """Raise `DataLost` unless each of the program's tables has exactly the program's columns in the database."""
    ours = _columns()
    found = connection.exec_driver_sql(COLUMNS[connection.dialect.name])
    theirs = {(table, name) for table, name in found if table in METADATA.tables}
    if ours == theirs:
        return
    differing = [f"no column {table}.{name}" for table, name in sorted(ours - theirs)]
    differing += [f"an unknown column {table}.{name}" for table, name in sorted(theirs - ours)]
    more = ", among other differences" if len(differing) > 1 else ""
    raise DataLost(
        f"{what} is of another version of thinwire",
        why=f"it has revision {revisions()[-1]}, but {differing[0]}{more}; nothing was changed",
        hint=hint,
    )


@cache
def _columns() -> frozenset[tuple[str, str]]:
    return frozenset((table.name, column.name) for table in METADATA.tables.values() for column in table.columns)


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
