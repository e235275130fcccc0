"""The routes by which a device pushes its replies.

`PushRoute` receives a small reply in one request. Of a large reply it receives the header alone, and `Uploads` receives
the parts one after the other, each continued where it was cut.
All parts of a reply lie in one file, each where it will be read from. Bytes are accepted only in their order. After
this process was killed, the file's bytes are hashed before its size is believed: whole parts that do not fit their
digests are cut off. A reply that changed has another digest, and so another file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import DeviceRow, ReplyLimits, Spool
from thinwire.core.part_file import DamagedPart, PartFile, damaged_part
from thinwire.core.protocol import reply_digest, same_reply
from thinwire.core.serialization import FREE_HEADER_BYTES, reply_from_bytes
from thinwire.core.statedir import private_opener, sync_path
from thinwire.core.types import AGGREGATOR_KINDS, Failure, Reply, ReplyHeader, UpdateId
from thinwire.transport.protocol.http import (
    INLINE_BYTES,
    LENGTH,
    STREAM_BYTES,
    UPLOAD_OFFSET,
    ApiError,
    RouteMatch,
    inflate,
    unblock,
)
from thinwire.transport.server.app import ConnectionClosed, Request
from thinwire.transport.server.assignments import MAX_BYTES, PullRoute, ReplyReceiver, revoke_access
from thinwire.transport.server.connections import Connection
from thinwire.transport.server.presence import Presence

_WAITS = re.compile(rb"(^|[,; ])wait=\d+")  # of Prefer
MAX_PARSED_AT_ONCE = 2  # headers larger than FREE_HEADER_BYTES, each of another device
DEFLATED_BYTES = 64  # growth of an incompressible block, for each 16 KiB of its JSON


def push_bytes(header_bytes: int) -> int:
    """Return the length of the longest body of a push: a header of `header_bytes`, and inline parts behind it."""
    return LENGTH.size + header_bytes + DEFLATED_BYTES * (1 + header_bytes // 2**14) + INLINE_BYTES


class PushRoute:
    """Serves pushes: `[header] parts..` in one request, or `[header]` alone.

    A header alone is answered with how many bytes of each part are here already. A message of a phase of secure
    aggregation may have the JSON of a pull behind it and `Prefer: wait=SECONDS` (RFC 7240): then the response is that
    of the pull.
    """

    def __init__(
        self,
        reply_receiver: ReplyReceiver,
        uploads: Uploads,
        presence: Presence,
        spool: Spool,
        clock: Clock,
        limits: ReplyLimits,
        pull: PullRoute,
    ) -> None:
        self._reply_receiver, self._uploads, self._presence, self._pull = reply_receiver, uploads, presence, pull
        self._spool, self._clock, self._limits = spool, clock, limits
        self._storing: set[UpdateId] = set()
        self._parsing: set[str] = set()  # devices whose large header is being parsed
        self._parse_slots = asyncio.Semaphore(MAX_PARSED_AT_ONCE)

    async def __call__(self, request: Request) -> None:
        """Serve a push."""
        device, began_at = request.row.name, self._clock.wall()
        with self._presence.call(device):
            header, parts = await request.header(self._limits.max_header_bytes())
            reply = await self._read(device, header)
            self._reply_receiver.require_run(reply)
            if isinstance(reply, ReplyHeader):
                await self._receive_update(request, reply, header, bytes(parts), began_at)
                return
            pulls = _pull_behind(request, parts)
            if isinstance(reply, Failure):
                self._reply_receiver.receive_failure(device, _of_a_device(reply), began_at)
            else:
                self._reply_receiver.receive_message(device, reply)
            if pulls is None:
                await request.answer(200)
                return
        await self._pull.serve(request, pulls)  # not in the call above: a device that waits is no sign of life

    async def _read(self, device: str, header: bytes) -> Reply:
        """Parse a header: a small one here, a large one in a thread, one of each device at a time."""
        most = self._limits.max_header_bytes()
        try:
            if len(header) <= FREE_HEADER_BYTES:
                return reply_from_bytes(header, FREE_HEADER_BYTES)
            if device in self._parsing:
                raise ApiError(503, "busy", "another reply of this device is being read", retry_after_s=1.0)
            self._parsing.add(device)
            try:
                async with self._parse_slots:
                    return await asyncio.to_thread(reply_from_bytes, header, most)
            finally:
                self._parsing.discard(device)
        except BadPayload as error:
            raise ApiError(409, "protocol", str(error)) from error

    async def _receive_update(
        self, request: Request, header: ReplyHeader, received: bytes, parts: bytes, began_at: float
    ) -> None:
        device = request.row.name
        self._reply_receiver.require_possible(device, header, began_at)
        if self._reply_receiver.is_duplicate(device, header, began_at):
            await request.answer(200, b'{"done":true}')
            return
        if parts or not header.payload_bytes:
            await self._receive_small(device, header, received, parts, began_at)
            await request.answer(200, b'{"done":true}')
            return
        upload = await self._uploads.open_upload(header, received, began_at)
        await request.answer(200, json.dumps({"offsets": upload.offsets()}).encode())

    async def _receive_small(
        self, device: str, header: ReplyHeader, received: bytes, parts: bytes, began_at: float
    ) -> None:
        """Store a reply that came in one request, with one thread hop, one write and one commit."""
        if len(parts) != header.payload_bytes:
            raise ApiError(409, "protocol", "the body is not as long as its header says")
        if (part := damaged_part(io.BytesIO(parts), header.parts)) is not None:
            raise ApiError(409, "damaged", f"part {part.name!r} does not fit its digest")
        update = header.update_id
        if update in self._storing:
            raise ApiError(503, "busy", "this update is being received already", retry_after_s=1.0)
        arriving = sum(other.device == device for other in self._storing)
        self._reply_receiver.require_room(device, arriving)
        self._storing.add(update)
        try:
            draft = self._spool.draft(update)
            await asyncio.to_thread(_write, str(draft), parts)
            try:
                await self._reply_receiver.keep(draft, header, received, began_at)
            except BaseException:
                draft.unlink(missing_ok=True)  # each try makes another one
                raise
        finally:
            self._storing.discard(update)


def _pull_behind(request: Request, rest: memoryview) -> bytes | None:
    """Return the JSON of the pull behind a message; None if the device does not wait for an assignment."""
    if not rest:
        return None
    if not _WAITS.search(request.headers.get(b"prefer", b"")):
        raise ApiError(409, "protocol", "only an update has parts")
    try:
        data, more = unblock(bytes(rest))
        if more:
            raise ValueError("more follows behind the pull")
        return inflate(data, MAX_BYTES)
    except ValueError as error:
        raise ApiError(409, "protocol", str(error)) from error


def _of_a_device(failure: Failure) -> Failure:
    """Return the failure, with kind "protocol" if only the aggregator may use its kind.

    No device may report that it left or was revoked.
    """
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


MAX_OPEN_UPLOADS = 8  # uploads of one device at a time: an idle one makes room, and its file is deleted
RELEASE_S = 5.0  # how long an aborted writer may take to release the upload


@dataclass(eq=False)
class Upload:
    """An upload: a reply whose header is here, and whose parts arrive in `file`.

    `received` are the header's bytes as they came. `writer` is the connection that writes a part at this moment,
    or whose reply is being committed: a second writer would cut off the header that the commit appends.
    """

    header: ReplyHeader
    file: PartFile
    began_at: float
    writer: Connection | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    received: bytes = b""

    def offsets(self) -> list[int]:
        """Return how many bytes of each part are here."""
        return [self.file.offset(index) for index in range(len(self.header.parts))]


class Uploads:
    """The uploads of all devices, with one writer each.

    A request for an upload's offset, or a new writer, aborts the connection that wrote before.
    """

    def __init__(self, reply_receiver: ReplyReceiver, presence: Presence, spool: Spool, clock: Clock) -> None:
        self._reply_receiver, self._presence, self._spool, self._clock = reply_receiver, presence, spool, clock
        self._open_uploads: dict[UpdateId, Upload] = {}
        self._opening: set[UpdateId] = set()

    async def open_upload(self, header: ReplyHeader, received: bytes, began_at: float) -> Upload:
        """Return the upload of this reply, as far as it arrived, or a new one.

        The oldest idle uploads of the device make room for it. A changed reply under the same id replaces the earlier
        one.
        """
        update, digest = header.update_id, reply_digest(header)
        upload = self._open_uploads.get(update)
        if upload is not None and same_reply(digest, upload.header):
            await self._release(upload)
            upload.header, upload.received = header, received
            return upload
        if upload is not None:
            await self._release(upload)
            self._give_up(update)
        own = [other for other in self._open_uploads if other.device == update.device]
        self._reply_receiver.require_room(update.device, min(len(own), MAX_OPEN_UPLOADS))
        idle = [other for other in own if self._open_uploads[other].writer is None]
        for oldest in idle[: max(0, len(own) + 1 - MAX_OPEN_UPLOADS)]:
            self._give_up(oldest)
        if update in self._opening:
            raise ApiError(503, "busy", "what came of this reply is being read already", retry_after_s=1.0)
        self._opening.add(update)
        try:
            file = PartFile(await asyncio.to_thread(self._spool.partial, update, digest.hex()), header.parts)
            await asyncio.to_thread(file.check)
        finally:
            self._opening.discard(update)
        if not self._reply_receiver.expects(update.device):  # the device was revoked while the file was made
            file.path.unlink(missing_ok=True)
            raise revoke_access(update.device)
        upload = self._open_uploads[update] = Upload(header, file, began_at, received=received)
        return upload

    def max_body_bytes(self, row: DeviceRow, found: RouteMatch) -> int:
        """Return the length in bytes of the part that a request names; raise `ApiError` 404 without an open upload."""
        upload, index = self._named(row.name, found)
        return upload.header.parts[index].length

    def revoke_access(self, device: str) -> None:
        """Abort and delete the uploads of a revoked device."""
        for update in [update for update in self._open_uploads if update.device == device]:
            if (writer := self._open_uploads[update].writer) is not None:
                writer.abort()
            self._give_up(update)

    def end(self, run_id: str) -> set[Path]:
        """Abort and delete the unfinished uploads of a run; return the files of those that are being committed."""
        mine = [update for update in self._open_uploads if update.run == run_id]
        whole = {
            one for one in mine if self._open_uploads[one].file.size == self._open_uploads[one].header.payload_bytes
        }
        for update in set(mine) - whole:
            if (writer := self._open_uploads[update].writer) is not None:
                writer.abort()
            self._give_up(update)
        return {self._open_uploads[update].file.path for update in whole}

    async def send_offset(self, request: Request) -> None:
        """Serve HEAD: respond with how many bytes of a part are durable."""
        upload, index = self._named(request.row.name, request.admitted.found)
        with self._presence.call(request.row.name):
            await self._release(upload)
            await asyncio.to_thread(sync_path, upload.file.path)
        await request.answer(200, headers=[(UPLOAD_OFFSET, str(upload.file.offset(index)).encode())])

    async def receive_part(self, request: Request) -> None:
        """Serve PUT: receive the rest of a part, and commit the reply after its last byte."""
        upload, index = self._named(request.row.name, request.admitted.found)
        part = upload.header.parts[index]
        with self._presence.call(request.row.name):
            await self._release(upload)
            at = request.admitted.found.query.get("offset", "0")
            offset = upload.file.offset(index)
            if at != str(offset) or upload.file.starts[index] > upload.file.size:
                raise ApiError(409, "offset", f"{offset} bytes of this part are here", offset=offset)
            if request.length > part.length - offset or request.claim.digest.hex() != part.sha256:
                raise ApiError(409, "protocol", "the request is not about the rest of this part")
            upload.writer = request.wire
            try:
                await self._write(request, upload)
                if done := upload.file.size == upload.header.payload_bytes:
                    await self._whole(upload)
            except FileNotFoundError:
                self._give_up(upload.header.update_id)
                raise ApiError(404, "offer", "what came of this reply was removed: push its header again") from None
            finally:
                upload.writer = None
                upload.released.set()
        said = f'{{"offset":{upload.file.offset(index)},"done":{str(done).lower()}}}'
        await request.answer(200, said.encode())

    async def _write(self, request: Request, upload: Upload) -> None:
        """Write one block while the next one arrives; bytes before a cut are kept.

        Raises `ApiError` 409 if a complete part does not fit its digest: it begins again.
        """
        writing: asyncio.Future[None] | None = None
        try:
            with await asyncio.to_thread(upload.file.open) as file:
                try:
                    async for data in request.blocks(STREAM_BYTES):
                        if writing is not None:
                            await writing
                        writing = asyncio.ensure_future(asyncio.to_thread(upload.file.append, file, data))
                finally:
                    if writing is not None:
                        await asyncio.wait([writing])
            if writing is not None:
                writing.result()
        except DamagedPart as error:
            raise ApiError(409, "damaged", f"{error} does not fit its digest", offset=0) from None
        if upload.header.update_id not in self._open_uploads:
            raise ConnectionClosed  # the device was revoked meanwhile

    async def _whole(self, upload: Upload) -> None:
        """Commit a reply whose parts are complete, after checking its empty parts."""
        update = upload.header.update_id
        try:
            empty = hashlib.sha256().hexdigest()
            if any(not part.length and part.sha256 != empty for part in upload.header.parts):
                raise ApiError(409, "damaged", "a part without bytes does not fit its digest")
            if not self._reply_receiver.is_duplicate(update.device, upload.header, upload.began_at):
                await self._reply_receiver.keep(upload.file.path, upload.header, upload.received, upload.began_at)
        except BadPayload as error:  # the disk returned other bytes than were written
            self._give_up(update)
            raise ApiError(409, "damaged", str(error), offset=0) from error
        finally:
            self._open_uploads.pop(update, None)

    def _give_up(self, update: UpdateId) -> None:
        """Forget an upload, and delete its file."""
        if (upload := self._open_uploads.pop(update, None)) is not None:
            with contextlib.suppress(OSError):
                upload.file.path.unlink()

    async def _release(self, upload: Upload) -> None:
        """Abort the upload's writer, and wait until it released the upload; raise `ApiError` 404 if that ended it."""
        try:
            async with asyncio.timeout(RELEASE_S):
                while upload.writer is not None:  # when two wait here, the second one finds the first one writing
                    upload.released.clear()
                    upload.writer.abort()
                    await upload.released.wait()
        except TimeoutError:
            raise ApiError(409, "writer", "another connection is writing this reply") from None
        if self._open_uploads.get(upload.header.update_id) is not upload:  # it was committed, or given up
            raise ApiError(404, "offer", "this upload has ended: push its header again")

    def _named(self, device: str, found: RouteMatch) -> tuple[Upload, int]:
        names = found.names
        upload = self._open_uploads.get(UpdateId(names["run"], device, int(names["sequence"])))
        index = int(names["index"])
        if upload is None or index >= len(upload.header.parts):
            raise ApiError(404, "offer", "this reply was not offered: push its header first")
        return upload, index
