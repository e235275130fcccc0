"""Stores the replies of devices in this process: `HeldSpool` keeps small ones in memory, and `spooled` checks files.

`spooled` checks each part of a file against its digest, as the device API does it.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Spool
from thinwire.core.part_file import damaged_part
from thinwire.core.statedir import private_opener
from thinwire.core.types import Arrived, ReplyHeader, Transfer, UpdateId
from thinwire.store import FileSpool

BLOCK = 1 << 20


def spooled(
    spool: Spool, reply: ReplyHeader, bundle: Path | bytes | None, transfer: Callable[[], Transfer]
) -> ReplyHeader:
    """Store a reply in the spool and return its header; check each part against its digest, as the device API does.

    `transfer` is called once the spool has all parts. Raise `BadPayload` for a part that does not match its digest, or
    that is missing. Of bytes that stay in memory only the length is checked, because this program has just hashed them.
    """
    if isinstance(spool, HeldSpool) and spool.has_room(reply):
        body = bundle.read_bytes() if isinstance(bundle, Path) else bundle or b""
        if isinstance(bundle, Path) and (part := damaged_part(io.BytesIO(body), reply.parts)) is not None:
            raise BadPayload(f"{part.name} is not what its digest says")
        if len(body) < reply.payload_bytes:
            raise BadPayload(f"an answer of {len(body)} bytes, whose parts have {reply.payload_bytes}")
        header = reply.arrived(transfer())
        spool.hold(header, body)
        return header
    draft = spool.draft(reply.update_id)
    try:
        with open(draft, "wb", opener=private_opener) as out:
            _copy(bundle, out, reply)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    header = reply.arrived(transfer())
    spool.commit(draft, header)
    return header


def _copy(bundle: Path | bytes | None, out: BinaryIO, header: ReplyHeader) -> None:
    """Copy the parts of a reply, and check each one against its digest."""
    if bundle is None:
        if header.parts:
            raise BadPayload("an answer whose parts are missing")
        return
    with bundle.open("rb") if isinstance(bundle, Path) else io.BytesIO(bundle) as source:
        for part in header.parts:
            digest, left = hashlib.sha256(), part.length
            while left and (block := source.read(min(left, BLOCK))):
                digest.update(block)
                out.write(block)
                left -= len(block)
            if left or digest.hexdigest() != part.sha256:
                raise BadPayload(f"{part.name} is not what its digest says")


HELD_BYTES = 64 << 20  # of frames that wait in memory for their aggregation


class HeldSpool(FileSpool):
    """Stores replies in memory up to `most_bytes` with `hold`, and as files like its base class.

    Replies in memory are opened, listed and deleted like all others.
    """

    def __init__(self, folder: Path, most_bytes: int = HELD_BYTES) -> None:
        super().__init__(folder, durable=False)
        self._most, self._bytes = most_bytes, 0
        self._bodies: dict[UpdateId, tuple[ReplyHeader, bytes]] = {}

    def has_room(self, header: ReplyHeader) -> bool:
        """Return True if there is room in memory for this reply."""
        return self._bytes + header.payload_bytes <= self._most

    def hold(self, header: ReplyHeader, body: bytes) -> None:
        """Keep a reply in memory, unless the spool already has a reply of this update."""
        if self.header(header.update_id) is None:  # only the first one counts
            self._bodies[header.update_id] = header, body
            self._bytes += len(body)

    def header(self, update_id: UpdateId) -> ReplyHeader | None:
        """Return the header of a reply; None if the spool does not have it."""
        held = self._bodies.get(update_id)
        return held[0] if held else super().header(update_id)

    def headers(self) -> Sequence[ReplyHeader]:
        return [*super().headers(), *(header for header, _ in self._bodies.values())]

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        if update_id in self._bodies:
            return _parts(*self._bodies[update_id])
        return super().open(update_id)

    def delete(self, update_id: UpdateId) -> None:
        if update_id in self._bodies:
            self._bytes -= len(self._bodies.pop(update_id)[1])
        else:
            super().delete(update_id)


def _parts(header: ReplyHeader, body: bytes) -> Iterator[Arrived]:
    at = 0
    for part in header.parts:
        yield memoryview(body)[at : at + part.length]
        at += part.length
