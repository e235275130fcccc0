"""The route on which answers come in: streamed to the spool, checked, committed, and only then answered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Spool
from thinwire.core.messages import reply_from_bytes
from thinwire.core.types import Failure, ReplyHead, Transfer, UpdateId
from thinwire.flower.entry import Entry
from thinwire.flower.exchange import Exchange, answer_digest
from thinwire.flower.framing import LENGTH, MAX_PUSH_HEAD_BYTES, STREAM_BYTES
from thinwire.flower.intake import store, stream
from thinwire.flower.refusals import Refusal
from thinwire.flower.requests import Request
from thinwire.flower.sessions import Sessions

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it names a folder of the spool
SMALL_BYTES = 256 * 2**10  # up to here an answer is stored in one go
MAX_TEXT = 2000
MAX_WAITING = 64  # answers of one device in the spool: a round has one, and one that came late


class PushRoute:
    """Exactly once: an update that is here already is answered as it was the first time, and stored once."""

    def __init__(
        self, entry: Entry, exchange: Exchange, sessions: Sessions, spool: Spool, clock: Clock,
        limit: Callable[[str], int],
    ) -> None:  # fmt: skip
        self._entry, self._exchange, self._sessions, self._spool = entry, exchange, sessions, spool
        self._clock, self._limit = clock, limit
        self._storing: set[UpdateId] = set()

    async def __call__(self, request: Request) -> None:
        self._entry.known(request)
        began_at = self._clock.wall()
        head = await request.head(MAX_PUSH_HEAD_BYTES)
        device = self._entry.admit(request, head).name
        try:
            reply = reply_from_bytes(head)
        except BadPayload as error:
            raise Refusal(400, "protocol", str(error)) from error
        length = sum(part.length for part in reply.parts) if isinstance(reply, ReplyHead) else 0
        if request.length != LENGTH.size + len(head) + length:
            raise Refusal(400, "protocol", "the body is not as long as its head says")
        with self._sessions.call(device):
            if isinstance(reply, Failure):
                self._failed(device, reply, began_at)
            else:
                await self._updated(request, device, reply, length, began_at)
        await request.answer(200)

    def _failed(self, device: str, failure: Failure, began_at: float) -> None:
        text, transfer = failure.text[:MAX_TEXT], self._transfer(device, failure.ask_id, began_at)
        self._exchange.answered(device, Failure(failure.kind[:64], text, failure.ask_id, device, transfer=transfer))
        self._no_longer_held(device, failure.ask_id)

    async def _updated(self, request: Request, device: str, head: ReplyHead, length: int, began_at: float) -> None:
        update = head.update_id
        if update.device != device:
            raise Refusal(403, "device", f"{device} cannot answer for {update.device[:80]!r}")
        if not RUN_ID.fullmatch(update.run) or update.sequence < 0:
            raise Refusal(400, "protocol", "no run can have this name")
        if length > (most := self._limit(head.ask_id)):
            self._failed(
                device, Failure("protocol", f"an answer of {length} bytes, {most} are taken", head.ask_id), began_at
            )
            raise Refusal(413, "too-large", f"an answer of {length} bytes, {most} are taken")
        if update in self._storing:
            raise Refusal(503, "busy", "this update is being received already")
        arriving = sum(other.device == device for other in self._storing)
        if self._exchange.seen(update) is None and self._exchange.waiting(device) + arriving >= MAX_WAITING:
            raise Refusal(503, "busy", f"{MAX_WAITING} answers of {device} are not folded yet")
        self._storing.add(update)
        try:
            if not self._here_already(device, head, began_at):
                arrived = await self._store(request, device, head, length, began_at)
                self._exchange.answered(device, arrived)
        finally:
            self._storing.discard(update)
        self._no_longer_held(device, head.ask_id)

    def _here_already(self, device: str, head: ReplyHead, began_at: float) -> bool:
        """Whether this very answer came before; another one under its id is a lost state."""
        known = self._exchange.seen(head.update_id)
        if known is None:
            return False
        if known != answer_digest(head):
            text = f"update {head.update_id} came before with other contents"
            self._failed(device, Failure("state-lost", text, head.ask_id), began_at)
            raise Refusal(409, "state-lost", text)
        self._exchange.settle(device, head.ask_id)
        return True

    async def _store(self, request: Request, device: str, head: ReplyHead, length: int, began_at: float) -> ReplyHead:
        """The head as it was committed. A small answer costs one hop to a thread."""
        if length > SMALL_BYTES:
            draft = await stream(request.blocks(STREAM_BYTES), self._spool, head)
            return await asyncio.to_thread(self._commit, draft, head, self._transfer(device, head.ask_id, began_at))
        data = b"".join([piece async for piece in request.blocks(SMALL_BYTES)])
        transfer = self._transfer(device, head.ask_id, began_at)
        return await asyncio.to_thread(lambda: self._commit(store(data, self._spool, head), head, transfer))

    def _commit(self, draft: Path, head: ReplyHead, transfer: Transfer) -> ReplyHead:
        arrived = head.arrived(replace(transfer, arrived_at=self._clock.wall()))
        self._spool.commit(draft, arrived)
        return arrived

    def _transfer(self, device: str, ask_id: str, began_at: float) -> Transfer:
        """What this exchange cost on the wire: everything of this device since its answer before."""
        spent = self._sessions.spent(device)
        return Transfer(
            pulled_at=self._exchange.pulled_at(device, ask_id),
            began_at=began_at,
            arrived_at=self._clock.wall(),
            sent_bytes=spent.sent_bytes,
            received_bytes=spent.received_bytes,
            requests=spent.requests,
        )

    def _no_longer_held(self, device: str, ask_id: str) -> None:
        """The pull that waits meanwhile was made when the ask was still held."""
        if session := self._sessions.of(device):
            session.held.discard(ask_id)
