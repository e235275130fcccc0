"""The lane's first route, hello, and the table of all three. Only our clients call them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Hello, NodeJoined, Roster, Spool, Welcome
from thinwire.flower import hellos
from thinwire.flower.enrolment import Enrol, may
from thinwire.flower.entry import Entry
from thinwire.flower.exchange import Exchange
from thinwire.flower.framing import MAX_HELLO_BYTES, block
from thinwire.flower.refusals import Refusal
from thinwire.flower.requests import Request
from thinwire.flower.sessions import Sessions

SETTLE_S = 1.0  # a hello waits so long for the connection of the process before it to close
SETTLE_STEP_S = 0.02


class HelloRoute:
    """A process says who it is, what it can do, and learns how far its sequences went."""

    def __init__(
        self, entry: Entry, enrol: Enrol, roster: Roster, spool: Spool, exchange: Exchange, sessions: Sessions,
        clock: Clock, poll_s: float,
    ) -> None:  # fmt: skip
        self._entry, self._enrol, self._roster, self._spool = entry, enrol, roster, spool
        self._exchange, self._sessions, self._clock, self._poll_s = exchange, sessions, clock, poll_s

    async def __call__(self, request: Request) -> None:
        head = await request.head(MAX_HELLO_BYTES)
        identity = self._entry.signer(request, head)
        try:
            said = hellos.hello_from_bytes(head)
        except BadPayload as error:
            raise Refusal(400, "protocol", str(error)) from error
        row = self._entry.row(identity)
        if row is None:
            row = await asyncio.to_thread(self._enrol, said, identity)
        if may(row).name != said.name:
            raise Refusal(409, "name", f"this key belongs to the device {row.name!r}")
        self._entry.enter(request, identity, row)
        await self._alone(said)
        if self._sessions.begin(said, request.wire):  # nothing awaited since `_alone`: two hellos cannot both begin
            self._exchange.arrived(NodeJoined(row.name, said))
        await asyncio.to_thread(self._roster.seen, said, self._clock.wall())
        sequences = await asyncio.to_thread(self._sequences, row.name)
        welcome = Welcome(row.name, sequences, self._poll_s, self._clock.wall())
        await request.answer(200, block(hellos.to_bytes(welcome)))

    async def _alone(self, said: Hello) -> None:
        """Refuse a second live process of one name; one that was just killed gets a moment to be noticed."""
        for _ in range(round(SETTLE_S / SETTLE_STEP_S)):
            before = self._sessions.of(said.name)
            if before is None or before.hello.process == said.process or not before.connected:
                return
            await asyncio.sleep(SETTLE_STEP_S)
        raise Refusal(409, "process", f"another process of {said.name!r} is connected")

    def _sequences(self, name: str) -> Mapping[str, int]:
        """The highest sequence of each run, folded or still in the spool."""
        highest = dict(self._roster.sequences(name))
        for head in self._spool.heads():
            update = head.update_id
            if update.device == name:
                highest[update.run] = max(update.sequence, highest.get(update.run, 0))
        return highest
