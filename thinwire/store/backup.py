"""Backups of an aggregator's state directory, also while it runs, and restoring one, completely or not at all.

A backup is one tar: the database first, then plain files, and last a manifest with the digests of all of them.
Restoring extracts only regular files whose names match `fits` and whose digests agree. Of secure runs it leaves some
out, and a restore gives them a new identity (`backup_content.py`).

Invariant: a backup holds every model and every reply that the copied database refers to and that an unfinished run
needs. Model files and replies are written once, before the database refers to them, and removed when it no longer needs
them. So they are linked into a staging folder before and after the database is copied. Only a file that was written and
removed in between can be missing; then the copy is repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from sqlalchemy import text

from thinwire.core.errors import DataLost, NotFound, UsageError
from thinwire.core.protocol import read_json
from thinwire.core.statedir import (
    AggregatorHome,
    disk_error,
    lock_file,
    private_folder,
    private_opener,
    require_its_database,
    sync_path,
)
from thinwire.store.backup_content import end_sessions, leave_out, lose_reservations, missing_files, renew
from thinwire.store.database import Database, database_url
from thinwire.store.schema import check_file, copy_file, require_known
from thinwire.store.store import Store

FORMAT = 1
DATABASE = "store.sqlite3"
FOLDERS = ("runs", "spool", "sweeps", "tls")
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 256 * 2**20  # bytes
REPORT_KEY = "report.key"
_NAME = re.compile(
    rf"{re.escape(DATABASE)}|{re.escape(REPORT_KEY)}|(?:{'|'.join(FOLDERS)})(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)+"
)


@dataclass(frozen=True)
class Entry:
    """Holds a file in a backup. `mtime_ns` is restored, since it gives the order of arrival in the spool."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass
class Manifest:
    """Holds the last member of a backup: a file without it is incomplete."""

    backed_up_at: float  # wall clock
    thinwire: str  # the version of thinwire that wrote it
    files: dict[str, Entry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest; raise `ValueError` for anything that is not one of this format, before it takes memory."""
        try:
            said: Any = read_json(data, LARGEST_MANIFEST)
        except ValueError as error:
            raise ValueError(f"its list of files is not readable: {error}") from error
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise ValueError(f"its list of files is not of format {FORMAT}")
        try:
            files = {
                str(name): Entry(int(e["size"]), str(e["sha256"]), int(e["mtime_ns"]))
                for name, e in said["files"].items()
            }
            backed_up_at = float(said["backed_up_at"])
            if not math.isfinite(backed_up_at) or any(not 0 <= entry.mtime_ns < 2**63 for entry in files.values()):
                raise ValueError("something in it is of no time")
            return cls(backed_up_at, str(said["thinwire"]), files)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("its list of files is not readable") from error


def put(tar: tarfile.TarFile, name: str, source: BufferedReader, entry_of: os.stat_result) -> Entry:
    """Add a file that no longer changes, and return its entry for the manifest."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = entry_of.st_size, int(entry_of.st_mtime), 0o600
    tar.addfile(info, source)
    source.seek(0)
    return Entry(entry_of.st_size, hashlib.file_digest(source, "sha256").hexdigest(), entry_of.st_mtime_ns)


def put_manifest(tar: tarfile.TarFile, manifest: Manifest) -> None:
    """Add the manifest, which completes the backup."""
    data = manifest.to_bytes()
    info = tarfile.TarInfo(MANIFEST)
    info.size, info.mtime, info.mode = len(data), int(manifest.backed_up_at), 0o600
    tar.addfile(info, io.BytesIO(data))


def take_out(file: IO[bytes], folder: Path) -> Manifest:
    """Extract a backup into an empty folder, durably.

    Raise `ValueError` or `tarfile.TarError` if it is incomplete or damaged.
    """
    found: dict[str, tuple[int, str]] = {}
    manifest: Manifest | None = None
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            if manifest is not None or not member.isreg() or member.issparse() or member.name in found:
                raise ValueError(f"{member.name!r} does not belong there")
            source = tar.extractfile(member)
            assert source is not None
            if member.name == MANIFEST:
                manifest = Manifest.from_bytes(source.read(LARGEST_MANIFEST))
            elif fits(member.name):
                found[member.name] = _lay(source, folder, member.name)
            else:
                raise ValueError(f"{member.name!r} does not belong there")
    if manifest is None:
        raise ValueError("its end is missing")
    for name in found.keys() | manifest.files.keys():
        entry = manifest.files.get(name)
        if entry is None or found.get(name) != (entry.size, entry.sha256):
            raise ValueError(f"{name} is missing, or not what was backed up")
        os.utime(folder / name, ns=(entry.mtime_ns, entry.mtime_ns))
    if DATABASE not in found:
        raise ValueError("there is no database in it")
    return manifest


def files_under(folder: Path) -> Iterator[Path]:
    """Yield all finished regular files; a name that begins with a dot is still being written.

    A folder that is removed meanwhile has none.
    """
    for path in sorted(Path(at) / name for at, _, names in os.walk(folder) for name in names):
        inner = path.relative_to(folder).parts
        if not any(part.startswith(".") for part in inner) and path.is_file() and not path.is_symlink():
            yield path


def fits(name: str) -> bool:
    """Return True if a restore extracts files with this name; all files that Thinwire needs have such names."""
    return _NAME.fullmatch(name) is not None


def _lay(source: IO[bytes], root: Path, name: str) -> tuple[int, str]:
    for parent in reversed(Path(name).parents):
        (root / parent).mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        file.seek(0)
        return size, hashlib.file_digest(file, "sha256").hexdigest()


ATTEMPTS = 5
STAGE = ".backup"
LINKED = ("runs", "spool", "sweeps")  # folders whose files are written once, or replaced as a whole


def back_up(home: AggregatorHome, target: Path, version: str) -> Manifest:
    """Write a backup of the database, models, spool, sweeps, and the device API's CA and keys to `target`.

    `target` gets mode 0600 and must not exist.
    """
    require_its_database(home.database)
    if home.sweeps.is_dir() and not home.database.exists():
        Store.open(home.database).close()  # there are only sweeps: a backup needs a database all the same
    if not home.database.exists():
        raise NotFound(
            f"there is nothing to back up in {home.root}", why="no aggregator was ever started there",
            hint="thinwire aggregator start; or name another folder: --home FOLDER",
        )  # fmt: skip
    if target.exists():
        raise UsageError(f"{target} is there already", why="a backup is never overwritten", hint="another name")
    if not target.parent.is_dir():
        raise UsageError(
            f"there is no folder {target.parent}", why="a backup goes into one that is there", hint="one that is there"
        )
    try:
        with lock_file(home.root / "backup.lock"), _stage(home.root / STAGE) as stage:
            backed_up_at = _collect(home, stage)
            return _write(stage, target, Manifest(backed_up_at, version))
    except OSError as error:
        raise disk_error(error, target) from error


@contextlib.contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """Create a staging folder and remove it afterwards; leftovers of a killed backup are removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield private_folder(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _collect(home: AggregatorHome, stage: Path) -> float:
    for _ in range(ATTEMPTS):
        shutil.rmtree(stage)
        private_folder(stage)
        _link(home.root, stage)
        backed_up_at = time.time()
        copy_file(home.database, stage / DATABASE)
        _link(home.root, stage)
        leave_out(stage, stage / DATABASE)
        missing = list(missing_files(stage, stage / DATABASE))
        if not missing:
            _certificates(home.root / "tls", private_folder(stage / "tls"))
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(home.report_key, stage / REPORT_KEY)
            return backed_up_at
    raise DataLost(
        f"{missing[0]} is missing", why="the database speaks of it, and a run that is not over needs it",
        hint="stop the aggregator and try again; if it is missing then too, thinwire runs stop that run",
    )  # fmt: skip


def _link(root: Path, stage: Path) -> None:
    """Link all finished files under runs/, spool/ and sweeps/ that are not linked yet; a link costs no space.

    A folder in the spool is named by a device; one that is not the name of a run is left out.
    """
    for source in (path for name in LINKED for path in files_under(root / name)):
        place = stage / source.relative_to(root)
        if not fits(str(source.relative_to(root))):
            continue
        private_folder(place.parent)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            try:
                os.link(source, place)
            except OSError as error:
                if isinstance(error, (FileExistsError, FileNotFoundError)):
                    raise
                shutil.copy2(source, place)  # a file system without links


def _certificates(folder: Path, stage: Path) -> None:
    """Copy the certificates as of one moment: a certificate and its key are two files, which a renewal replaces."""
    while True:
        found = {path: path.read_bytes() for path in files_under(folder)}
        if found == {path: path.read_bytes() for path in files_under(folder)}:
            break
    for path, data in found.items():
        place = stage / path.relative_to(folder)
        private_folder(place.parent)
        with open(place, "wb", opener=private_opener) as file:
            file.write(data)


def _write(stage: Path, target: Path, manifest: Manifest) -> Manifest:
    draft = target.with_name(f".{target.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                alone = [path for path in (stage / DATABASE, stage / REPORT_KEY) if path.exists()]
                for path in [*alone, *(path for name in FOLDERS for path in files_under(stage / name))]:
                    name = str(path.relative_to(stage))
                    with open(path, "rb") as source:
                        manifest.files[name] = put(tar, name, source, os.fstat(source.fileno()))
                put_manifest(tar, manifest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
        sync_path(target.parent)
    finally:
        draft.unlink(missing_ok=True)
    return manifest


@dataclass(frozen=True)
class Restored:
    """Holds the result of a restore; `replaced` is the new path of the previous state directory, if there was one.

    `reservations` is the number of entries in the privacy ledger, which lacks those since the backup, and
    `private_runs` that of private runs on devices: the lost aggregator may have made the first round of one.
    """

    manifest: Manifest
    replaced: Path | None
    reservations: int = 0
    private_runs: int = 0


def restore(
    source: Path, home: AggregatorHome, force: bool, prepare: Callable[[Store], None] = lambda _: None
) -> Restored:
    """Check every byte of the backup outside the state directory, then put it in place.

    `prepare` changes its store before that, unless an older version wrote it: an aggregator has to upgrade that first.
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
                manifest, counts = _unpack(source, private_folder(draft))
                _prepare(draft / DATABASE, prepare)
                aside = _aside(home.root)
                _swap(draft, home.root, aside)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        if not occupied:
            shutil.rmtree(aside, ignore_errors=True)
        return Restored(manifest, aside if occupied else None, *counts)
    except OSError as error:
        raise disk_error(error, home.root) from error


def _prepare(database: Path, prepare: Callable[[Store], None]) -> None:
    try:
        store = Store.open(database)
    except DataLost:  # of an older version
        return
    with contextlib.closing(store):
        prepare(store)


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


def _unpack(source: Path, folder: Path) -> tuple[Manifest, tuple[int, int]]:
    try:
        with open(source, "rb") as file:
            manifest = take_out(file, folder)
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DataLost(
            f"{source} is no whole backup", why=str(error), hint="take another one; what is there was not touched"
        ) from error
    check_file(folder / DATABASE)
    database = Database(database_url(folder / DATABASE), read_only=True)
    with contextlib.closing(database), database.reading() as connection:
        for revision in connection.scalars(text("SELECT version_num FROM alembic_version")).all():
            hint = f"restore it with thinwire {manifest.thinwire}, which wrote it"
            require_known(connection, revision, str(source), hint)
    renew(folder / DATABASE)
    end_sessions(folder / DATABASE, time.time())
    counts = lose_reservations(folder / DATABASE, manifest.backed_up_at)
    for path in [folder, folder / DATABASE, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_path(path)
    return manifest, counts
