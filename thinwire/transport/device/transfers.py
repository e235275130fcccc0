"""Resumable transfers of a device: an assignment's parts down, a reply's parts up.

`Incoming` downloads. What arrived before a cut is kept, and a download is complete when the SHA-256 of each part fits.
In `downloads/`, `TAG` is what arrived so far and `TAG.XXXX` is what was delivered. The tag identifies the bytes, so a
new process continues the download.

`Outgoing` uploads a large reply: first its header, then each part from the offset that the aggregator has.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from thinwire.core.errors import ReplyUnreadable, Unreachable
from thinwire.core.part_file import PIECE_BYTES, DamagedPart, PartFile, damaged_part
from thinwire.core.protocol import read_json
from thinwire.core.statedir import disk_error, private_folder, require_room
from thinwire.core.types import Part, ReplyHeader
from thinwire.transport.device.http_client import (
    Connection,
    FileRange,
    HttpRequest,
    read_all,
    translate_disk_errors,
)
from thinwire.transport.protocol.http import PUSH, UPLOAD_OFFSET, ApiError, etag, pack

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
                with _disk(path):
                    os.replace(path, path.with_suffix(""))
        self._forget(KEPT)

    def take(self, parts: Sequence[Part], response: http.client.HTTPResponse) -> Path:
        """Read small parts that arrived with their assignment, and return their file."""
        path = self._delivered(parts)
        require_room(self._folder, sum(part.length for part in parts), self._min_free())
        try:
            _receive(PartFile(path, parts), response)
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
        self._forget(KEPT, but=path)
        require_room(self._folder, sum(part.length for part in parts) - self.size(parts), self._min_free())
        file = PartFile(path, parts)
        with _disk(path):
            file.check()
        if file.left:
            with get(file.size, etag(parts)) as response:
                if response.status != 206:
                    file.restart()
                _receive(file, response)
        whole = self._delivered(parts)
        with _disk(path):
            os.replace(path, whole)
        return whole

    def _delivered(self, parts: Sequence[Part]) -> Path:
        return self._folder / f"{_tag(parts)}.{secrets.token_hex(4)}"

    def _paths(self) -> list[Path]:
        """Return the files that are there, the newest first."""
        found = dict[Path, int]()
        with _disk(self._folder):
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # delivered and deleted meanwhile
                    found[path] = path.stat().st_mtime_ns
        return sorted(found, key=lambda path: -found[path])

    def _forget(self, kept: int, but: Path | None = None) -> None:
        """Remove the oldest partial files; a clock that was set back makes the newest look old."""
        for path in [path for path in self._paths() if not path.suffix and path != but][kept:]:
            with _disk(path):
                path.unlink(missing_ok=True)


def _receive(file: PartFile, response: http.client.HTTPResponse) -> None:
    """Append the bytes of a response until the last part is complete."""
    with _disk(file.path):
        opened = file.open(create=True)
    with opened:
        while left := file.left:
            data = response.read1(min(PIECE_BYTES, left))
            if not data:
                raise http.client.IncompleteRead(b"", left)
            try:
                with _disk(file.path):
                    file.append(opened, data)
            except DamagedPart as error:
                why = "it does not fit its digest"
                raise Unreachable(f"{error} of an assignment arrived damaged", why=why) from None


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Translate an `OSError` of the disk; outside of this block an `OSError` belongs to the network."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path) from error


def _tag(parts: Sequence[Part]) -> str:
    return etag(parts).strip('"')


MAX_FRUITLESS = 2  # attempts in a row without progress; after them the error is raised
DIGITS = re.compile("[0-9]{1,18}")  # of an offset; str.isdigit takes what int does not
MAX_ANSWER_BYTES = 2 * 2**20  # an offset for each of 65 536 parts


class Outgoing:
    """Uploads large replies over one connection.

    `pause` is called before a cut connection is dialled again.
    """

    def __init__(self, connection: Connection, pause: Callable[[], None]) -> None:
        self._connection, self._pause = connection, pause

    def send(self, header: ReplyHeader, header_bytes: bytes, bundle: Path) -> None:
        """Upload a reply, and return when the aggregator has committed it; raise the error of the last attempt.

        `header_bytes` is the encoded header, `bundle` the file with the parts.
        """
        offsets: list[int] = []  # of each part, as the aggregator reported last; empty: push the header first
        index, best, fruitless, cut = 0, -1, 0, False
        while True:
            try:
                if cut:
                    offsets, cut = self._stored_offsets(header, index, offsets), False
                if not offsets and not (offsets := self._push_header(header_bytes, header)):
                    return
                fruitless, best = (0, sum(offsets)) if sum(offsets) > best else (fruitless + 1, best)
                index = _open_part(header.parts, offsets)
                status = self._put(header, index, offsets[index], bundle)
                if status.get("done") is True:
                    return
                offsets[index] = _within(status.get("offset"), header.parts[index])
            except ApiError as refusal:
                if fruitless >= MAX_FRUITLESS or refusal.kind not in ("offset", "damaged", "offer"):
                    raise
                if refusal.kind == "damaged":
                    _require_sound(header, index, bundle)
                offsets = []
            except (OSError, http.client.HTTPException):
                if fruitless >= MAX_FRUITLESS or self._connection.closed:
                    raise
                fruitless, cut = fruitless + 1, bool(offsets)
                self._pause()

    def _push_header(self, header_bytes: bytes, header: ReplyHeader) -> list[int]:
        """Push the header, and return how many bytes of each part the aggregator has; [] if it committed the reply."""
        with self._connection.request(HttpRequest("POST", PUSH, pack(header_bytes))) as response:
            status = _read(response)
        if status.get("done") is True:
            return []
        offsets = status.get("offsets")
        if not isinstance(offsets, list) or len(offsets) != len(header.parts):
            raise Unreachable("the aggregator gives no offsets of this reply")
        return [_within(offset, part) for offset, part in zip(offsets, header.parts, strict=True)]

    def _put(self, header: ReplyHeader, index: int, offset: int, bundle: Path) -> dict[str, Any]:
        """Send the rest of one part."""
        part = header.parts[index]
        start = sum(earlier.length for earlier in header.parts[:index]) + offset
        rest = FileRange(bundle, start, part.length - offset, bytes.fromhex(part.sha256))
        with self._connection.request(
            HttpRequest("PUT", f"{_target(header, index)}?offset={offset}", rest)
        ) as response:
            return _read(response)

    def _stored_offsets(self, header: ReplyHeader, index: int, offsets: list[int]) -> list[int]:
        """Return the offsets after a cut; [] if the header must be pushed again."""
        try:
            with self._connection.request(HttpRequest("HEAD", _target(header, index))) as response:
                reported = response.headers.get(UPLOAD_OFFSET.decode(), "")
        except ApiError:
            return []
        offset = _within(int(reported) if DIGITS.fullmatch(reported) else reported[:80], header.parts[index])
        return [*offsets[:index], offset, *offsets[index + 1 :]]


def _within(offset: object, part: Part) -> int:
    if not isinstance(offset, int) or not 0 <= offset <= part.length:
        raise Unreachable("the aggregator says an offset that is not valid", why=f"{offset!r} of {part.length} bytes")
    return offset


def _open_part(parts: tuple[Part, ...], offsets: list[int]) -> int:
    """Return the index of the first incomplete part, else of the last part with bytes.

    An empty rest of that part completes the reply.
    """
    for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        if offset < part.length:
            return index
    return max(index for index, part in enumerate(parts) if part.length)


def _require_sound(header: ReplyHeader, index: int, bundle: Path) -> None:
    """Raise `ReplyUnreadable` if the part is damaged on this disk, because it would be sent for ever."""
    part = header.parts[index]
    with translate_disk_errors(bundle), open(bundle, "rb", buffering=0) as file:
        file.seek(sum(part.length for part in header.parts[:index]))
        if damaged_part(file, [part]) is not None:
            raise ReplyUnreadable(f"{bundle} is damaged on this disk", why=f"{part.name!r} does not fit its digest")


def _target(header: ReplyHeader, index: int) -> str:
    return f"/tw/v1/parts/{header.update_id.run}/{header.update_id.sequence}/{index}"


def _read(response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        status = read_json(read_all(response, MAX_ANSWER_BYTES), MAX_ANSWER_BYTES)
        return dict(status)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreachable("cannot read the aggregator's answer", why=str(error)) from error
