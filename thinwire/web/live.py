"""The status of the aggregator and of the store: once, and as a stream of server-sent events for browser tabs.

`Live` reads the store four times a second, however many tabs are open. A tab receives only the latest status and never
a backlog. A slow tab misses what lies between, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

import thinwire
from thinwire.core.errors import ThinwireError
from thinwire.web import schemas
from thinwire.web.access import API, SettingsDep, StoreDep, from_state, visitor
from thinwire.web.connections import STILL_HERE, STREAM, Places, Watch
from thinwire.web.problems import PROBLEMS
from thinwire.web.settings import aggregator

TICK_S = 0.25
MAX_TABS = 64
TABS_OF_ONE = 8  # browsers of a user: all tabs of one share a stream


@dataclass(frozen=True)
class News:
    """Holds the status of the aggregator and the store: `seq` changes with what may be shown.

    `aggregator` is running, gone or unknown. `down_since` is the moment when an aggregator that is down was last alive,
    wall clock; 0 if unknown. `store` is the error if the store could not be read. `acts` rises with changes outside the
    journal: approvals, refusals, tags. `pending` devices wait for approval. `heard` is the moment when the last
    contacts of all devices were last written. `alerts` are open, and nobody has acknowledged `unseen` of them;
    `alert_changes` rises with each change of one.
    `disk` says since when and why all runs are paused, if the disk is full.
    """

    seq: int = 0
    aggregator: str = "unknown"
    down_since: float = 0.0
    store: str = ""
    acts: int = 0
    pending: int = 0
    heard: float = 0.0
    alerts: int = 0
    unseen: int = 0
    alert_changes: int = 0
    disk: str = ""


class Live:
    """Keeps the event streams of all tabs. `look` is called in a thread; `closing` is True once the server ends."""

    def __init__(self, look: Callable[[], News], closing: Callable[[], bool] = lambda: False) -> None:
        self.look, self.closing = look, closing
        self.news, self.closed = News(), False
        self.tabs: set[asyncio.Event] = set()
        self.places = Places(MAX_TABS, TABS_OF_ONE)

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

    def told(self) -> dict[str, Any]:
        """Return the status now, with the server's time, as a page and its stream have it."""
        return {**asdict(self._read()), "now": time.time()}

    def _read(self) -> News:
        """Read the status; an error of the store becomes part of it."""
        try:
            return self.look()
        except ThinwireError as error:
            return replace(self.news, store=str(error))

    async def _refresh(self) -> None:
        """Read the status and wake the tabs if it changed."""
        news = await run_in_threadpool(self._read)
        if news != self.news:
            self.news = news
            self._wake()

    def _wake(self) -> None:
        """Wake the streams of all tabs."""
        for tab in self.tabs:
            tab.set()

    async def stream(self, still_known: Callable[[], bool], user: str = "") -> AsyncGenerator[str, None]:
        """Yield server-sent events: the status now, then each change.

        At each heartbeat `still_known` checks the session, and the stream ends if the session has.
        """
        tab, session = asyncio.Event(), Watch(still_known)
        with self.places.taken(user) as found:
            if not found:
                return
            self.tabs.add(tab)
            try:
                await self._refresh()
                tab.clear()  # before the message is made, so that a change during it is not lost
                yield "retry: 1000\n\n" + self._message()
                while not self.closed and await session.wait(tab):
                    changed = tab.is_set()
                    tab.clear()
                    if not self.closed:
                        yield self._message() if changed else STILL_HERE
            finally:
                self.tabs.discard(tab)

    def _message(self) -> str:
        """Return the status as a server-sent event."""
        said = {**asdict(self.news), "now": time.time()}
        return f"id: {self.news.seq}\nevent: news\ndata: {json.dumps(said)}\n\n"


LiveDep = Annotated[Live, from_state("live")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/service")
def service(store: StoreDep, settings: SettingsDep) -> schemas.Service:
    """Return whether the aggregator is running, and where it listens."""
    state, about = aggregator(settings.lock)
    return schemas.Service(
        aggregator=state, listen=str(about.get("listen", "")), urls=[str(url) for url in about.get("urls") or ()],
        tls=bool(about.get("pin")), version=thinwire.__version__, seq=store.changes(), now=time.time(),
    )  # fmt: skip


@router.get("/live", response_class=StreamingResponse)
async def news(request: Request, live: LiveDep) -> Response:
    """Stream the status of aggregator and store: now, then each change."""
    seen = visitor(request)
    if refused := live.places.refusal(seen.person.user):
        return refused
    stream = live.stream(seen.still_known, seen.person.user)
    return StreamingResponse(stream, media_type="text/event-stream", headers=STREAM)
