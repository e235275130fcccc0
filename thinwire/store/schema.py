"""Which version of the tables a database has, and how it becomes the newest one."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from thinwire.core.errors import DataLost
from thinwire.store.database import Database

MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADING = threading.Lock()  # Alembic keeps what it works on in a global


def revisions() -> list[str]:
    """All that this program knows, oldest first: a migration's file is named by its revision, which are numbers."""
    return sorted(path.name.split("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def prepare(database: Database) -> None:
    """Make the tables what this program needs, or say why they cannot be.

    Several processes may do this at the same time; killed on its way, it has done nothing.
    """
    with database.reading() as connection:
        found = _revision(database, connection)
    if found == revisions()[-1]:
        if not database.read_only:
            with database.writing() as connection:  # a disk that refuses shows it here, not in the middle of a round
                connection.execute(text("UPDATE alembic_version SET version_num = version_num"))
        return
    if database.read_only:
        raise DataLost(f"{database.name} is older than this program", hint="start the aggregator once: it upgrades it")
    with database.writing() as connection:
        if _revision(database, connection) != revisions()[-1]:
            upgrade(connection)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations in the transaction that `connection` is in."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    with _UPGRADING:
        command.upgrade(config, revision)


def _revision(database: Database, connection: Connection) -> str | None:
    """The database's revision, None for an empty one; refuses one that is newer, or another program's."""
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
