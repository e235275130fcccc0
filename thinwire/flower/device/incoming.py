"""A large ask's parts on their way to a device: kept where they were cut, and whole when all digests fit.

In `downloads/`, `TAG` is what came so far (the tag says which bytes they are, so a new process goes on with it), and
`TAG.XXXX` what was delivered.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from thinwire.core.errors import Unreachable
from thinwire.core.home import disk_error, private_folder, require_room
from thinwire.core.types import Part
from thinwire.flower.wire.framing import etag

PIECE_BYTES = 256 * 2**10
KEPT = 4  # beginnings of downloads: asks come one after the other, and a model of yesterday is of no use

Get = Callable[[int, str], AbstractContextManager[http.client.HTTPResponse]]  # (from which byte, of which tag)


class Incoming:
    """The downloads of one device. One thread calls it."""

    def __init__(self, folder: Path, min_free: Callable[[], int] = lambda: 0) -> None:
        """`min_free` gives how many bytes of the disk stay free: a download that would leave less is not begun."""
        self._folder, self._min_free = private_folder(folder), min_free
        for path in self._paths():
            if path.suffix:  # delivered to a process that has ended: the ask is given again
                os.replace(path, path.with_suffix(""))
        self._forget(KEPT)

    def take(self, parts: Sequence[Part], answer: http.client.HTTPResponse) -> Path:
        """Small parts that came with their ask."""
        path = self._delivered(parts)
        require_room(self._folder, sum(part.length for part in parts), self._min_free())
        try:
            with _Growing(path, parts) as growing:
                growing.take(answer)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def size(self, parts: Sequence[Part]) -> int:
        """How much is here."""
        path = self._folder / _tag(parts)
        return path.stat().st_size if path.exists() else 0

    def fetch(self, parts: Sequence[Part], get: Get) -> Path:
        """All of it, gone on with from where the last attempt ended; what comes before a cut is kept.

        A part that does not fit its digest is begun anew (`Unreachable`: at the next attempt).
        """
        path = self._folder / _tag(parts)
        self._forget(KEPT)
        require_room(self._folder, sum(part.length for part in parts) - self.size(parts), self._min_free())
        with _Growing(path, parts) as growing:
            growing.check()
            if growing.size < growing.length:
                with get(growing.size, etag(parts)) as answer:
                    if answer.status != 206:
                        growing.restart()
                    growing.take(answer)
        whole = self._delivered(parts)
        os.replace(path, whole)
        return whole

    def _delivered(self, parts: Sequence[Part]) -> Path:
        return self._folder / f"{_tag(parts)}.{secrets.token_hex(4)}"

    def _paths(self) -> list[Path]:
        return sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def _forget(self, kept: int) -> None:
        for path in [path for path in self._paths() if not path.suffix][kept:]:
            path.unlink()


class _Growing:
    """A file that parts are appended to, one after the other, each held to its digest. `size`: how far they fit."""

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self._path, self._parts = path, parts
        self.length = sum(part.length for part in parts)
        with _disk(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file: BinaryIO = open(os.open(path, flags, 0o600), "r+b", buffering=0)  # noqa: SIM115  # __exit__
        self.restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def restart(self) -> None:
        self._index, self._of_part, self._digest, self.size = 0, 0, hashlib.sha256(), 0

    def check(self) -> None:
        """Take what the file holds already, as far as it fits."""
        with _disk(self._path), contextlib.suppress(_Damaged):
            self._file.seek(0)
            while (left := self._left) and (data := self._file.read(min(PIECE_BYTES, left))):
                self._took(data)

    def take(self, answer: http.client.HTTPResponse) -> None:
        """Append what comes, until the last part is whole."""
        self._cut_back()
        while left := self._left:
            data = answer.read1(min(PIECE_BYTES, left))
            if not data:
                raise http.client.IncompleteRead(b"", left)
            with _disk(self._path):
                view = memoryview(data)
                while view:
                    view = view[self._file.write(view) :]
            try:
                self._took(data)
            except _Damaged as error:
                self._cut_back()
                raise Unreachable(f"{error} of an ask arrived damaged", why="it does not fit its digest") from None

    def _cut_back(self) -> None:
        with _disk(self._path):
            self._file.truncate(self.size)
            self._file.seek(self.size)

    @property
    def _left(self) -> int:
        """Of the part that is open, after the empty ones before it; 0 when all are whole."""
        while self._index < len(self._parts) and not self._parts[self._index].length:
            self._index += 1
        return self._parts[self._index].length - self._of_part if self._index < len(self._parts) else 0

    def _took(self, data: bytes) -> None:
        part = self._parts[self._index]
        self._digest.update(data)
        self._of_part, self.size = self._of_part + len(data), self.size + len(data)
        if self._of_part < part.length:
            return
        fits, self._digest, self._of_part = self._digest.hexdigest() == part.sha256, hashlib.sha256(), 0
        if not fits:
            self.size -= part.length
            raise _Damaged(f"part {part.name!r}")
        self._index += 1


class _Damaged(Exception):
    """A whole part does not fit its digest: the one before it is the last that is kept."""


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """OSError is the disk's in here, and the wire's elsewhere."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def _tag(parts: Sequence[Part]) -> str:
    return etag(parts).strip('"')
