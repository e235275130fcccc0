"""Restoring a backup as an aggregator's state directory, either completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.statedir import AggregatorHome, disk_error, lock_file, private_folder, sync_path
from thinwire.store import schema
from thinwire.store.backup import DATABASE, FOLDERS, Manifest, take_out
from thinwire.store.schema import check_file


@dataclass(frozen=True)
class Restored:
    """The result of a restore; `replaced` is the new path of the previous state directory, if there was one."""

    manifest: Manifest
    replaced: Path | None


def restore(source: Path, home: AggregatorHome, force: bool) -> Restored:
    """Check every byte of the backup outside the state directory, then put it in place.

    With `force` an existing state directory is moved aside. Raise `Held` while an aggregator uses it, and `UsageError`
    if it exists without `force`. Raise `DataLost` if the backup is damaged, incomplete, or newer than this program.
    Invariant: an error changes nothing.
    """
    if not source.is_file():
        why = "it is a folder" if source.is_dir() else ""
        raise NotFound(f"there is no file {source}", why=why, hint="thinwire aggregator backup FILE makes one")
    draft = home.root.with_name(f".{home.root.name}.restoring")
    try:
        private_folder(home.root)
        with lock_file(home.lock):
            occupied = _occupied(home)
            if occupied and not force:
                raise UsageError(
                    f"there is an aggregator's state in {home.root}", why="restoring puts the backup in its place",
                    hint="--force moves it aside; or another folder: --home FOLDER",
                )  # fmt: skip
            shutil.rmtree(draft, ignore_errors=True)
            try:
                manifest = _unpack(source, private_folder(draft))
                aside = _aside(home.root)
                _swap(draft, home.root, aside)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        if not occupied:
            shutil.rmtree(aside, ignore_errors=True)
        return Restored(manifest, aside if occupied else None)
    except OSError as error:
        raise disk_error(error, home.root) from error


def _occupied(home: AggregatorHome) -> bool:
    return home.database.exists() or any(any((home.root / name).glob("*")) for name in FOLDERS)


def _swap(draft: Path, root: Path, aside: Path) -> None:
    os.rename(root, aside)
    try:
        os.rename(draft, root)
    except BaseException:
        os.rename(aside, root)
        raise
    sync_path(root.parent)


def _aside(root: Path) -> Path:
    """Return a free path with the current time in its name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (
        root.with_name(f"{root.name}.before-restore-{stamp}{more}") for more in ("", *(f"-{n}" for n in range(2, 99)))
    )
    return next(name for name in names if not name.exists())


def _unpack(source: Path, folder: Path) -> Manifest:
    try:
        with open(source, "rb") as file:
            manifest = take_out(file, folder)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DataLost(
            f"{source} is no whole backup", why=str(error), hint="take another one; what is there was not touched"
        ) from error
    check_file(folder / DATABASE)
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as opened:
        found = [row[0] for row in opened.execute("SELECT version_num FROM alembic_version")]
    for revision in found:
        schema.require_known(revision, str(source), f"restore it with thinwire {manifest.thinwire}, which wrote it")
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_path(path)
    return manifest
