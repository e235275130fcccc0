"""A copy of a SQLite file that others may be writing to: whole, as of one moment, durable before it has its name."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from thinwire.core.errors import DataLost
from thinwire.core.home import disk_error, sync_folder


def copy_file(source: Path, target: Path) -> Path:
    """SQLite's backup of `source` as `target` (0600, replaced when it is there); `DataLost` leaves `target` alone."""
    draft = target.with_name(f".{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            _back_up(source, draft)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, target) from error
    except sqlite3.Error as error:
        raise DataLost(
            f"cannot copy {source}", why=str(error), hint="free some space, or restore a backup where it is damaged"
        ) from error
    return target


def check_file(path: Path) -> None:
    """`DataLost` unless SQLite finds the whole file consistent; it is opened so that nothing is made beside it."""
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
        ours.execute("PRAGMA journal_mode=DELETE")  # one file: what was read in its log is in it now
    check_file(draft)
    descriptor = os.open(draft, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _address(path: Path, query: str) -> str:
    return f"file:{quote(str(path.absolute()))}?{query}"
