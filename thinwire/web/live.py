"""Server-sent events for browser tabs: the store is read four times a second, however many tabs are open.

A tab receives only the latest status and never a backlog. A slow tab misses what lies between, and nothing waits for
it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace

from starlette.concurrency import run_in_threadpool

from thinwire.core.errors import ThinwireError

TICK_S = 0.25
HEARTBEAT_S = 15.0
MOST_TABS = 64


@dataclass(frozen=True)
class News:
    """The status of the aggregator and the store: `seq` is the number of the journal's latest event.

    `aggregator` is running, gone or unknown. `gone_at` is the moment when an aggregator that is down was last alive,
    wall clock; 0 if unknown. `store` is the error if the store could not be read. `acts` rises with changes outside the
    journal, such as approvals and refusals. `pending` devices wait for approval. `heard` is the moment when the last
    contacts of all devices were last written.
    """

    seq: int = 0
    aggregator: str = "unknown"
    gone_at: float = 0.0
    store: str = ""
    acts: int = 0
    pending: int = 0
    heard: float = 0.0


class Live:
    """The event streams of all tabs. `look` is called in a thread; `closing` returns True once the server ends."""

    def __init__(self, look: Callable[[], News], closing: Callable[[], bool] = lambda: False) -> None:
        self.look, self.closing = look, closing
        self.news, self.closed = News(), False
        self.tabs: set[asyncio.Event] = set()

    async def run(self) -> None:
        """Poll until the server ends, then end all streams."""
        while not self.closing():
            if self.tabs:
                await self._refresh()
            await asyncio.sleep(TICK_S)
        self.close()

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._wake()

    async def _refresh(self) -> None:
        """Read the status and wake the tabs if it changed; an error of the store becomes part of the status."""
        try:
            news = await run_in_threadpool(self.look)
        except ThinwireError as error:
            news = replace(self.news, store=str(error))
        if news != self.news:
            self.news = news
            self._wake()

    def _wake(self) -> None:
        """Wake the streams of all tabs."""
        for tab in self.tabs:
            tab.set()

    @property
    def full(self) -> bool:
        """Return True if no more tabs are accepted."""
        return len(self.tabs) >= MOST_TABS

    async def stream(self, still_known: Callable[[], bool]) -> AsyncIterator[str]:
        """Yield server-sent events: the status now, then each change.

        At each heartbeat `still_known` checks the session, and the stream ends if the session has.
        """
        tab = asyncio.Event()
        self.tabs.add(tab)
        try:
            await self._refresh()
            tab.clear()  # before the message is made, so that a change during it is not lost
            yield "retry: 1000\n\n" + self._message()
            while not self.closed:
                try:
                    await asyncio.wait_for(tab.wait(), HEARTBEAT_S)
                except TimeoutError:
                    if not await run_in_threadpool(still_known):
                        return
                    yield ": still here\n\n"
                    continue
                tab.clear()
                if not self.closed:
                    yield self._message()
        finally:
            self.tabs.discard(tab)

    def _message(self) -> str:
        """Return the status as a server-sent event."""
        said = {**asdict(self.news), "now": time.time()}
        return f"id: {self.news.seq}\nevent: news\ndata: {json.dumps(said)}\n\n"
