"""The journal of a run as a live feed: its newest events, and a stream that a reader can resume.

A run that somebody follows has one `RunFeed`. It reads each new event once, makes its message once, and gives that to
all readers, so that 200 of them cost little more than one. It keeps the newest `KEPT` messages; a reader that comes
back with `Last-Event-ID` gets what it has missed, or `reset` if the feed does not have that any more.

The id of a message is the feed's random name and a count. It is not the number in the journal, which rises over all
runs: where the sample of one is secret, the gaps between numbers would tell how many of its devices replied.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from thinwire.core.errors import NotFound, ThinwireError
from thinwire.core.events import Event
from thinwire.core.run_events import SHOWN_OF_SAMPLED, is_sampled, without_sample
from thinwire.reports.reason_text import event_sentence
from thinwire.store import Store
from thinwire.web.access import API, RunId, from_state, visitor
from thinwire.web.connections import STILL_HERE, STREAM, Places, Watch
from thinwire.web.problems import PROBLEMS

KEPT: Final = 1000  # messages of a run
MAX_BATCH: Final = 500  # events that are read at once
MAX_BEHIND: Final = 500  # messages that a slow reader may be behind before it has to begin again
MAX_READERS: Final = 256
READERS_OF_ONE: Final = 32
TICK_S: Final = 0.25
IDLE_S: Final = 60.0  # until a feed without a reader is forgotten


class JournalEvent(BaseModel):
    """Holds an event of a run's journal: its class, its wall-clock time, and its own fields.

    `why` is the meaning of the codes in the fields as a sentence, "" without a code.
    """

    id: str
    event: str
    at: float
    why: str
    fields: dict[str, Any]


@dataclass
class RunFeed:
    """Keeps the newest events of one run. Only the thread of the event loop changes it."""

    run_id: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    kept: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=KEPT))  # count, JSON
    count: int = 0  # events until now, numbered from 1
    seq: int = 0  # number in the journal of the last one that was read
    readers: set[asyncio.Event] = field(default_factory=set)
    used_at: float = field(default_factory=time.monotonic)
    is_deleted: bool = False  # its run
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, events: list[Event]) -> None:
        """Number the events, write their JSON, and wake the readers."""
        for event in events:
            self.count += 1
            said = JournalEvent(
                id=f"{self.name}-{self.count}", event=type(event).__name__, at=event.at, why=event_sentence(event),
                fields={key: value for key, value in vars(event).items() if key != "at"},
            )  # fmt: skip
            self.kept.append((self.count, said.model_dump_json()))
        if events:
            for reader in self.readers:
                reader.set()

    def after(self, last_id: str) -> int | None:
        """Return the count of the message with this id; None if the feed cannot go on from there."""
        name, _, number = last_id.rpartition("-")
        if name != self.name or not number.isdecimal() or len(number) > 15:
            return None
        oldest = self.kept[0][0] if self.kept else self.count + 1
        return int(number) if oldest - 1 <= int(number) <= self.count else None

    def since(self, count: int) -> list[str] | None:
        """Return the messages after the one with this count; None if some of them are gone."""
        if self.kept and count < self.kept[0][0] - 1:
            return None
        new = list(itertools.takewhile(lambda one: one[0] > count, reversed(self.kept)))
        return [f"id: {self.name}-{number}\nevent: journal\ndata: {said}\n\n" for number, said in reversed(new)]

    def listed(self) -> str:
        """Return the events that are kept as a JSON list, oldest first."""
        return f"[{','.join(said for _, said in self.kept)}]"


class EventFeeds:
    """Keeps the feeds of all runs that somebody follows; `run` reads what is new, and runs until `closing`."""

    def __init__(self, store: Store, closing: Callable[[], bool] = lambda: False) -> None:
        self._store, self._closing = store, closing
        self._feeds: dict[str, RunFeed] = {}
        self.places = Places(MAX_READERS, READERS_OF_ONE)
        self._seen = -1

    async def run(self) -> None:
        """Look four times a second whether there is anything new while somebody reads."""
        while not self._closing():
            if any(feed.readers for feed in self._feeds.values()):
                with contextlib.suppress(ThinwireError):  # the store is not readable now: readers wait
                    await self._look()
            now = time.monotonic()
            for run_id in [key for key, one in self._feeds.items() if not one.readers and now - one.used_at > IDLE_S]:
                del self._feeds[run_id]
            await asyncio.sleep(TICK_S)
        self.close()

    async def _look(self) -> None:
        if (changes := await run_in_threadpool(self._store.changes)) == self._seen:
            return
        for feed in [one for one in self._feeds.values() if one.readers]:
            try:
                await self._read(feed)
            except NotFound:  # its run was deleted: the streams end at their next heartbeat
                feed.is_deleted = True
                self._feeds.pop(feed.run_id, None)
            except ThinwireError:  # this one is read again at the next look; the others are read now
                changes = -1
        self._seen = changes

    async def _read(self, feed: RunFeed) -> None:
        """Add the new events to a feed; the first time, the newest `KEPT`."""
        more = True
        async with feed.reading:
            while more:
                feed.seq, events, more = await run_in_threadpool(self._new, feed)
                feed.add(events)

    def _new(self, feed: RunFeed) -> tuple[int, list[Event], bool]:
        """Return the number of the last event that was read, the new events to show, and whether there are more."""
        first, sampled = feed.seq == 0, is_sampled(self._store.run(feed.run_id).plan)
        found = (  # `KEPT` shown ones: how many of `KEPT` events of all kinds are shown tells how many were sampled
            self._store.newest_events(feed.run_id, KEPT, SHOWN_OF_SAMPLED if sampled else None)
            if first
            else self._store.events(feed.run_id, feed.seq, MAX_BATCH)
        )
        if sampled:
            shown = [one for _, event in found if (one := without_sample(event)) is not None]
        else:
            shown = [event for _, event in found]
        return (found[-1][0] if found else feed.seq), shown, not first and len(found) == MAX_BATCH

    async def of(self, run_id: str) -> RunFeed:
        """Return the feed of a run, up to date; `NotFound` without such a run."""
        row = await run_in_threadpool(self._store.run, run_id)
        feed = self._feeds.setdefault(row.run_id, RunFeed(row.run_id))
        feed.used_at = time.monotonic()
        if not feed.readers:  # else `run` keeps it up to date
            await self._read(feed)
        return feed

    async def stream(
        self, feed: RunFeed, last_id: str, still_known: Callable[[], bool], user: str = ""
    ) -> AsyncGenerator[str, None]:  # fmt: skip
        """Yield the feed's messages after `last_id`, and each new one.

        A reader without `last_id` gets what comes from now on. `reset` tells a reader to read all events again, because
        the feed has forgotten some that follow `last_id`. At each heartbeat `still_known` checks the session.
        """
        reader, session = asyncio.Event(), Watch(still_known)
        with self.places.taken(user) as found:
            if not found:
                return
            feed.readers.add(reader)
            try:
                at = feed.after(last_id) if last_id else feed.count
                yield "retry: 1000\n\n"
                if at is None:
                    at = feed.count
                    yield f"id: {feed.name}-{at}\nevent: reset\ndata: {{}}\n\n"
                while not self._closing():
                    missed = feed.since(at)
                    at = feed.count
                    if missed is None or len(missed) > MAX_BEHIND:
                        yield f"id: {feed.name}-{at}\nevent: reset\ndata: {{}}\n\n"
                    elif missed:
                        yield "".join(missed)
                    if not await session.wait(reader):
                        return
                    if not reader.is_set():
                        yield STILL_HERE
                    reader.clear()
            finally:
                feed.readers.discard(reader)
                feed.used_at = time.monotonic()

    def close(self) -> None:
        """Wake all readers, so that their streams end."""
        for feed in self._feeds.values():
            for reader in feed.readers:
                reader.set()


LastId = Annotated[str, Header(max_length=64)]
FeedsDep = Annotated[EventFeeds, from_state("feeds")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/runs/{run_id}/events", response_model=list[JournalEvent])
async def events(feeds: FeedsDep, run_id: RunId) -> Response:
    """Return the newest events of the run's journal, at most 1000, oldest first."""
    feed = await feeds.of(run_id)
    return Response(feed.listed(), media_type="application/json")


@router.get("/runs/{run_id}/events/stream", response_class=StreamingResponse)
async def stream(request: Request, feeds: FeedsDep, run_id: RunId, last_event_id: LastId = "") -> Response:
    """Stream the run's events; with `Last-Event-ID` from the one after it, or `reset` if that is not kept."""
    feed = await feeds.of(run_id)
    seen = visitor(request)
    if refused := feeds.places.refusal(seen.person.user):
        return refused
    sent = feeds.stream(feed, last_event_id, lambda: not feed.is_deleted and seen.still_known(), seen.person.user)
    return StreamingResponse(sent, media_type="text/event-stream", headers=STREAM)
