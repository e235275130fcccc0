"""Bound the event streams of the dashboard: how many there may be, and when they end.

A stream lasts for hours, so the guard's look at its session is not enough: `Watch` looks again while it lasts. And a
stream is an open connection, of which the server takes `MOST_CONNECTIONS`: `Places` bounds the streams of one user, so
that nobody takes those of all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from thinwire.web.problems import problem

HEARTBEAT_S: Final = 15.0
MOST_CONNECTIONS: Final = 512  # the sum of all places and strangers is less, so that a page always finds one
STILL_HERE: Final = ": still here\n\n"


class Watch:
    """Waits for news of a stream, and looks each `HEARTBEAT_S` whether its session is still open, news or not."""

    def __init__(self, still_known: Callable[[], bool]) -> None:
        self._still_known, self._looked_at = still_known, time.monotonic()

    async def wait(self, news: asyncio.Event) -> bool:
        """Return once there is news, or after `HEARTBEAT_S` without; False if the session has ended."""
        due = self._looked_at + HEARTBEAT_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), max(0.0, due - time.monotonic()))
            if time.monotonic() < due:
                return True
        self._looked_at = time.monotonic()
        return await run_in_threadpool(self._still_known)


class Places:
    """Counts the places of one kind of stream: so many in all, and fewer of them for each user, tokens included."""

    def __init__(self, most: int, of_one: int) -> None:
        self.most, self.of_one = most, of_one
        self._taken: Counter[str] = Counter()

    def refusal(self, user: str) -> Response | None:
        """Return the error for a user who gets no further stream; None for one who does."""
        if self._taken[user] >= self.of_one:
            return problem(503, "you have too many tabs open", f"a user gets {self.of_one} streams", "close some")
        if self._taken.total() >= self.most:
            return problem(503, "too many tabs are open", f"at most {self.most} get news", "close some")
        return None

    @contextlib.contextmanager
    def taken(self, user: str) -> Iterator[bool]:
        """Take a place while the block runs; it yields False if another request was faster and there is none."""
        if self.refusal(user) is not None:
            yield False
            return
        self._taken[user] += 1
        try:
            yield True
        finally:
            self._taken[user] -= 1
            if not self._taken[user]:
                del self._taken[user]
