"""SQLite's statements are put into words once a process, however many databases it opens, one after the other."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

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
