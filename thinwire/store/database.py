"""Short transactions on one database, and its refusals in words."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    Boolean,
    Connection,
    Double,
    Engine,
    Integer,
    MetaData,
    Text,
    TypeDecorator,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.util import LRUCache

from thinwire.core.errors import DataLost, NotWritten, ThinwireError, Unreachable, UsageError
from thinwire.core.statedir import disk_error, keep_private, require_its_database

LOG_BYTES = 16 * 2**20  # of the write-ahead log that are kept after a long reader made it grow
WRITERS_LOCK = 0x7468696E77697265  # "thinwire"
EXAMPLE = "a file, or postgresql://USER@HOST/NAME"
NO_MORE = ("database or disk is full", "disk I/O error", "readonly")  # SQLite's words for a disk that takes no more
BUSY_S = 15.0  # how long a transaction waits for another process's; ours take milliseconds


class Database:
    """An engine with two ways in. Any thread may use it; within a process writers queue up here, not in SQLite.

    A transaction that raises leaves nothing behind. What the disk or the server refuses comes out as `DataLost`,
    or as `Unreachable` for a server that does not answer.
    """

    def __init__(self, url: URL, read_only: bool, durable: bool = True) -> None:
        self.url, self.read_only = url, read_only
        self.engine = _engine(url, read_only, durable)
        self._writers = threading.RLock()
        self._for_reading = self.engine
        if not self.sqlite:  # SQLite's readers have one view from their BEGIN on
            self._for_reading = self.engine.execution_options(isolation_level="REPEATABLE READ")
        self._for_writing = self.engine.execution_options(thinwire_write=True)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """One consistent view for a few quick reads."""
        with self._in_words(), self._for_reading.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """All of it durable at the end, or none of it."""
        if self.read_only:
            raise DataLost(f"cannot write {self.name}", why="it was opened for reading only")
        with self._in_words(), self._writers, self._for_writing.begin() as connection:
            yield connection

    @property
    def name(self) -> str:
        """The file, or the server's address without its password."""
        return str(self.url.database) if self.sqlite else self.url.render_as_string(hide_password=True)

    @property
    def sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    def close(self) -> None:
        self.engine.dispose()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except (DBAPIError, sqlite3.Error) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: DBAPIError | sqlite3.Error) -> ThinwireError:
        said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
        if not self.sqlite and isinstance(error, (OperationalError, InterfaceError)):
            return Unreachable(f"cannot reach the database {self.name}", said, "start it, or check the address")
        hints = {
            "full": "free some space, or use another disk: --home FOLDER",
            "readonly": "the disk or the file is read-only: --home FOLDER on one that is not",
            "unable to open": "look at the folder and its owner, or use another: --home FOLDER",
            "not a database": "restore a backup, or start anew with another folder: --home FOLDER",
            "malformed": "restore a backup, or start anew with another folder: --home FOLDER",
            "locked": "another process keeps it busy: end that one, or wait",
        }
        hint = next((hint for sign, hint in hints.items() if sign in said), "look at the disk, or restore a backup")
        kind = NotWritten if any(sign in said for sign in NO_MORE) else DataLost
        return kind(f"cannot use the database {self.name}", why=said, hint=hint)


def database_url(path_or_url: str | Path) -> URL:
    """`postgresql://...` or `sqlite:///FILE` as it is; anything without `://` is a SQLite file."""
    if "://" not in str(path_or_url):
        return URL.create("sqlite", database=str(Path(path_or_url).absolute()))
    try:
        url = make_url(str(path_or_url))
    except ArgumentError as error:
        raise UsageError("the database's URL cannot be read", why=str(error), hint=EXAMPLE) from error
    if url.get_backend_name() == "postgresql" and find_spec("psycopg") is None:
        raise UsageError("PostgreSQL needs psycopg, which is not installed", hint="pip install 'thinwire[postgres]'")
    if url.get_backend_name() not in ("sqlite", "postgresql") or not url.database:
        raise UsageError(f"{url.render_as_string()} is no database for Thinwire", hint=EXAMPLE)
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _engine(url: URL, read_only: bool, durable: bool) -> Engine:
    dumps = partial(json.dumps, separators=(",", ":"))
    if url.get_backend_name() != "sqlite":
        engine = create_engine(url, json_serializer=dumps, pool_pre_ping=True)
        event.listen(engine, "begin", _begin)
        return engine
    path = str(url.database)
    require_its_database(Path(path))
    if not read_only:
        _private_file(Path(path))
    mode = {"uri": "true", "mode": "ro" if read_only else "rw"}
    address = url.set(drivername=DRIVER, database=f"file:{quote(path)}", query=mode)
    options = {"compiled_cache": WORDED}
    engine = create_engine(address, json_serializer=dumps, connect_args={"timeout": BUSY_S}, execution_options=options)
    event.listen(engine, "connect", _reader if read_only else _writer if durable else _passing)
    event.listen(engine, "begin", _begin)
    return engine


def _private_file(path: Path) -> None:
    """SQLite gives its side files the mode of this one."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        keep_private(path)
    except OSError as error:
        raise disk_error(error, path) from error


def _reader(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver would begin by itself, and too late for a reader's one view
    connection.execute("PRAGMA foreign_keys=ON")


def _writer(connection: sqlite3.Connection, _record: object) -> None:
    _reader(connection, _record)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA journal_size_limit={LOG_BYTES}")
    until = time.monotonic() + BUSY_S
    while True:  # readers and the writer do not wait for each other; only this switch does, and SQLite not for it
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _passing(connection: sqlite3.Connection, _record: object) -> None:
    """What its process removes: the system may write it when it likes."""
    _reader(connection, _record)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA journal_mode=MEMORY")


def _begin(connection: Connection) -> None:
    """A writer takes its turn at once: one that began as a reader could be refused when it first writes."""
    writes = connection.get_execution_options().get("thinwire_write", False)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    elif writes:  # one writer at a time here too: a journal's numbers rise in the order of commits
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITERS_LOCK})")


# SQLite's statements are put into words once a process, however many databases it opens, one after the other.


DRIVER = "sqlite+thinwire"
WORDED: LRUCache[Any, Any] = LRUCache(500)  # as many as SQLAlchemy keeps of one engine; the engines' `compiled_cache`
registry.register("sqlite.thinwire", __name__, "OneSQLite")


class OneSQLite(SQLiteDialect_pysqlite):
    """Any is as good as another: what was worded for one database is found again by the next."""

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return type(other) is OneSQLite

    def __hash__(self) -> int:
        return hash(OneSQLite)


# What columns hold: text and integers that may come from strangers are made to fit before a database sees them.


LARGEST = 2**63 - 1
LONGEST = 4000  # letters; the journal has all of it


class Words(TypeDecorator[str]):
    """Text that may come from a device: cut at `longest`; NUL and halves of surrogate pairs are replaced."""

    impl = Text
    cache_ok = True

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__()
        self.longest = longest

    def process_bind_param(self, value: str | None, _dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value[: self.longest].encode("utf-8", "replace").decode().replace("\0", "?")


class Whole(TypeDecorator[int]):
    """An integer that may come from a device: held at the ends of 64 bits."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, _dialect: Dialect) -> int | None:
        return None if value is None else max(-LARGEST, min(LARGEST, value))


Counter = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in a column of type INTEGER


class Base(DeclarativeBase):
    """All tables; names of indexes and constraints are the same on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Words,
        int: Whole,
        float: Double,
        bool: Boolean,
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }
