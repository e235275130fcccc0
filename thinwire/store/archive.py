"""What a backup file is: one tar with the database first, then plain files, and last the digests of all of them.

Only regular files under these names, with digests that agree, are ever taken out of one.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

FORMAT = 1
DATABASE = "store.sqlite3"
FOLDERS = ("runs", "spool", "sweeps", "tls")
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 256 * 2**20  # bytes
CHUNK = 2**20
_NAME = re.compile(rf"{re.escape(DATABASE)}|(?:{'|'.join(FOLDERS)})(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


@dataclass(frozen=True)
class Entry:
    """A file in it. `mtime_ns` is kept: the spool's order is that of arrival."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass
class Manifest:
    """What stands last in a backup: a file without it was cut short."""

    taken_at: float  # wall clock
    thinwire: str  # the version that wrote it
    files: dict[str, Entry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """`ValueError` for anything that is not one of this format."""
        try:
            said: Any = json.loads(data)
        except RecursionError as error:
            raise ValueError("its list of files cannot be read") from error
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise ValueError(f"its list of files is not of format {FORMAT}")
        try:
            files = {
                str(name): Entry(int(e["size"]), str(e["sha256"]), int(e["mtime_ns"]))
                for name, e in said["files"].items()
            }
            taken_at = float(said["taken_at"])
            if not math.isfinite(taken_at) or any(not 0 <= entry.mtime_ns < 2**63 for entry in files.values()):
                raise ValueError("something in it is of no time")
            return cls(taken_at, str(said["thinwire"]), files)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError("its list of files cannot be read") from error


def put(tar: tarfile.TarFile, name: str, source: IO[bytes], entry_of: os.stat_result) -> Entry:
    """Add a file of which nothing changes any more; gives what the manifest says of it."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = entry_of.st_size, int(entry_of.st_mtime), 0o600
    counted = _Counted(source)
    tar.addfile(info, counted)
    return Entry(entry_of.st_size, counted.digest.hexdigest(), entry_of.st_mtime_ns)


def put_manifest(tar: tarfile.TarFile, manifest: Manifest) -> None:
    data = manifest.to_bytes()
    info = tarfile.TarInfo(MANIFEST)
    info.size, info.mtime, info.mode = len(data), int(manifest.taken_at), 0o600
    tar.addfile(info, io.BytesIO(data))


def take_out(file: IO[bytes], folder: Path) -> Manifest:
    """Lay a backup's files into an empty folder, durable; `ValueError` or `tarfile.TarError` when it is not whole."""
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
    """All regular files that are finished: what begins with a dot is still being written."""
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).parts
        if not any(part.startswith(".") for part in inner) and path.is_file() and not path.is_symlink():
            yield path


def fits(name: str) -> bool:
    """Whether a restore takes a file of that name out again; Thinwire makes no others that it needs."""
    return _NAME.fullmatch(name) is not None


class _Counted:
    """A file that is hashed as it is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self.digest = source, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


def _lay(source: IO[bytes], root: Path, name: str) -> tuple[int, str]:
    for parent in reversed(Path(name).parents):
        (root / parent).mkdir(mode=0o700, exist_ok=True)
    path, size, digest = root / name, 0, hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        while data := source.read(CHUNK):
            file.write(data)
            digest.update(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
