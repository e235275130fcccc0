"""A PostgreSQL database for the tests of the store: of a throw-away cluster, or of $THINWIRE_TEST_POSTGRES."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, make_url, text

from benchmarks.processes import free_port
from thinwire.store import Store
from thinwire.store.database import METADATA

GIVEN = os.environ.get("THINWIRE_TEST_POSTGRES", "")
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
DEBIAN = Path("/usr/lib/postgresql")
PATIENCE_S = 60.0
SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "unix_socket_directories=")
TRY = "the tests of the store run on SQLite only; try: make test, as root, which installs it"


@contextlib.contextmanager
def empty_database() -> Iterator[str]:
    """Yield the URL of a database that only this process uses; skip the test where there is no PostgreSQL."""
    if find_spec("psycopg") is None:
        pytest.skip(f"psycopg is not installed, so {TRY}")
    if not GIVEN:
        with _cluster(_programs()) as url:
            yield url
    elif not WORKER:
        yield GIVEN
    else:  # the processes of pytest-xdist may not empty each other's tables
        own = make_url(GIVEN).set(database=f"{make_url(GIVEN).database}_{WORKER}")
        execute(GIVEN, f'DROP DATABASE IF EXISTS "{own.database}"', f'CREATE DATABASE "{own.database}"')
        yield own.render_as_string(hide_password=False)


def execute(url: str, *statements: str) -> None:
    """Execute statements outside of a transaction, which CREATE DATABASE needs."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
    finally:
        engine.dispose()


class OwnTables:
    """The store's tables in a database that only this process uses; to delete their rows takes a quarter of making them
    again.
    """

    def __init__(self, url: str, connection: Connection) -> None:
        self.url, self._connection, self._are_there = url, connection, False

    @classmethod
    @contextlib.contextmanager
    def of(cls, url: str) -> Iterator[OwnTables]:
        engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            yield cls(url, connection)
        engine.dispose()

    def empty(self) -> None:
        """Leave the tables without rows, their counters at 1."""
        if not self._are_there:
            self.drop()
            Store.open(self.url).close()
            self._are_there = True
        rows = "; ".join(f"DELETE FROM {table.name}" for table in reversed(METADATA.sorted_tables))
        counters = "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'"
        self._connection.exec_driver_sql(f"{rows}; {counters}")

    def drop(self) -> None:
        """Leave no table: whoever gets the database now may make any."""
        self._connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        self._are_there = False


def _programs() -> Path:
    """Return the folder of initdb and postgres; Debian has one a version, outside of the PATH."""
    on_path = shutil.which("initdb")
    found = [Path(on_path).parent] if on_path else []
    found += sorted((file.parent for file in DEBIAN.glob("*/bin/initdb")), key=lambda folder: int(folder.parent.name))
    if not found:
        pytest.skip(f"PostgreSQL is not installed, so {TRY}")
    return found[-1]


@contextlib.contextmanager
def _cluster(programs: Path) -> Iterator[str]:
    """Run a cluster on a free port. PostgreSQL refuses to run as root, so root runs it as the user postgres."""
    folder, who = Path(tempfile.mkdtemp(prefix="thinwire-postgres-")), dict[str, Any]()
    try:
        if os.geteuid() == 0:
            try:
                user = pwd.getpwnam("postgres")
            except KeyError:
                pytest.skip(f"PostgreSQL may not run as root and there is no user postgres, so {TRY}")
            os.chown(folder, user.pw_uid, user.pw_gid)
            who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data, port = folder / "data", free_port()
        _initdb(programs, data, who)
        words = [str(programs / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port)]
        words += [word for setting in SETTINGS for word in ("-c", setting)]
        with open(folder / "log.txt", "wb") as log:
            server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, **who)
        try:
            _wait(programs, port, server, folder / "log.txt")
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            server.wait(PATIENCE_S)
    finally:
        shutil.rmtree(folder)


def _initdb(programs: Path, data: Path, who: dict[str, Any]) -> None:
    words = ("--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync")
    made = subprocess.run(
        [programs / "initdb", "-D", data, *words], capture_output=True, text=True, cwd=data.parent, check=False, **who
    )
    assert made.returncode == 0, made.stderr


def _wait(programs: Path, port: int, server: subprocess.Popen[Any], log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    ready = [str(programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, check=False).returncode:
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
