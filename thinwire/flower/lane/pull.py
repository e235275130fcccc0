"""The route on which a device waits for asks: answered when there is one, or when the wait is over."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass

from thinwire.core.clock import Clock
from thinwire.core.json_bounds import read_json
from thinwire.core.types import Failure
from thinwire.flower.door.gate import Gate
from thinwire.flower.door.requests import Gone, Request
from thinwire.flower.lane.bundle import read
from thinwire.flower.lane.exchange import Exchange
from thinwire.flower.lane.outstanding import Outstanding
from thinwire.flower.lane.sessions import Session, Sessions
from thinwire.flower.wire.framing import INLINE_BYTES, block, packed
from thinwire.flower.wire.refusals import Refusal

MOST_BYTES = 64 * 2**10  # of a pull's JSON: the ids of asks that are held
SPREAD = 1.1  # a device draws its wait from within a tenth of what it was told


@dataclass(frozen=True)
class Wanted:
    """What a pull says: which process it is, how long it waits, and which asks it holds already.

    What it holds decides what it gets, so an answer that was lost on the way is simply given again.
    """

    process: str
    wait_s: float
    held: frozenset[str]

    @classmethod
    def read(cls, data: bytes) -> Wanted:
        try:
            raw = read_json(data, MOST_BYTES)
            wait_s = float(raw["wait_s"])
            if math.isnan(wait_s):
                raise ValueError("it waits for NaN seconds")
            return cls(str(raw["process"]), wait_s, frozenset(str(held) for held in raw["held"]))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise Refusal(409, "protocol", f"cannot read the pull: {error}") from error


class PullRoute:
    """A waiting pull costs one timer and one event; hundreds of them cost nothing while nothing happens."""

    def __init__(self, gate: Gate, exchange: Exchange, sessions: Sessions, clock: Clock, poll_s: float) -> None:
        self._gate, self._exchange, self._sessions = gate, exchange, sessions
        self._clock, self._most_s = clock, poll_s * SPREAD
        self.closing = False

    async def __call__(self, request: Request) -> None:
        row = request.row
        wanted = Wanted.read((await request.head(MOST_BYTES))[0])
        session = self._sessions.of(row.name)
        if session is None or session.hello.process != wanted.process:
            raise Refusal(401, "hello", "this process has not said hello here")
        self._sessions.listen(session, request.wire)
        session.held, session.turn = set(wanted.held), session.turn + 1
        self._exchange.holds(session.device, session.held, self._clock.wall())
        with self._sessions.call(row.name, waits=True):
            outstanding, withdrawn = await self._wait(request, session, min(max(wanted.wait_s, 0.0), self._most_s))
            if self._gate.still(row).name != session.device:
                raise Refusal(401, "hello", "this device was renamed: say hello again")
            await self._answer(request, session, outstanding, withdrawn)

    async def _wait(self, request: Request, session: Session, wait_s: float) -> tuple[Outstanding | None, list[str]]:
        """Until there is something to say, or the wait is over. A newer pull of the same process ends this one."""
        loop, turn = asyncio.get_running_loop(), session.turn
        until = loop.time() + wait_s
        while True:
            if self.closing:
                raise Refusal(503, "closing", "the aggregator is closing", retry_after_s=1.0)
            if not request.wire.open:
                raise Gone
            if session.turn != turn:
                return None, []
            outstanding = self._exchange.next_for(session.device, session.held, self._clock.wall())
            withdrawn = self._exchange.withdrawn(session.held)
            if outstanding or withdrawn or loop.time() >= until:
                return outstanding, withdrawn
            session.woken.clear()
            timer = loop.call_at(until, session.woken.set)
            try:
                await session.woken.wait()
            finally:
                timer.cancel()

    async def _answer(
        self, request: Request, session: Session, outstanding: Outstanding | None, withdrawn: list[str]
    ) -> None:
        said = json.dumps({"cancelled": withdrawn}).encode() if withdrawn else b"{}"
        control = packed(said)
        if outstanding is None or not self._is_there(session.device, outstanding):
            await request.answer(200, control + block(b""))
            return
        ask, bundle = outstanding.spoken(session.protocol, session.hello.process), outstanding.envelope.bundle
        heads = control + packed(ask)
        length = outstanding.length if outstanding.length <= INLINE_BYTES else 0  # the device fetches larger ones
        self._exchange.pulled(outstanding, self._clock.wall())
        await request.begin(200, [(b"content-length", str(len(heads) + length).encode())])
        await request.write(heads, more=bool(length))
        if length and bundle is not None:
            async for data, more in read(bundle, 0, length):
                await request.write(data, more)

    def _is_there(self, device: str, outstanding: Outstanding) -> bool:
        """Whether the ask's parts still are; an ask that cannot be delivered fails here and now."""
        bundle = outstanding.envelope.bundle
        if not outstanding.length or (bundle and bundle.exists() and bundle.stat().st_size == outstanding.length):
            return True
        ask_id = outstanding.envelope.ask.ask_id
        self._exchange.answered(device, Failure("disk", "the aggregator lost the model of this ask", ask_id, device))
        return False
