"""Arriving replies: checked against their limits, made durable, and reported once."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import ReplyLimits, Spool
from thinwire.core.link_state import same_reply
from thinwire.core.types import Failure, PhaseReply, Reply, ReplyHeader, Transfer
from thinwire.transport.protocol.http import RUN, ApiError
from thinwire.transport.server.mailbox import Mailbox
from thinwire.transport.server.presence import Presence

RUN_ID = re.compile(RUN)  # a run's id names a folder of the spool
MAX_TEXT = 2000
MAX_MESSAGES = 4  # of phases, of one device, in memory until the next poll
MAX_WAITING = 64  # replies of one device in the spool: a round has one, and possibly a late one


class ReplyReceiver:
    """Stores each reply exactly once: a repeated reply gets the same response as the first one.

    In all methods `began_at` is the wall clock at which the reply began to arrive.
    """

    def __init__(self, exchange: Mailbox, sessions: Presence, spool: Spool, clock: Clock, limits: ReplyLimits) -> None:
        self._exchange, self._sessions, self._spool = exchange, sessions, spool
        self._clock, self._limits = clock, limits

    def failed(self, device: str, failure: Failure, began_at: float) -> None:
        """Queue a failure that a device reported, with bounded texts and the transfer's byte counts."""
        text, transfer = failure.text[:MAX_TEXT], self._transfer(device, failure.assignment_id, began_at)
        self._exchange.answered(
            device, Failure(failure.kind[:64], text, failure.assignment_id, device, transfer=transfer)
        )

    def messaged(self, device: str, reply: PhaseReply) -> None:
        """Queue a device's message of a phase of secure aggregation; its bytes are counted with the next update.

        Raise `ApiError` 503 if several of the device's messages are still in memory: a round has one at a time.
        """
        if self._exchange.messages(device) >= MAX_MESSAGES:
            text = f"{MAX_MESSAGES} messages of {device} are not read yet"
            raise ApiError(503, "busy", text, retry_after_s=1.0)
        self._exchange.answered(device, replace(reply, device=device))

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
            raise ApiError(403, "device", f"{device} cannot answer for {update.device[:80]!r}")
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
            text = f"an answer of {count} {what}, {most} are taken"
            self.failed(device, Failure("protocol", text, header.assignment_id), began_at)
            raise ApiError(413, "too-large", text)

    def here_already(self, device: str, header: ReplyHeader, began_at: float) -> bool:
        """Return True if this very reply arrived before.

        Another reply under the same id means that the device lost its state: `ApiError` 409 is raised.
        """
        known = self._exchange.seen(header.update_id)
        if known is None:
            return False
        if not same_reply(known, header):
            text = f"update {header.update_id} came before with other contents"
            self.failed(device, Failure("state-lost", text, header.assignment_id), began_at)
            raise ApiError(409, "state-lost", text)
        self._exchange.settle(device, header.assignment_id)
        return True

    def require_room(self, device: str, arriving: int) -> None:
        """Raise `ApiError` 503 if too many replies of the device wait for aggregation, `arriving` ones included."""
        if self._exchange.waiting(device) + arriving >= MAX_WAITING:
            raise ApiError(503, "busy", f"{MAX_WAITING} answers of {device} are not aggregated yet", retry_after_s=5.0)

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
            if not self.expects(device):
                raise revoke_access(device) from None  # revoking the device removed the draft
            raise
        if not self._exchange.answered(device, arrived, received):
            await asyncio.to_thread(self._spool.delete, header.update_id)
            raise revoke_access(device)

    def expects(self, device: str) -> bool:
        """Return True if the device's replies are accepted, which a revoked device's are not."""
        return self._exchange.expects(device)

    def _transfer(self, device: str, assignment_id: str, began_at: float) -> Transfer:
        """Return the transfer's times and its wire bytes: all of this device since its previous reply."""
        sent, received, requests = self._sessions.account(device).take_unreported()
        return Transfer(
            pulled_at=self._exchange.pulled_at(device, assignment_id),
            began_at=began_at,
            arrived_at=self._clock.wall(),
            sent_bytes=sent,
            received_bytes=received,
            requests=requests,
        )


def revoke_access(device: str) -> ApiError:
    """Return the refusal for a revoked device."""
    return ApiError(403, "revoked", f"{device} was revoked")
