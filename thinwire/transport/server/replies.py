"""Arriving replies: checked against their limits, made durable, and reported once."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import ReplyLimits, Spool
from thinwire.core.types import Failure, ReplyHeader, Transfer, UpdateId
from thinwire.transport.protocol.http import RUN, ApiError
from thinwire.transport.server.mailbox import Mailbox, answer_digest
from thinwire.transport.server.presence import Presence

RUN_ID = re.compile(RUN)  # a run's id names a folder of the spool
MAX_TEXT = 2000
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
        text, transfer = failure.text[:MAX_TEXT], self._transfer(device, failure.ask_id, began_at)
        self._exchange.answered(device, Failure(failure.kind[:64], text, failure.ask_id, device, transfer=transfer))
        self._sessions.told(device, transfer)
        self._no_longer_held(device, failure.ask_id)

    def require_run(self, reply: ReplyHeader | Failure) -> None:
        """Raise `ApiError` 409 for a reply to an assignment of no run here.

        A run of another aggregator may have the same id.
        """
        identity = self._limits.of(reply.ask_id).identity
        if identity is None or identity not in ("", reply.identity):
            raise ApiError(
                409, "run", f"{reply.ask_id[:80]!r} is an ask of another run, of identity {reply.identity[:80]!r}"
            )

    def require_possible(self, device: str, head: ReplyHeader, began_at: float) -> None:
        """Raise `ApiError` for a reply in another device's name, of an impossible run, or beyond its limits."""
        update, length = head.update_id, head.payload_bytes
        if update.device != device:
            raise ApiError(403, "device", f"{device} cannot answer for {update.device[:80]!r}")
        if not RUN_ID.fullmatch(update.run) or update.sequence < 0:
            raise ApiError(409, "protocol", "no run can have this name")
        limit = self._limits.of(head.ask_id)
        for count, most, what in (
            (length, limit.payload_bytes, "bytes"),
            (len(head.parts), limit.parts, "parts"),
            (len(head.counters), limit.counters, "counters"),
        ):
            if count <= most:
                continue
            text = f"an answer of {count} {what}, {most} are taken"
            self.failed(device, Failure("protocol", text, head.ask_id), began_at)
            raise ApiError(413, "too-large", text)

    def here_already(self, device: str, head: ReplyHeader, began_at: float) -> bool:
        """Return True if this very reply arrived before.

        Another reply under the same id means that the device lost its state: `ApiError` 409 is raised.
        """
        known = self._exchange.seen(head.update_id)
        if known is None:
            return False
        if known != answer_digest(head):
            text = f"update {head.update_id} came before with other contents"
            self.failed(device, Failure("state-lost", text, head.ask_id), began_at)
            raise ApiError(409, "state-lost", text)
        self._exchange.settle(device, head.ask_id)
        self._no_longer_held(device, head.ask_id)
        return True

    def require_room(self, device: str, arriving: int) -> None:
        """Raise `ApiError` 503 if too many replies of the device wait for aggregation, `arriving` ones included."""
        if self._exchange.waiting(device) + arriving >= MAX_WAITING:
            raise ApiError(503, "busy", f"{MAX_WAITING} answers of {device} are not folded yet", retry_after_s=5.0)

    async def keep(self, draft: Path, head: ReplyHeader, received: bytes, began_at: float) -> None:
        """Commit the reply whose checked parts are complete in `draft`, and queue it for the fleet.

        `received` are the header's bytes as they came. Raises `ApiError` 403 if the device was revoked meanwhile.
        """
        device = head.update_id.device
        transfer = self._transfer(device, head.ask_id, began_at)

        def commit() -> ReplyHeader:
            arrived = head.arrived(replace(transfer, arrived_at=self._clock.wall()))
            self._spool.commit(draft, arrived, received)
            return arrived

        try:
            arrived = await asyncio.to_thread(commit)
        except ThinwireError:
            if not self.expects(device):
                raise shut_out(device) from None  # revoking the device removed the draft
            raise
        self._sessions.told(device, transfer)
        if not self._exchange.answered(device, arrived, received):
            await asyncio.to_thread(self._spool.delete, head.update_id)
            raise shut_out(device)
        self._no_longer_held(device, head.ask_id)

    def expects(self, device: str) -> bool:
        """Return True if the device's replies are accepted, which a revoked device's are not."""
        return bool(self._exchange.node_of(device))

    def seen(self, update_id: UpdateId) -> bool:
        """Return True if a reply with this id arrived before."""
        return self._exchange.seen(update_id) is not None

    def _transfer(self, device: str, ask_id: str, began_at: float) -> Transfer:
        """Return the transfer's times and its wire bytes: all of this device since its previous reply."""
        sent, received, requests = self._sessions.account(device).untold()
        return Transfer(
            pulled_at=self._exchange.pulled_at(device, ask_id),
            began_at=began_at,
            arrived_at=self._clock.wall(),
            sent_bytes=sent,
            received_bytes=received,
            requests=requests,
        )

    def _no_longer_held(self, device: str, ask_id: str) -> None:
        """Remove the assignment from those that the waiting pull reported before the reply arrived."""
        if session := self._sessions.of(device):
            session.held.discard(ask_id)


def shut_out(device: str) -> ApiError:
    """Return the refusal for a revoked device."""
    return ApiError(403, "revoked", f"{device} was revoked")
