"""News for the tabs: one look at the store every quarter of a second, however many tabs are open.

A tab is told only the newest state, never a backlog: a slow one misses what lies between and nothing waits for it.
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
    """The journal's newest number, whether an aggregator serves, and whether the store could be read.

    `gone_at`: when one that does not was last alive, wall clock; 0 where that is not known. `acts` rises with what no
    journal has (who may take part, what the door refused), `pending` devices wait. `heard`: when it was written
    down last when each device was heard.
    """

    seq: int = 0
    aggregator: str = "unknown"
    gone_at: float = 0.0
    store: str = ""
    acts: int = 0
    pending: int = 0
    heard: float = 0.0


class Live:
    """`look` is called in a thread; `closing` says that the server ends, and with it every stream."""

    def __init__(self, look: Callable[[], News], closing: Callable[[], bool] = lambda: False) -> None:
        self.look, self.closing = look, closing
        self.news, self.closed = News(), False
        self.tabs: set[asyncio.Event] = set()

    async def run(self) -> None:
        """Look until the server ends, then end the streams."""
        while not self.closing():
            if self.tabs:
                await self._refresh()
            await asyncio.sleep(TICK_S)
        self.close()

    def close(self) -> None:
        self.closed = True
        self._wake()

    async def _refresh(self) -> None:
        try:
            news = await run_in_threadpool(self.look)
        except ThinwireError as error:
            news = replace(self.news, store=str(error))
        if news != self.news:
            self.news = news
            self._wake()

    def _wake(self) -> None:
        for tab in self.tabs:
            tab.set()

    @property
    def full(self) -> bool:
        return len(self.tabs) >= MOST_TABS

    async def stream(self, still_known: Callable[[], bool]) -> AsyncIterator[str]:
        """Server-sent events: the state now, then each change; the session is asked for again at each heartbeat."""
        tab = asyncio.Event()
        self.tabs.add(tab)
        try:
            await self._refresh()
            tab.clear()  # before the message is made: what comes after it is news
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
        said = {**asdict(self.news), "now": time.time()}
        return f"id: {self.news.seq}\nevent: news\ndata: {json.dumps(said)}\n\n"
