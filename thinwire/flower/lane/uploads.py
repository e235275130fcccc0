"""Answers that are too large for one request: their parts come one after the other, and go on where they were cut.

All parts of an answer lie in one file, each where it will be read from, and only bytes in their order are taken. After
this process was killed what the file holds is hashed before its size is believed: whole parts that do not fit their
digests are cut off. An answer that changed has another digest, and so another file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import DeviceRow, Spool
from thinwire.core.types import Part, ReplyHead, UpdateId
from thinwire.flower.door.account import Wire
from thinwire.flower.door.requests import Gone, Request
from thinwire.flower.lane.answers import Answers, shut_out
from thinwire.flower.lane.exchange import answer_digest
from thinwire.flower.lane.sessions import Sessions
from thinwire.flower.wire.framing import STREAM_BYTES
from thinwire.flower.wire.refusals import UPLOAD_OFFSET, Refusal
from thinwire.flower.wire.routes import Found

OFFERS = 8  # of one device at a time: one that was not gone on with makes room, and its file goes
RELEASE_S = 5.0  # how long a writer whose connection was ended may take to let go


@dataclass(eq=False)
class Offer:
    """An answer whose head is here, and the bytes it was read from. `size`: bytes of its parts that were written, in
    order.
    """

    head: ReplyHead
    path: Path
    began_at: float
    size: int
    writer: Wire | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    hashed: tuple[int, int, Any] = (0, 0, None)  # (part, bytes of it, their digest so far)
    received: bytes = b""

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where each part begins in the file, and behind the last one the end."""
        return list(itertools.accumulate((part.length for part in self.head.parts), initial=0))

    def offsets(self) -> list[int]:
        return [self.offset(index) for index in range(len(self.head.parts))]

    def offset(self, index: int) -> int:
        """How many bytes of a part are here."""
        return min(max(0, self.size - self.starts[index]), self.head.parts[index].length)


class Uploads:
    """One writer an answer: who asks for its offset, or writes anew, ends the connection that wrote before."""

    def __init__(self, answers: Answers, sessions: Sessions, spool: Spool, clock: Clock) -> None:
        self._answers, self._sessions, self._spool, self._clock = answers, sessions, spool, clock
        self._offers: dict[UpdateId, Offer] = {}
        self._opening: set[UpdateId] = set()

    async def offered(self, head: ReplyHead, received: bytes, began_at: float) -> Offer:
        """The offer of this answer, as far as it came; a new one where it never came."""
        update, digest = head.update_id, answer_digest(head).hex()
        offer = self._offers.get(update)
        if offer is not None and answer_digest(offer.head).hex() == digest:
            await self._release(offer)
            offer.head, offer.received = head, received
            return offer
        if offer is not None:
            await self._release(offer)
            self._give_up(update)
        own = [other for other in self._offers if other.device == update.device]
        self._answers.require_room(update.device, min(len(own), OFFERS))
        for oldest in [other for other in own if self._offers[other].writer is None][: max(0, len(own) + 1 - OFFERS)]:
            self._give_up(oldest)
        if update in self._opening:
            raise Refusal(503, "busy", "what came of this answer is being read already", retry_after_s=1.0)
        self._opening.add(update)
        try:
            path = await asyncio.to_thread(self._spool.partial, update, digest)
            size = await asyncio.to_thread(_cut_to_fit, path, head.parts)
        except FileNotFoundError:
            size = 0
        finally:
            self._opening.discard(update)
        if not self._answers.expects(update.device):  # it was shut out while the file was made
            path.unlink(missing_ok=True)
            raise shut_out(update.device)
        offer = self._offers[update] = Offer(head, path, began_at, size, received=received)
        return offer

    def room(self, row: DeviceRow, found: Found) -> int:
        """The most bytes that a request for a part may have. `Refusal` where none was offered."""
        offer, index = self._named(row.name, found)
        return offer.head.parts[index].length

    def shut_out(self, device: str) -> None:
        """End and forget what a device was sending."""
        for update in [update for update in self._offers if update.device == device]:
            if (writer := self._offers[update].writer) is not None:
                writer.abort()
            self._give_up(update)

    async def tell(self, request: Request) -> None:
        """HEAD: how much of a part is durable."""
        offer, index = self._named(request.row.name, request.admitted.found)
        with self._sessions.call(request.row.name):
            await self._release(offer)
            await asyncio.to_thread(_sync, offer.path)
        await request.answer(200, headers=[(UPLOAD_OFFSET, str(offer.offset(index)).encode())])

    async def take(self, request: Request) -> None:
        """PUT: the rest of a part."""
        offer, index = self._named(request.row.name, request.admitted.found)
        part = offer.head.parts[index]
        with self._sessions.call(request.row.name):
            await self._release(offer)
            at = request.admitted.found.query.get("offset", "0")
            offset = offer.offset(index)
            if at != str(offset) or offer.starts[index] > offer.size:
                raise Refusal(409, "offset", f"{offset} bytes of this part are here", offset=offset)
            if request.length > part.length - offset or request.claim.digest.hex() != part.sha256:
                raise Refusal(409, "protocol", "the request is not about the rest of this part")
            offer.writer = request.wire
            try:
                await self._write(request, offer, index)
            except FileNotFoundError:
                self._give_up(offer.head.update_id)
                raise Refusal(404, "offer", "what came of this answer was removed: push its head again") from None
            finally:
                offer.writer = None
                offer.released.set()
            done = offer.size == offer.head.payload_bytes
            if done:
                await self._whole(offer)
        said = f'{{"offset":{offer.offset(index)},"done":{str(done).lower()}}}'
        await request.answer(200, said.encode())

    async def _write(self, request: Request, offer: Offer, index: int) -> None:
        """One block is written while the next comes in; what came before a cut is kept."""
        descriptor = await asyncio.to_thread(self._opened, offer, index)
        writing: asyncio.Future[None] | None = None
        try:
            async for data in request.blocks(STREAM_BYTES):
                if writing is not None:
                    await writing
                writing = asyncio.ensure_future(asyncio.to_thread(_append, descriptor, offer, data))
        finally:
            if writing is not None:
                await asyncio.wait([writing])
            os.close(descriptor)
        if writing is not None:
            writing.result()
        if offer.head.update_id not in self._offers:
            raise Gone  # it was shut out meanwhile
        await self._judge(offer, index)

    def _opened(self, offer: Offer, index: int) -> int:
        """The file at its end, and the digest of what is there of the part."""
        descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(descriptor, offer.size)
        os.lseek(descriptor, offer.size, os.SEEK_SET)
        offset = offer.offset(index)
        if offer.hashed[:2] != (index, offset) or offer.hashed[2] is None:
            digest, at = hashlib.sha256(), offer.starts[index]
            while offset and (data := os.pread(descriptor, min(STREAM_BYTES, offset), at)):
                digest.update(data)
                at, offset = at + len(data), offset - len(data)
            offer.hashed = (index, offer.offset(index), digest)
        return descriptor

    async def _judge(self, offer: Offer, index: int) -> None:
        """A part that is complete fits its digest, or is begun anew: nothing of it is there after a kill either."""
        part = offer.head.parts[index]
        if offer.offset(index) < part.length or offer.hashed[2].hexdigest() == part.sha256:
            return
        offer.size, offer.hashed = offer.starts[index], (0, 0, None)
        await asyncio.to_thread(os.truncate, offer.path, offer.size)
        raise Refusal(409, "damaged", f"part {part.name!r} does not fit its digest", offset=0)

    async def _whole(self, offer: Offer) -> None:
        """Every part came; parts without bytes are checked here."""
        update = offer.head.update_id
        try:
            empty = hashlib.sha256().hexdigest()
            if any(not part.length and part.sha256 != empty for part in offer.head.parts):
                raise Refusal(409, "damaged", "a part without bytes does not fit its digest")
            if not self._answers.here_already(update.device, offer.head, offer.began_at):
                await self._answers.keep(offer.path, offer.head, offer.received, offer.began_at)
        except BadPayload as error:  # the disk holds something else than what was written
            self._give_up(update)
            raise Refusal(409, "damaged", str(error), offset=0) from error
        finally:
            self._offers.pop(update, None)

    def _give_up(self, update: UpdateId) -> None:
        """Forget an answer that was begun, and what came of it."""
        if (offer := self._offers.pop(update, None)) is not None:
            with contextlib.suppress(OSError):
                offer.path.unlink()

    async def _release(self, offer: Offer) -> None:
        """Nobody writes any more."""
        try:
            async with asyncio.timeout(RELEASE_S):
                while offer.writer is not None:  # of two that wait here the second one finds the first one writing
                    offer.released.clear()
                    offer.writer.abort()
                    await offer.released.wait()
        except TimeoutError:
            raise Refusal(409, "writer", "another connection is writing this answer") from None

    def _named(self, device: str, found: Found) -> tuple[Offer, int]:
        names = found.names
        offer = self._offers.get(UpdateId(names["run"], device, int(names["sequence"])))
        index = int(names["index"])
        if offer is None or index >= len(offer.head.parts):
            raise Refusal(404, "offer", "this answer was not offered: push its head first")
        return offer, index


def _cut_to_fit(path: Path, parts: Sequence[Part]) -> int:
    """Cut a file to whole parts that fit their digests and to what came of the next one, and give its size."""
    size = 0
    with open(path, "r+b", buffering=0) as file:
        for part in parts:
            digest, left = hashlib.sha256(), part.length
            while left and (data := file.read(min(STREAM_BYTES, left))):
                digest.update(data)
                left -= len(data)
            if left:
                size += part.length - left  # held to its digest when it is whole
                break
            if part.length and digest.hexdigest() != part.sha256:
                break
            size += part.length
        file.truncate(size)
    return size


def _append(descriptor: int, offer: Offer, data: bytes) -> None:
    """Write at the end; the size counts only what was written."""
    view, (index, count, digest) = memoryview(data), offer.hashed
    while view:
        written = os.write(descriptor, view)
        digest.update(view[:written])
        view, count = view[written:], count + written
        offer.size += written
        offer.hashed = (index, count, digest)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
