"""The route on which answers come in: a small one whole, of a large one its head, whose parts follow by themselves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from dataclasses import replace

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import ReplyLimits, Spool
from thinwire.core.home import private_opener
from thinwire.core.messages import FREE_HEADER_BYTES, reply_from_bytes
from thinwire.core.types import AGGREGATOR_KINDS, Failure, ReplyHead, UpdateId
from thinwire.flower.door.requests import Request
from thinwire.flower.lane.answers import Answers
from thinwire.flower.lane.sessions import Sessions
from thinwire.flower.lane.uploads import Uploads
from thinwire.flower.wire.framing import INLINE_BYTES, LENGTH
from thinwire.flower.wire.refusals import Refusal

AT_ONCE = 2  # headers larger than FREE_HEADER_BYTES that are parsed at one time, each of another device
DEFLATED_BYTES = 64  # that a block which does not shrink is longer than its JSON, for each 16 KiB of it


def push_bytes(header_bytes: int) -> int:
    """Return the length of the longest body of a push, of such a header as it is and all that goes inline behind it."""
    return LENGTH.size + header_bytes + DEFLATED_BYTES * (1 + header_bytes // 2**14) + INLINE_BYTES


class PushRoute:
    """`[head] parts..` in one request; or `[head]` alone, answered with how much of each part is here already."""

    def __init__(
        self, answers: Answers, uploads: Uploads, sessions: Sessions, spool: Spool, clock: Clock, limits: ReplyLimits
    ) -> None:
        self._answers, self._uploads, self._sessions = answers, uploads, sessions
        self._spool, self._clock, self._limits = spool, clock, limits
        self._storing: set[UpdateId] = set()
        self._parsing: set[str] = set()  # devices of which a large header is being parsed
        self._places = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, request: Request) -> None:
        device, began_at = request.row.name, self._clock.wall()
        with self._sessions.call(device):
            head, parts = await request.head(self._limits.max_header_bytes())
            reply = await self._read(device, head)
            self._answers.require_run(reply)
            if isinstance(reply, Failure):
                if parts:
                    raise Refusal(409, "protocol", "a failure has no parts")
                self._answers.failed(device, _of_a_device(reply), began_at)
                await request.answer(200)
                return
            await self._updated(request, reply, head, bytes(parts), began_at)

    async def _read(self, device: str, head: bytes) -> ReplyHead | Failure:
        """Parse a header: a small one here, between the requests of others; of large ones one of a device at a time."""
        most = self._limits.max_header_bytes()
        try:
            if len(head) <= FREE_HEADER_BYTES:
                return reply_from_bytes(head, FREE_HEADER_BYTES)
            if device in self._parsing:
                raise Refusal(503, "busy", "another reply of this device is being read", retry_after_s=1.0)
            self._parsing.add(device)
            try:
                async with self._places:
                    return await asyncio.to_thread(reply_from_bytes, head, most)
            finally:
                self._parsing.discard(device)
        except BadPayload as error:
            raise Refusal(409, "protocol", str(error)) from error

    async def _updated(self, request: Request, head: ReplyHead, received: bytes, parts: bytes, began_at: float) -> None:
        device = request.row.name
        self._answers.require_possible(device, head, began_at)
        if self._answers.here_already(device, head, began_at):
            await request.answer(200, b'{"done":true}')
            return
        if parts or not head.payload_bytes:
            await self._small(device, head, received, parts, began_at)
            await request.answer(200, b'{"done":true}')
            return
        offer = await self._uploads.offered(head, received, began_at)
        await request.answer(200, json.dumps({"offsets": offer.offsets()}).encode())

    async def _small(self, device: str, head: ReplyHead, received: bytes, parts: bytes, began_at: float) -> None:
        """One hop to a thread, one write, one commit."""
        if len(parts) != head.payload_bytes:
            raise Refusal(409, "protocol", "the body is not as long as its head says")
        at = 0
        for part in head.parts:
            if hashlib.sha256(parts[at : at + part.length]).hexdigest() != part.sha256:
                raise Refusal(409, "damaged", f"part {part.name!r} does not fit its digest")
            at += part.length
        update = head.update_id
        if update in self._storing:
            raise Refusal(503, "busy", "this update is being received already", retry_after_s=1.0)
        arriving = sum(other.device == device for other in self._storing)
        self._answers.require_room(device, arriving)
        self._storing.add(update)
        try:
            draft = self._spool.draft(update)
            await asyncio.to_thread(_write, str(draft), parts)
            await self._answers.keep(draft, head, received, began_at)
        finally:
            self._storing.discard(update)


def _of_a_device(failure: Failure) -> Failure:
    """Turn a kind that only the aggregator gives into "protocol": no device says that it left, or was revoked."""
    if failure.kind not in AGGREGATOR_KINDS:
        return failure
    said = f"it says {failure.kind!r}, which is not for a device to say: {failure.text}"
    return replace(failure, kind="protocol", text=said)


def _write(path: str, data: bytes) -> None:
    try:
        with open(path, "wb", buffering=0, opener=private_opener) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except BaseException:
        os.unlink(path)
        raise
