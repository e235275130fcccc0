"""The routes by which a device receives assignments, and the receiver of its replies.

`PullRoute` waits until there is an assignment for the device, or the wait is over. `BundleRoute` serves the parts of a
large assignment from the byte at which the last attempt ended. `ReplyReceiver` checks arriving replies against their
limits, makes them durable and reports each once.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import ReplyLimits, Spool
from thinwire.core.link_state import Outstanding
from thinwire.core.protocol import read_json, same_reply
from thinwire.core.types import Failure, PhaseReply, Reply, ReplyHeader, Transfer
from thinwire.transport.protocol.http import INLINE_BYTES, RUN, ApiError, block, etag, pack
from thinwire.transport.server.app import ConnectionClosed, Request
from thinwire.transport.server.auth import RequestAuthenticator
from thinwire.transport.server.mailbox import Mailbox
from thinwire.transport.server.presence import DeviceConnection, Presence

MAX_BYTES = 64 * 2**10  # of a pull's JSON: the ids of assignments in flight
PIECE_BYTES = 2**18  # read and sent in one step: a cancelled download ends after the piece in transit
WAIT_JITTER = 1.1  # a device varies the wait of a pull by up to a tenth


@dataclass(frozen=True)
class PullRequest:
    """A pull: the process, the seconds that it waits, and the ids of the assignments in flight on the device.

    The aggregator delivers an assignment that is not in flight. So an assignment whose response was lost is delivered
    again.
    """

    process: str
    wait_s: float
    in_flight: frozenset[str]

    @classmethod
    def read(cls, data: bytes) -> PullRequest:
        """Parse a pull's JSON; raise `ApiError` 409 if it is invalid."""
        try:
            raw = read_json(data, MAX_BYTES)
            wait_s = float(raw["wait_s"])
            if math.isnan(wait_s):
                raise ValueError("it waits for NaN seconds")
            return cls(str(raw["process"]), wait_s, frozenset(str(each) for each in raw["in_flight"]))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ApiError(409, "protocol", f"cannot read the pull: {error}") from error


class PullRoute:
    """Serves pulls. A waiting pull costs one timer and one event, and no work while nothing happens.

    While `closing` is True, pulls are refused.
    """

    def __init__(self, authenticator: RequestAuthenticator, mailbox: Mailbox, presence: Presence, clock: Clock) -> None:
        self._authenticator, self._mailbox, self._presence = authenticator, mailbox, presence
        self._clock, self._most_s = clock, presence.poll_s * WAIT_JITTER
        self.closing = False

    async def __call__(self, request: Request) -> None:
        """Serve a pull."""
        await self.serve(request, (await request.header(MAX_BYTES))[0])

    async def serve(self, request: Request, data: bytes) -> None:
        """Serve a pull whose JSON is `data`, also one that came behind a message of a phase."""
        row, pull = request.row, PullRequest.read(data)
        connection = self._presence.of(row.name)
        if connection is None or connection.must_register or connection.hello.process != pull.process:
            raise ApiError(401, "hello", "this process has not said hello here")
        self._presence.listen(connection, request.wire)
        connection.pull_epoch += 1
        self._mailbox.record_in_flight(connection.device, pull.in_flight, self._clock.wall())
        with self._presence.call(row.name, waits=True):
            outstanding, withdrawn = await self._wait(request, connection, min(max(pull.wait_s, 0.0), self._most_s))
            if self._authenticator.still(row).name != connection.device:
                raise ApiError(401, "hello", "this device was renamed: say hello again")
            await self._answer(request, connection, outstanding, withdrawn)

    async def _wait(
        self, request: Request, connection: DeviceConnection, wait_s: float
    ) -> tuple[Outstanding | None, list[str]]:
        """Wait for an assignment or a withdrawal, and return both.

        A newer pull of the same process ends this wait.
        """
        loop, pull_epoch = asyncio.get_running_loop(), connection.pull_epoch
        until = loop.time() + wait_s
        while True:
            if self.closing:
                raise ApiError(503, "closing", "the aggregator is closing", retry_after_s=1.0)
            if not request.wire.open:
                raise ConnectionClosed
            if connection.pull_epoch != pull_epoch:
                return None, []
            outstanding = self._mailbox.next_for(connection.device, self._clock.wall())
            withdrawn = self._mailbox.withdrawn(connection.device)
            if outstanding or withdrawn or loop.time() >= until:
                return outstanding, withdrawn
            connection.woken.clear()
            timer = loop.call_at(until, connection.woken.set)
            try:
                await connection.woken.wait()
            finally:
                timer.cancel()

    async def _answer(
        self, request: Request, connection: DeviceConnection, outstanding: Outstanding | None, withdrawn: list[str]
    ) -> None:
        said = json.dumps({"cancelled": withdrawn}).encode() if withdrawn else b"{}"
        control = pack(said)
        if outstanding is None or not self._has_parts(connection.device, outstanding):
            await request.answer(200, control + block(b""))
            return
        assignment, bundle = outstanding.spoken(connection.protocol), outstanding.envelope.bundle
        headers = control + pack(assignment)
        length = outstanding.length if outstanding.length <= INLINE_BYTES else 0  # the device fetches larger ones
        self._mailbox.mark_delivered(outstanding, self._clock.wall())
        await request.begin(200, [(b"content-length", str(len(headers) + length).encode())])
        await request.write(headers, more=bool(length))
        if length and bundle is not None:
            async for data, more in read(bundle, 0, length):
                await request.write(data, more)

    def _has_parts(self, device: str, outstanding: Outstanding) -> bool:
        """Return True if the assignment's parts are still on disk; otherwise fail the assignment."""
        bundle = outstanding.envelope.bundle
        if not outstanding.length or (bundle and bundle.exists() and bundle.stat().st_size == outstanding.length):
            return True
        assignment_id = outstanding.envelope.assignment.assignment_id
        self._mailbox.receive(
            device, Failure("disk", "the aggregator lost the model of this assignment", assignment_id, device)
        )
        return False


_FROM = re.compile(rb"bytes=(\d{1,18})-")


class BundleRoute:
    """Serves an assignment's parts from any byte to the end, with Range and If-Range of RFC 9110, section 14."""

    def __init__(self, mailbox: Mailbox, presence: Presence) -> None:
        self._mailbox, self._presence = mailbox, presence

    async def __call__(self, request: Request) -> None:
        """Serve the parts from the requested byte."""
        outstanding = self._mailbox.outstanding(request.row.name, request.names["assignment"])
        bundle = outstanding.envelope.bundle if outstanding else None
        if outstanding is None or bundle is None or not outstanding.length:
            raise ApiError(404, "assignment", "this assignment is answered, withdrawn, or nobody's")
        tag, length = etag(outstanding.envelope.assignment.parts), outstanding.length
        start = _start(request.headers, tag)
        if start > length:
            raise ApiError(409, "offset", f"there are {length} bytes", offset=length)
        headers = [(b"content-length", str(length - start).encode()), (b"etag", tag.encode())]
        if start:
            headers.append((b"content-range", f"bytes {start}-{length - 1}/{length}".encode()))
        with self._presence.call(request.row.name):
            await request.begin(206 if start else 200, headers)
            if start == length:
                await request.write(b"", more=False)
            async for data, more in read(bundle, start, length):
                if self._mailbox.outstanding(request.row.name, request.names["assignment"]) is None:
                    request.wire.abort()  # withdrawn meanwhile: the device does not need the buffered bytes either
                    raise ConnectionClosed
                await request.write(data, more)


def _start(headers: dict[bytes, bytes], tag: str) -> int:
    """Return the first byte to send: the requested one if the tag names this very bundle, else 0."""
    range_match = _FROM.fullmatch(headers.get(b"range", b""))
    condition = headers.get(b"if-range", tag.encode())
    return int(range_match[1]) if range_match and condition == tag.encode() else 0


async def read(path: Path, start: int, length: int) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield (bytes, more) of a file from `start` to `length`; `more` is False for the last piece.

    The next piece is read while this one is sent. Raises OSError if the file is too short.
    """
    left = length - start
    with await asyncio.to_thread(open, path, "rb", 0) as file:
        file.seek(start)
        ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(PIECE_BYTES, left)))
        try:
            while left:
                data = await ahead
                if not data:
                    raise OSError(f"{path} is shorter than its assignment says")
                left -= len(data)
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(PIECE_BYTES, left)))
                yield data, left > 0
        finally:
            await asyncio.wait([ahead])


RUN_ID = re.compile(RUN)  # a run's id names a folder of the spool
MAX_TEXT = 2000
MAX_MESSAGES = 4  # of phases, of one device, in memory until the next poll
MAX_SPOOLED_REPLIES = 64  # replies of one device in the spool: a round has one, and possibly a late one


class ReplyReceiver:
    """Stores each reply exactly once: a repeated reply gets the same response as the first one.

    In all methods `began_at` is the wall clock at which the reply began to arrive.
    """

    def __init__(self, mailbox: Mailbox, presence: Presence, spool: Spool, clock: Clock, limits: ReplyLimits) -> None:
        self._mailbox, self._presence, self._spool = mailbox, presence, spool
        self._clock, self._limits = clock, limits

    def receive_failure(self, device: str, failure: Failure, began_at: float) -> None:
        """Queue a failure that a device reported, with bounded texts and the transfer's byte counts."""
        text, transfer = failure.text[:MAX_TEXT], self._transfer(device, failure.assignment_id, began_at)
        self._mailbox.receive(
            device, Failure(failure.kind[:64], text, failure.assignment_id, device, transfer=transfer)
        )

    def receive_message(self, device: str, reply: PhaseReply) -> None:
        """Queue a device's message of a phase of secure aggregation; its bytes are counted with the next update.

        Raise `ApiError` 503 if several of the device's messages are still in memory: a round has one at a time.
        """
        if self._mailbox.unread_messages(device) >= MAX_MESSAGES:
            text = f"{MAX_MESSAGES} messages of {device} are not read yet"
            raise ApiError(503, "busy", text, retry_after_s=1.0)
        self._mailbox.receive(device, replace(reply, device=device))

    def require_run(self, reply: Reply) -> None:
        """Raise `ApiError` 409 for a reply to an assignment of no run here.

        A run of another aggregator may have the same id.
        """
        identity = self._limits.of(reply.assignment_id).identity
        if identity is None or identity not in ("", reply.identity):
            raise ApiError(
                409,
                "run",
                f"{reply.assignment_id[:80]!r} is an assignment of another run, of identity {reply.identity[:80]!r}",
            )

    def require_possible(self, device: str, header: ReplyHeader, began_at: float) -> None:
        """Raise `ApiError` for a reply in another device's name, of an impossible run, or beyond its limits."""
        update, length = header.update_id, header.payload_bytes
        if update.device != device:
            raise ApiError(403, "device", f"{device} cannot reply for {update.device[:80]!r}")
        if not RUN_ID.fullmatch(update.run) or update.sequence < 0:
            raise ApiError(409, "protocol", "no run can have this name")
        limit = self._limits.of(header.assignment_id)
        for count, most, what in (
            (length, limit.payload_bytes, "bytes"),
            (len(header.parts), limit.parts, "parts"),
            (len(header.counters), limit.counters, "counters"),
        ):
            if count <= most:
                continue
            text = f"a reply of {count} {what}, at most {most} are accepted"
            self.receive_failure(device, Failure("protocol", text, header.assignment_id), began_at)
            raise ApiError(413, "too-large", text)

    def is_duplicate(self, device: str, header: ReplyHeader, began_at: float) -> bool:
        """Return True if the same reply arrived before.

        Raise `ApiError` 409 if another reply arrived with its id: then the device has lost its state.
        """
        known = self._mailbox.known_digest(header.update_id)
        if known is None:
            return False
        if not same_reply(known, header):
            text = f"update {header.update_id} came before with other contents"
            self.receive_failure(device, Failure("state-lost", text, header.assignment_id), began_at)
            raise ApiError(409, "state-lost", text)
        outstanding = self._mailbox.outstanding(device, header.assignment_id) is not None
        if outstanding and self._spool.header(header.update_id) is None:
            return False  # it came before the run was restored, to no assignment of its own: now it has one
        self._mailbox.remove_answered(device, header.assignment_id)
        return True

    def require_room(self, device: str, arriving: int) -> None:
        """Raise `ApiError` 503 if too many replies of the device wait for aggregation, `arriving` ones included."""
        if self._mailbox.waiting(device) + arriving >= MAX_SPOOLED_REPLIES:
            raise ApiError(
                503, "busy", f"{MAX_SPOOLED_REPLIES} replies of {device} are not aggregated yet", retry_after_s=5.0
            )

    async def keep(self, draft: Path, header: ReplyHeader, received: bytes, began_at: float) -> None:
        """Commit the reply whose checked parts are complete in `draft`, and queue it for the fleet.

        `received` are the header's bytes as they came. Raises `ApiError` 403 if the device was revoked meanwhile.
        """
        device = header.update_id.device
        transfer = self._transfer(device, header.assignment_id, began_at)

        def commit() -> ReplyHeader:
            arrived = header.arrived(replace(transfer, arrived_at=self._clock.wall()))
            self._spool.commit(draft, arrived, received)
            return arrived

        try:
            arrived = await asyncio.to_thread(commit)
        except ThinwireError:
            self._presence.account(device).give_back(transfer)
            if not self.expects(device):
                raise revoke_access(device) from None  # revoking the device removed the draft
            raise
        if not self._mailbox.receive(device, arrived, received):
            await asyncio.to_thread(self._spool.delete, header.update_id)
            raise revoke_access(device)

    def expects(self, device: str) -> bool:
        """Return True if the device's replies are accepted, which a revoked device's are not."""
        return self._mailbox.expects(device)

    def _transfer(self, device: str, assignment_id: str, began_at: float) -> Transfer:
        """Return the transfer's times and its wire bytes: all of this device since its previous reply."""
        sent, received, requests = self._presence.account(device).take_unreported()
        return Transfer(
            pulled_at=self._mailbox.pulled_at(device, assignment_id),
            began_at=began_at,
            arrived_at=self._clock.wall(),
            sent_bytes=sent,
            received_bytes=received,
            requests=requests,
        )


def revoke_access(device: str) -> ApiError:
    """Return the refusal for a revoked device."""
    return ApiError(403, "revoked", f"{device} was revoked")
