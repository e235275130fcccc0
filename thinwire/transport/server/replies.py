"""What becomes of an answer at the door: checked against what may be, made durable, and reported once."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import ReplyLimits, Spool
from thinwire.core.types import Failure, ReplyHead, Transfer, UpdateId
from thinwire.transport.protocol.http import RUN, Refusal
from thinwire.transport.server.mailbox import Exchange, answer_digest
from thinwire.transport.server.presence import Sessions

RUN_ID = re.compile(RUN)  # it names a folder of the spool
MAX_TEXT = 2000
MAX_WAITING = 64  # answers of one device in the spool: a round has one, and one that came late


class Answers:
    """Exactly once: an update that is here already is answered as it was the first time, and stored once."""

    def __init__(self, exchange: Exchange, sessions: Sessions, spool: Spool, clock: Clock, limits: ReplyLimits) -> None:
        self._exchange, self._sessions, self._spool = exchange, sessions, spool
        self._clock, self._limits = clock, limits

    def failed(self, device: str, failure: Failure, began_at: float) -> None:
        text, transfer = failure.text[:MAX_TEXT], self._transfer(device, failure.ask_id, began_at)
        self._exchange.answered(device, Failure(failure.kind[:64], text, failure.ask_id, device, transfer=transfer))
        self._sessions.told(device, transfer)
        self._no_longer_held(device, failure.ask_id)

    def require_run(self, reply: ReplyHead | Failure) -> None:
        """Raise `Refusal` for a reply to an ask of no run that is here: another aggregator's may have the same id."""
        identity = self._limits.of(reply.ask_id).identity
        if identity is None or identity not in ("", reply.identity):
            raise Refusal(
                409, "run", f"{reply.ask_id[:80]!r} is an ask of another run, of identity {reply.identity[:80]!r}"
            )

    def require_possible(self, device: str, head: ReplyHead, began_at: float) -> None:
        """`Refusal` for an answer in another's name, to no run that is here, or larger than its ask allows."""
        update, length = head.update_id, head.payload_bytes
        if update.device != device:
            raise Refusal(403, "device", f"{device} cannot answer for {update.device[:80]!r}")
        if not RUN_ID.fullmatch(update.run) or update.sequence < 0:
            raise Refusal(409, "protocol", "no run can have this name")
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
            raise Refusal(413, "too-large", text)

    def here_already(self, device: str, head: ReplyHead, began_at: float) -> bool:
        """Whether this very answer came before; another one under its id is a lost state."""
        known = self._exchange.seen(head.update_id)
        if known is None:
            return False
        if known != answer_digest(head):
            text = f"update {head.update_id} came before with other contents"
            self.failed(device, Failure("state-lost", text, head.ask_id), began_at)
            raise Refusal(409, "state-lost", text)
        self._exchange.settle(device, head.ask_id)
        self._no_longer_held(device, head.ask_id)
        return True

    def require_room(self, device: str, arriving: int) -> None:
        """`Refusal` 503 for a device that sends more answers than anybody folds."""
        if self._exchange.waiting(device) + arriving >= MAX_WAITING:
            raise Refusal(503, "busy", f"{MAX_WAITING} answers of {device} are not folded yet", retry_after_s=5.0)

    async def keep(self, draft: Path, head: ReplyHead, received: bytes, began_at: float) -> None:
        """All parts are in the draft and fit their digests: from here on the answer is ours, its head as `received`."""
        device = head.update_id.device
        transfer = self._transfer(device, head.ask_id, began_at)

        def commit() -> ReplyHead:
            arrived = head.arrived(replace(transfer, arrived_at=self._clock.wall()))
            self._spool.commit(draft, arrived, received)
            return arrived

        try:
            arrived = await asyncio.to_thread(commit)
        except ThinwireError:
            if not self.expects(device):
                raise shut_out(device) from None  # its file was removed under it
            raise
        self._sessions.told(device, transfer)
        if not self._exchange.answered(device, arrived, received):
            await asyncio.to_thread(self._spool.delete, head.update_id)
            raise shut_out(device)
        self._no_longer_held(device, head.ask_id)

    def expects(self, device: str) -> bool:
        """Whether its answers are taken: not of one that was shut out since its request was let in."""
        return bool(self._exchange.node_of(device))

    def seen(self, update_id: UpdateId) -> bool:
        return self._exchange.seen(update_id) is not None

    def _transfer(self, device: str, ask_id: str, began_at: float) -> Transfer:
        """What this exchange cost on the wire: everything of this device since its answer before."""
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
        """The pull that waits meanwhile was made when the ask was still held."""
        if session := self._sessions.of(device):
            session.held.discard(ask_id)


def shut_out(device: str) -> Refusal:
    return Refusal(403, "revoked", f"{device} was revoked")
