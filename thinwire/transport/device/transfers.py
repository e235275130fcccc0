"""Resumable transfers of a device: an assignment's parts down, a reply's parts up.

`Incoming` downloads. What arrived before a cut is kept, and a download is complete when the SHA-256 of each part fits.
In `downloads/`, `TAG` is what arrived so far and `TAG.XXXX` is what was delivered. The tag identifies the bytes, so a
new process continues the download.

`Outgoing` uploads a large reply: first its header, then each part from the offset that the aggregator has.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from thinwire.core.errors import BadPayload, Unreachable
from thinwire.core.protocol import read_json
from thinwire.core.statedir import disk_error, private_folder, require_room
from thinwire.core.types import Part, ReplyHeader
from thinwire.transport.device.http_client import Connection, FileRange, HttpRequest, everything
from thinwire.transport.protocol.http import PUSH, STREAM_BYTES, UPLOAD_OFFSET, ApiError, etag, packed

PIECE_BYTES = 256 * 2**10
KEPT = 4  # partial downloads: assignments arrive one after the other, and old models are useless

Get = Callable[[int, str], AbstractContextManager[http.client.HTTPResponse]]  # called with the first byte and the tag


class Incoming:
    """The downloads of one device, used by one thread."""

    def __init__(self, folder: Path, min_free: Callable[[], int] = lambda: 0) -> None:
        """Prepare the folder; `min_free` gives how many bytes of the disk stay free.

        A download that would leave less is not begun.
        """
        self._folder, self._min_free = private_folder(folder), min_free
        for path in self._paths():
            if path.suffix:  # it was delivered to a process that has ended, and the assignment is given again
                os.replace(path, path.with_suffix(""))
        self._forget(KEPT)

    def take(self, parts: Sequence[Part], answer: http.client.HTTPResponse) -> Path:
        """Read small parts that arrived with their assignment, and return their file."""
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
        """Return how many bytes of these parts are on disk."""
        path = self._folder / _tag(parts)
        return path.stat().st_size if path.exists() else 0

    def fetch(self, parts: Sequence[Part], get: Get) -> Path:
        """Fetch all parts, continuing where the last attempt ended, and return their file.

        Bytes that arrive before a cut are kept. A part that does not fit its digest is fetched again from its start at
        the next attempt, and this one raises `Unreachable`.
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
    """A file to which parts are appended one after the other, each checked against its digest.

    `size` is how many bytes are accepted so far.
    """

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
        """Begin again with the first part."""
        self._index, self._of_part, self._digest, self.size = 0, 0, hashlib.sha256(), 0

    def check(self) -> None:
        """Accept what the file contains already, as far as the digests fit."""
        with _disk(self._path), contextlib.suppress(_Damaged):
            self._file.seek(0)
            while (left := self._left) and (data := self._file.read(min(PIECE_BYTES, left))):
                self._took(data)

    def take(self, answer: http.client.HTTPResponse) -> None:
        """Append the bytes of a response until the last part is complete."""
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
        """Return the missing bytes of the current part, skipping empty parts; 0 when all parts are complete."""
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
    """Raised when a complete part does not fit its digest. Only the parts before it are kept."""


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Translate an `OSError` of the disk; outside of this block an `OSError` belongs to the network."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def _tag(parts: Sequence[Part]) -> str:
    return etag(parts).strip('"')


FRUITLESS = 2  # attempts in a row without progress; then the caller decides when to try again
DIGITS = re.compile("[0-9]{1,18}")  # of an offset; str.isdigit takes what int does not
MAX_ANSWER_BYTES = 2 * 2**20  # an offset for each of 65 536 parts


class Outgoing:
    """Uploads large replies over one connection.

    `pause` is called before a cut connection is dialled again.
    """

    def __init__(self, connection: Connection, pause: Callable[[], None]) -> None:
        self._connection, self._pause = connection, pause

    def send(self, head: ReplyHeader, said: bytes, bundle: Path) -> None:
        """Upload a reply, and return when the aggregator has committed it; raise the error of the last attempt.

        `said` is the encoded header, `bundle` the file with the parts.
        """
        offsets: list[int] = []  # of each part, as the aggregator reported last; empty: push the header first
        index, best, fruitless, cut = 0, -1, 0, False
        while True:
            try:
                if cut:
                    offsets, cut = self._durable(head, index, offsets), False
                if not offsets and not (offsets := self._offered(said, head)):
                    return
                fruitless, best = (0, sum(offsets)) if sum(offsets) > best else (fruitless + 1, best)
                index = _open_part(head.parts, offsets)
                told = self._put(head, index, offsets[index], bundle)
                if told.get("done") is True:
                    return
                offsets[index] = _within(told.get("offset"), head.parts[index])
            except ApiError as refusal:
                if fruitless >= FRUITLESS or refusal.kind not in ("offset", "damaged", "offer"):
                    raise
                if refusal.kind == "damaged":
                    _require_sound(head, index, bundle)
                offsets = []
            except (OSError, http.client.HTTPException):
                if fruitless >= FRUITLESS or self._connection.closed:
                    raise
                fruitless += not cut  # without the next offset there is no progress yet
                cut = bool(offsets)
                self._pause()

    def _offered(self, said: bytes, head: ReplyHeader) -> list[int]:
        """Push the header, and return how many bytes of each part the aggregator has; [] if it committed the reply."""
        with self._connection.made(HttpRequest("POST", PUSH, packed(said))) as answer:
            told = _read(answer)
        if told.get("done") is True:
            return []
        offsets = told.get("offsets")
        if not isinstance(offsets, list) or len(offsets) != len(head.parts):
            raise Unreachable("the aggregator says no offsets of this answer")
        return [_within(offset, part) for offset, part in zip(offsets, head.parts, strict=True)]

    def _put(self, head: ReplyHeader, index: int, offset: int, bundle: Path) -> dict[str, Any]:
        """Send the rest of one part."""
        part = head.parts[index]
        start = sum(one.length for one in head.parts[:index]) + offset
        rest = FileRange(bundle, start, part.length - offset, bytes.fromhex(part.sha256))
        with self._connection.made(HttpRequest("PUT", f"{_target(head, index)}?offset={offset}", rest)) as answer:
            return _read(answer)

    def _durable(self, head: ReplyHeader, index: int, offsets: list[int]) -> list[int]:
        """Return the offsets after a cut; [] if the header must be pushed again."""
        try:
            with self._connection.made(HttpRequest("HEAD", _target(head, index))) as answer:
                said = answer.headers.get(UPLOAD_OFFSET.decode(), "")
        except ApiError:
            return []
        offset = _within(int(said) if DIGITS.fullmatch(said) else said[:80], head.parts[index])
        return [*offsets[:index], offset, *offsets[index + 1 :]]


def _within(offset: object, part: Part) -> int:
    if not isinstance(offset, int) or not 0 <= offset <= part.length:
        raise Unreachable("the aggregator says an offset that cannot be", why=f"{offset!r} of {part.length} bytes")
    return offset


def _open_part(parts: tuple[Part, ...], offsets: list[int]) -> int:
    """Return the index of the first incomplete part, else of the last part with bytes.

    An empty rest of that part completes the reply.
    """
    for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        if offset < part.length:
            return index
    return max(index for index, part in enumerate(parts) if part.length)


def _require_sound(head: ReplyHeader, index: int, bundle: Path) -> None:
    """Raise `BadPayload` if the part is damaged on this disk, because it would be sent for ever."""
    left, digest = head.parts[index].length, hashlib.sha256()
    with open(bundle, "rb", buffering=0) as file:
        file.seek(sum(part.length for part in head.parts[:index]))
        while left and (data := file.read(min(STREAM_BYTES, left))):
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() != head.parts[index].sha256:
        raise BadPayload(f"{bundle} is damaged on this disk", why=f"{head.parts[index].name!r} does not fit its digest")


def _target(head: ReplyHeader, index: int) -> str:
    return f"/tw/v1/parts/{head.update_id.run}/{head.update_id.sequence}/{index}"


def _read(answer: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        told = read_json(everything(answer, MAX_ANSWER_BYTES), MAX_ANSWER_BYTES)
        return dict(told)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreachable("cannot read the aggregator's answer", why=str(error)) from error
