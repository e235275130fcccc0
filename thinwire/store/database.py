"""The database: short transactions, error messages, column types, and one cache of compiled SQLite statements.

SQLAlchemy compiles a statement once a process, however many SQLite databases the process opens: all instances of
`SharedSQLiteDialect` are equal and share `COMPILED_STATEMENTS`.

Column types limit text and integers that may come from devices before the database sees them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic_core import from_json
from sqlalchemy import (
    JSON,
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    CursorResult,
    Engine,
    Integer,
    MetaData,
    RowMapping,
    Select,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
    make_url,
    select,
)
from sqlalchemy.dialects import registry, sqlite
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.util import LRUCache

from thinwire.core.errors import DataLost, NotWritten, ThinwireError, Unreachable, UsageError
from thinwire.core.statedir import disk_error, keep_private, require_its_database

LOG_BYTES = 16 * 2**20  # size to which SQLite cuts the write-ahead log after a long reader made it grow
WRITERS_LOCK = 0x7468696E77697265  # "thinwire"
EXAMPLE = "a file, or postgresql://USER@HOST/NAME"
NO_MORE = ("database or disk is full", "disk I/O error", "readonly")  # SQLite's messages if a disk cannot be written
Row = TypeVar("Row")
NOT_SERVING = ("08", "28", "3D", "53300", "57P")  # SQLSTATE: connection, access, too many connections, it ends
RETRYABLE = ("40", "55P03", "57014", "53200", "25006", "25P")  # conflict, lock, time limit, memory, failover, idle
DISK_FULL = "53100"
BUSY_S = 15.0  # longest wait for another process's transaction; ours take milliseconds
# libpq's settings by which a silent server is given up, in seconds, the last one in milliseconds
SILENCE = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "tcp_user_timeout": 30_000}


class Database:
    """An engine with a way to read and a way to write. Any thread may use it.

    Transactions are begun here and not by a listener of the engine: with one, SQLAlchemy looks for listeners at each
    statement, a tenth of the time of short ones. Within a process, writers wait for each other here, not in SQLite.

    Invariant: a transaction that raises changes nothing. An error of the disk raises `DataLost`; a server that does not
    answer raises `Unreachable`, as does a database that another process keeps busy for longer than BUSY_S.
    """

    def __init__(self, url: URL, read_only: bool, durable: bool = True) -> None:
        self.url, self.read_only = url, read_only
        self.engine = _engine(url, read_only, durable)
        self._writers = threading.RLock()
        self._for_reading = self.engine
        if not self.sqlite:  # in SQLite a reader has one view from its BEGIN on
            self._for_reading = self.engine.execution_options(isolation_level="REPEATABLE READ")

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction with one consistent view, for a few quick reads."""
        with self._own_errors(), self._for_reading.begin() as connection:
            if self.sqlite:
                connection.connection.cursor().execute("BEGIN")
            yield connection

    def rows(self, wanted: Select[Any]) -> list[dict[str, Any]]:
        """Return what a query finds, by column name."""
        with self.reading() as connection:
            return dicts(connection.execute(wanted))

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction whose writes are all durable at the end, or none of them."""
        if self.read_only:
            raise DataLost(f"cannot write {self.name}", why="it was opened for reading only")
        with self._own_errors(), self._writers, self.engine.begin() as connection:
            # The lock is taken at once: a transaction that begins as a reader could be refused at its first write.
            # One writer at a time also on a server: the journal's seq rises in the order of commits.
            if self.sqlite:
                connection.connection.cursor().execute("BEGIN IMMEDIATE")
            else:
                limit = f"set_config('lock_timeout', '{BUSY_S:g}s', true)"  # it counts from here on
                connection.exec_driver_sql(f"SELECT {limit}, pg_advisory_xact_lock({WRITERS_LOCK})")
            yield connection

    def compact(self) -> None:
        """Write SQLite's file again without free pages, which may hold what was deleted; nothing for a server."""
        if not self.sqlite:
            return
        with self._own_errors(), self._writers, contextlib.closing(self.engine.raw_connection()) as connection:
            connection.cursor().execute("VACUUM")
            connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def name(self) -> str:
        """The file, or the server's address without its password."""
        return str(self.url.database) if self.sqlite else self.url.render_as_string(hide_password=True)

    @property
    def sqlite(self) -> bool:
        """Return True if this is SQLite."""
        return self.url.get_backend_name() == "sqlite"

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except (DBAPIError, sqlite3.Error) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: DBAPIError | sqlite3.Error) -> ThinwireError:
        said = str(error.orig if isinstance(error, DBAPIError) else error).strip()
        if not self.sqlite:
            return self._refusal_of_server(error, said)
        hints = {
            "full": "free some space, or use another disk: --home FOLDER",
            "readonly": "the disk or the file is read-only: --home FOLDER on one that is not",
            "unable to open": "look at the folder and its owner, or use another: --home FOLDER",
            "not a database": "restore a backup, or start again with another folder: --home FOLDER",
            "malformed": "restore a backup, or start again with another folder: --home FOLDER",
            "locked": "another process keeps it busy: end that one, or wait",
        }
        hint = next((hint for sign, hint in hints.items() if sign in said), "look at the disk, or restore a backup")
        if "locked" in said:
            return Unreachable(f"cannot use the database {self.name}", why=said, hint=hint)
        kind = NotWritten if any(sign in said for sign in NO_MORE) else DataLost
        return kind(f"cannot use the database {self.name}", why=said, hint=hint)

    def _refusal_of_server(self, error: DBAPIError | sqlite3.Error, said: str) -> ThinwireError:
        """Return the error for the SQLSTATE of PostgreSQL; without one there is no connection."""
        state = getattr(getattr(error, "orig", None), "sqlstate", None) or ""
        what, hint = f"cannot use the database {self.name}", f"look at the server's log, at SQLSTATE {state}"
        if state.startswith(RETRYABLE):
            return Unreachable(what, why=said, hint=f"try again; {hint}")
        if (not state and isinstance(error, (OperationalError, InterfaceError))) or state.startswith(NOT_SERVING):
            return Unreachable(f"cannot reach the database {self.name}", said, "start it, or check the address")
        return (NotWritten if state == DISK_FULL else DataLost)(what, why=said, hint=hint)


def database_url(path_or_url: str | Path) -> URL:
    """Return a `postgresql://...` or `sqlite:///FILE` URL; text without `://` names a SQLite file.

    Raise `UsageError` for a URL that is invalid or not supported.
    """
    if "://" not in str(path_or_url):
        return URL.create("sqlite", database=str(Path(path_or_url).absolute()))
    try:
        url = make_url(str(path_or_url))
    except ArgumentError as error:
        raise UsageError("the database's URL is not readable", why=str(error), hint=EXAMPLE) from error
    if url.get_backend_name() == "postgresql" and find_spec("psycopg") is None:
        raise UsageError("PostgreSQL needs psycopg, which is not installed", hint="pip install 'thinwire[postgres]'")
    if url.get_backend_name() not in ("sqlite", "postgresql") or not url.database:
        raise UsageError(f"{url.render_as_string()} is no database for Thinwire", hint=EXAMPLE)
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _engine(url: URL, read_only: bool, durable: bool) -> Engine:
    dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # json.dumps makes one for each call
    as_json: dict[str, Any] = {"json_serializer": dumps, "json_deserializer": _parsed}
    if url.get_backend_name() != "sqlite":
        more = {key: value for key, value in SILENCE.items() if key not in url.query}
        return create_engine(url, **as_json, pool_pre_ping=True, connect_args=more)
    path = str(url.database)
    require_its_database(Path(path))
    if not read_only:
        _private_file(Path(path))
    mode = {"uri": "true", "mode": "ro" if read_only else "rw"}
    address = url.set(drivername=DRIVER, database=f"file:{quote(path)}", query=mode)
    engine = create_engine(
        address, **as_json, connect_args={"timeout": BUSY_S}, execution_options={"compiled_cache": COMPILED_STATEMENTS}
    )
    event.listen(engine, "connect", _reader if read_only else _writer if durable else _configure_unsynced)
    return engine


def _parsed(text: str | None) -> Any:
    """Return the value of a JSON column.

    A page reads thousands of small ones, most of them empty. The parser of pydantic takes a third of the time of
    `json.loads` and refuses a lone surrogate, which a device may have sent.
    """
    if text == "{}":
        return {}
    if text == "[]":
        return []
    if text is None:
        return None
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def _private_file(path: Path) -> None:
    """Create the file with mode 0600; SQLite gives its side files the same mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        keep_private(path)
    except OSError as error:
        raise disk_error(error, path) from error


def _reader(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # the driver would begin by itself, too late for a reader's single view
    connection.execute("PRAGMA foreign_keys=ON")


def _writer(connection: sqlite3.Connection, _record: object) -> None:
    _reader(connection, _record)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA journal_size_limit={LOG_BYTES}")
    until = time.monotonic() + BUSY_S
    while True:  # only this switch needs all others to wait, and SQLite's own timeout does not cover it
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _configure_unsynced(connection: sqlite3.Connection, _record: object) -> None:
    """Configure a database that its process removes: nothing is synced."""
    _reader(connection, _record)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA journal_mode=MEMORY")


DRIVER = "sqlite+thinwire"
COMPILED_STATEMENTS: LRUCache[Any, Any] = LRUCache(500)  # shared by all engines; SQLAlchemy's own size for one engine
registry.register("sqlite.thinwire", __name__, "SharedSQLiteDialect")


class ParsedJson(JSON):
    """A JSON column of SQLite, which returns text."""

    def result_processor(self, _dialect: Dialect, _kind: object) -> Callable[[str | None], Any]:
        """Return `_parsed` itself; SQLAlchemy would put two more calls around it."""
        return _parsed


class SharedSQLiteDialect(SQLiteDialect_pysqlite):
    """The SQLite dialect; all its instances are equal, so a statement compiled for one database serves the next."""

    supports_statement_cache = True
    colspecs = {**SQLiteDialect_pysqlite.colspecs, JSON: ParsedJson}  # noqa: RUF012 - as in SQLAlchemy

    def __eq__(self, other: object) -> bool:
        return type(other) is SharedSQLiteDialect

    def __hash__(self) -> int:
        return hash(SharedSQLiteDialect)


MAX_INTEGER = 2**63 - 1
MAX_TEXT_LETTERS = 4000  # letters; the journal keeps the whole text


class BoundedText(TypeDecorator[str]):
    """Text that may come from a device: cut at `longest`; NUL and halves of surrogate pairs are replaced."""

    impl = Text
    cache_ok = True

    def __init__(self, longest: int = MAX_TEXT_LETTERS) -> None:
        super().__init__()
        self.longest = longest

    def bind_processor(self, _dialect: Dialect) -> Callable[[str | None], str | None]:
        """Return `stored` itself; SQLAlchemy would put one more call around `process_bind_param`."""
        return self.stored

    def stored(self, value: str | None) -> str | None:
        """Return the text as it is stored."""
        if value is None:
            return None
        if value.isascii() and len(value) <= self.longest and "\0" not in value:
            return value
        return value[: self.longest].encode("utf-8", "replace").decode().replace("\0", "?")


class BoundedInteger(TypeDecorator[int]):
    """An integer that may come from a device: clamped to 64 bits."""

    impl = BigInteger
    cache_ok = True

    def bind_processor(self, _dialect: Dialect) -> Callable[[int | None], int | None]:
        """Return `stored` itself, as `BoundedText` does."""
        return self.stored

    def stored(self, value: int | None) -> int | None:
        """Return the integer as it is stored."""
        return None if value is None else max(-MAX_INTEGER, min(value, MAX_INTEGER))


def upsert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], adds: bool = False) -> None:
    """Insert rows, and replace those with the same primary key, with one statement.

    All rows have the same columns. With `adds`, the numbers of a row are added to those of a row that is there.
    """
    if rows:
        made = _upsert(connection.dialect.name, table, tuple(rows[0]), adds)
        connection.execute(made, list(rows))


@cache
def _upsert(dialect: str, table: Table, names: tuple[str, ...], adds: bool) -> Any:
    if dialect == "sqlite":
        made: Any = sqlite.insert(table)
    else:
        from sqlalchemy.dialects import postgresql  # asyncio comes with it

        made = postgresql.insert(table)
    keys = [column.name for column in table.primary_key]
    others = {name: made.excluded[name] for name in names if name not in keys}
    if adds:
        others = {name: table.c[name] + value for name, value in others.items()}
    return made.on_conflict_do_update(index_elements=keys, set_=others)


Counter = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only in a column of type INTEGER


METADATA = MetaData(  # names of indexes and constraints are the same on every database
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def needed(name: str, kind: Any, *more: Any, **options: Any) -> Column[Any]:
    """Return a column that is never null."""
    return Column(name, kind, *more, nullable=False, **options)


def optional(name: str, kind: Any, *more: Any, **options: Any) -> Column[Any]:
    """Return a column that may be null."""
    return Column(name, kind, *more, nullable=True, **options)


def dicts(found: CursorResult[Any]) -> list[dict[str, Any]]:
    """Return rows by column name, in half the time that `mappings()` takes."""
    names = tuple(found.keys())
    return [dict(zip(names, row, strict=True)) for row in found.all()]


def as_row(kind: type[Row], values: Mapping[str, Any] | RowMapping) -> Row:
    """Return a frozen dataclass with these values, which are those of all its fields.

    Its own constructor sets each field by a call: 24 microseconds for an assignment, and a page has hundreds.
    """
    made = object.__new__(kind)
    vars(made).update(values)
    return made


def columns_of(table: Table, row: type[Any], **computed: ColumnElement[Any]) -> Select[Any]:
    """Return a select of the columns that are fields of `row`; some of them are computed."""
    names = row.__dataclass_fields__
    return select(*(computed[name].label(name) if name in computed else table.c[name] for name in names))
