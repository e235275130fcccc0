"""The spool: replies on disk from their arrival until the aggregator acknowledges them.

An aggregated reply is acknowledged once its round is recorded. Replies are plain files. Invariant: a reply is durable
before it is visible.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from thinwire.core.errors import BadPayload, NotWritten, ReplyLost, ThinwireError
from thinwire.core.part_file import damaged_part
from thinwire.core.serialization import MAX_KEPT_BYTES, arrived_from_bytes, arrived_to_bytes, reply_to_bytes
from thinwire.core.statedir import disk_error, patiently, private_folder, sync_path
from thinwire.core.types import Arrived, ReplyHeader, UpdateId

DRAFT, PARTIAL = ".draft-", ".partial-"
REPLY = ".reply"
HEADER_LENGTH = struct.Struct("<Q")  # of the header, at the end of a file
UNREADABLE = ".unreadable"  # folder of replies that were set aside; no run has such a name, and backups skip it
MAX_PARTIAL_AGE_S = 3 * 86400.0  # since the last byte of an interrupted upload; an older one is deleted
FOLDERS_BETWEEN_CLEANUPS = 256  # new folders between two removals of empty ones: devices choose the names of runs

log = logging.getLogger("thinwire.spool")


class FileSpool:
    """Implements the spool `core.fleet.Spool` in a folder. Any thread may call it.

    One file holds a reply, `RUN/DEVICE-SEQUENCE.reply`: its parts, the header, and the length of the header. With two
    files a commit would sync three times instead of twice. Invariant: a file of this name is whole. The next
    start removes drafts that a crash left over. Interrupted uploads stay: they are resumed.

    An unreadable reply is set aside, and a warning is logged: one damaged file does not stop the aggregator. Without
    `durable` the spool serves this process alone: nothing is synced, and headers stay in memory.
    """

    def __init__(self, folder: Path, durable: bool = True) -> None:
        self.folder, self.durable = private_folder(folder), durable
        self._drafts = itertools.count()
        self._new_folders = 0  # since the empty ones were removed
        self._lock = threading.Condition()
        self._committing: set[UpdateId] = set()
        self._headers: dict[UpdateId, ReplyHeader] = {}  # update -> header, in the order of arrival
        self._latest = 0  # the time of the latest reply, in nanoseconds
        self._load()

    def path(self, update_id: UpdateId) -> Path:
        """Return the file that holds the update's parts, one after the other, and then its header."""
        return self.folder / update_id.run / f"{update_id.device}-{update_id.sequence}{REPLY}"

    def draft(self, update_id: UpdateId) -> Path:
        """Return a new, empty file for the parts, not visible yet; each call returns another one."""
        folder = self.path(update_id).parent
        draft = folder / f"{DRAFT}{update_id.device}-{update_id.sequence}-{next(self._drafts)}"
        while True:
            try:
                os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                return draft
            except FileNotFoundError:
                self._make_run_folder(folder)
            except OSError as error:
                raise disk_error(error, draft) from error

    def partial(self, update_id: UpdateId, digest: str) -> Path:
        """Return the file of an upload, with the bytes that came before an interruption, or empty.

        `digest` distinguishes two replies with one update id.
        """
        folder = self.path(update_id).parent
        path = folder / f"{PARTIAL}{update_id.device}-{update_id.sequence}-{digest[:32]}"
        try:
            if not folder.is_dir():
                self._make_run_folder(folder)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise disk_error(error, path) from error
        return path

    def drop_partial(self, device: str) -> None:
        """Remove all unfinished uploads of a device."""
        for path in self.folder.glob(f"*/{PARTIAL}*"):
            if path.name.removeprefix(PARTIAL).rsplit("-", 2)[0] == device:
                path.unlink(missing_ok=True)

    def drop_unused(self, run_id: str, but: Collection[Path] = ()) -> None:
        """Remove a run's unfinished uploads, except for the files `but`, and its replies that were set aside."""
        for path in [*(self.folder / run_id).glob(f"{PARTIAL}*"), *(self.folder / UNREADABLE / run_id).glob("*")]:
            if path not in but:
                path.unlink(missing_ok=True)

    def commit(self, draft: Path, header: ReplyHeader, received: bytes = b"") -> None:
        """Make a draft and its header durable, then visible. A second reply to the same update id is deleted.

        `received` are the bytes of the header as they arrived, which are stored unchanged. A header that came over no
        network is encoded here. A second commit of the same update waits for the first; commits of other updates do
        not.
        """
        with self._lock:
            self._lock.wait_for(lambda: header.update_id not in self._committing)
            if header.update_id in self._headers:
                draft.unlink(missing_ok=True)
                return
            self._committing.add(header.update_id)
        try:
            self._make_visible(draft, header, received)
            with self._lock:
                self._headers[header.update_id] = header
        finally:
            with self._lock:
                self._committing.discard(header.update_id)
                self._lock.notify_all()

    def _make_visible(self, draft: Path, header: ReplyHeader, received: bytes) -> None:
        path = self.path(header.update_id)
        data = arrived_to_bytes(header, received) if received else reply_to_bytes(header)
        try:
            _require_size(draft.stat().st_size, header)
            if self.durable:
                _add_header(draft, header, data)
                os.utime(draft, ns=(at := self._next_time(), at))
            os.replace(draft, path)
            if self.durable:
                sync_path(path.parent)
        except OSError as error:
            raise disk_error(error, path) from error

    def _next_time(self) -> int:
        """Return a time in nanoseconds that is later than that of each reply: a restart reads the order from it."""
        with self._lock:
            self._latest = max(time.time_ns(), self._latest + 1)
            return self._latest

    def header(self, update_id: UpdateId) -> ReplyHeader | None:
        """Return the header of a visible reply, or None."""
        with self._lock:
            return self._headers.get(update_id)

    def headers(self) -> Sequence[ReplyHeader]:
        """Return the headers of all visible replies, in the order of arrival."""
        with self._lock:
            return list(self._headers.values())

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        """Return the parts in order, one at a time in memory.

        Raise `ReplyLost` if the file does not match the header.
        """
        header = self.header(update_id)
        if header is None:
            raise ReplyLost(f"update {update_id} is not in the spool", why="its file is missing")
        return self._read_parts(self.path(update_id), header)

    def _read_parts(self, path: Path, header: ReplyHeader) -> Iterator[Arrived]:
        """Yield the parts of a reply; set the reply aside and raise `ReplyLost` if it is not readable."""
        try:
            yield from _parts(path, header)
        except ReplyLost as error:
            self._set_aside(path, str(error))
            with self._lock:
                self._headers.pop(header.update_id, None)
            raise

    def _set_aside(self, path: Path, why: str) -> None:
        """Move an unreadable reply to a free name in another folder, and log a warning."""
        folder = self.folder / UNREADABLE / path.parent.name
        with contextlib.suppress(OSError, ThinwireError):  # a full disk may refuse the move
            private_folder(folder)
            names = (f"{path.stem}{f'-{n}' * (n > 0)}{REPLY}" for n in itertools.count())
            os.replace(path, folder / next(name for name in names if not (folder / name).exists()))
        log.warning("a reply in the spool is not readable; it is set aside in %s: %s", folder, why)

    def delete(self, update_id: UpdateId) -> None:
        """Delete a reply if it exists."""
        with self._lock:
            self._headers.pop(update_id, None)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self.path(update_id).unlink()

    def _make_run_folder(self, folder: Path) -> None:
        """Create a run's folder durably; after FOLDERS_BETWEEN_CLEANUPS of them, remove the empty ones."""
        with self._lock:
            self._new_folders += 1
            if self._new_folders > FOLDERS_BETWEEN_CLEANUPS:
                self._new_folders = 0
                self._remove_empty()
        private_folder(folder)
        if self.durable:
            sync_path(self.folder)

    def _remove_empty(self) -> None:
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # the folder is not empty
                path.rmdir()

    def _load(self) -> None:
        """Read the headers at a start, oldest first, and remove files that an earlier process left unfinished."""
        found: list[tuple[int, ReplyHeader]] = []
        for path in sorted(self.folder.glob("*/*")):
            if path.parent.name == UNREADABLE:
                continue
            if path.name.startswith(PARTIAL):
                if time.time() - path.stat().st_mtime > MAX_PARTIAL_AGE_S:
                    path.unlink(missing_ok=True)
            elif path.name.startswith(".") or not self.durable:
                path.unlink(missing_ok=True)
            elif path.suffix == REPLY:
                try:
                    found.append((path.stat().st_mtime_ns, self._read_header(path)))
                except (OSError, BadPayload) as error:
                    self._set_aside(path, str(error))
        self._remove_empty()
        for at, header in sorted(found, key=lambda pair: pair[0]):
            self._headers[header.update_id], self._latest = header, at

    def _read_header(self, path: Path) -> ReplyHeader:
        """Return the header in a stored file; raise `BadPayload` if it is damaged, or the parts have another length."""
        with _open(path) as file:
            end = file.seek(0, os.SEEK_END) - HEADER_LENGTH.size
            length = HEADER_LENGTH.unpack(_read_at(file, end, HEADER_LENGTH.size))[0] if end >= 0 else 0
            if not 0 < length <= min(end, MAX_KEPT_BYTES):
                raise BadPayload(f"{path.name} has no header", why=f"one has at most {MAX_KEPT_BYTES} bytes")
            at = end - length
            header = arrived_from_bytes(_read_at(file, at, length))
        if not isinstance(header, ReplyHeader) or self.path(header.update_id) != path:
            raise BadPayload(f"{path.name} is not the reply of its update")
        _require_size(at, header)
        return header


def _require_size(size: int, header: ReplyHeader) -> None:
    if size != header.payload_bytes:
        raise BadPayload(f"{size} bytes came", why=f"the header says {header.payload_bytes}")


def _add_header(draft: Path, header: ReplyHeader, data: bytes) -> None:
    """Append the header to a draft, and make both durable. After an error the draft is as it was.

    Raise `BadPayload` if a part does not match its digest; the parts are read in pieces.
    """
    with draft.open("r+b") as file:
        if (part := damaged_part(file, header.parts)) is not None:
            raise BadPayload(f"part {part.name!r} does not fit its digest", why="it was damaged on this disk")
        file.seek(header.payload_bytes)
        try:
            file.write(data + HEADER_LENGTH.pack(len(data)))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(draft, header.payload_bytes)
            raise


def _parts(path: Path, header: ReplyHeader) -> Iterator[Arrived]:
    try:
        with _open(path) as file:
            at = 0
            for part in header.parts:
                data = map_file(file.fileno(), at, part.length) or _read_at(file, at, part.length)
                if len(data) != part.length:
                    raise ReplyLost(f"{path} is cut short", why=f"part {part.name} should have {part.length} bytes")
                at += part.length
                yield data
    except OSError as error:
        raise ReplyLost(f"cannot read {path}", why=error.strerror or str(error)) from error


NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # for now: they say nothing about the file


def _open(path: Path) -> BinaryIO:
    """Open a reply to read it; where the process has too many open files, wait as `ON_FULL_DISK` says and try again."""

    def opened() -> BinaryIO:
        try:
            return path.open("rb")
        except OSError as error:
            if error.errno not in NO_MORE_FILES:
                raise
            why, hint = error.strerror or str(error), "let the aggregator open more files: ulimit -n 65536"
            raise NotWritten(f"cannot open {path}", why, hint) from error

    return patiently(opened)


def _read_at(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    return file.read(length)


MADV_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: map all pages now, and fail if one is not readable
MIN_MAPPED_BYTES = 1 << 20  # read() of fewer bytes is faster than a mapping


def map_file(descriptor: int, at: int, length: int) -> memoryview | None:
    """Map `length` bytes of a file from `at` on into memory, for as long as the view exists.

    Return None if the caller must read the bytes instead. Bytes in the kernel's page cache are used in place and not
    copied.

    The file must never be truncated again. A process that touches a page behind the end of the file, or one that the
    disk cannot read, gets a signal and no exception. So this function requests all pages first. If that fails, the
    caller's `read` raises the reason.
    """
    if sys.platform != "linux" or length < MIN_MAPPED_BYTES or os.fstat(descriptor).st_size < at + length:
        return None
    start = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY  # a mapping begins at a page boundary
    try:
        pages = mmap.mmap(descriptor, at + length - start, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        pages.madvise(MADV_POPULATE_READ)
    except OSError:  # an older kernel, a file system without mappings, or a page that is not readable
        return None
    return memoryview(pages)[at - start :]
