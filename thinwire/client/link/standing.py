"""What a client is doing, seen from its link, through which it all goes: a small file that `client status` reads."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import Delivery, Hello, Link, Welcome
from thinwire.core.home import private_opener
from thinwire.core.types import Failure, ReplyHead

FILE = "status.json"


@dataclass(frozen=True)
class Standing:
    """Times are this machine's, in seconds since 1970; `skew_s` is how far its clock is behind the aggregator's.

    `away`: nobody answers, or we are told to come later; `last_error` says which, and stays when that is over.
    """

    state: Literal["connecting", "idle", "working", "away"] = "connecting"
    at: float = 0.0
    connected_at: float | None = None  # since when every call has gone through
    run: str = ""
    round: int = 0
    answered: int = 0  # since this process began
    last_error: str = ""
    last_error_at: float | None = None
    skew_s: float | None = None

    @classmethod
    def load(cls, folder: Path) -> Standing | None:
        """What was written last, by a process that may be gone; None where there is nothing that can be read."""
        try:
            said: dict[str, Any] = json.loads((folder / FILE).read_bytes())
            return cls(**said)
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def save(self, folder: Path) -> None:
        """Replaced whole, but not synced: it says nothing that counts after a power cut, and cards wear out."""
        draft = folder / f".{FILE}.new"
        with contextlib.suppress(OSError):  # a full disk must not end the service
            with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump(asdict(self), file)
            os.replace(draft, folder / FILE)


class Watched:
    """A `Link` like the one inside, whose calls leave what they show in `folder`. Any thread may call it."""

    def __init__(self, inside: Link, folder: Path, wall: Callable[[], float] = time.time) -> None:
        self._link, self._folder, self._wall = inside, folder, wall
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, int]] = {}  # ask -> run and round
        self._at, self._answered = Standing(), 0
        self._now()

    def hello(self, hello: Hello) -> Welcome:
        with self._watched():
            welcome = self._link.hello(hello)
        if welcome.server_time:  # said a moment ago: less than a round trip, whatever the hello waited for before
            self._now(skew_s=round(welcome.server_time - self._wall(), 3))
        return welcome

    def pull(self, wait_s: float) -> Delivery | None:
        with self._watched():
            delivery = self._link.pull(wait_s)
            if delivery is not None and delivery.ask.kind != "stop":
                with self._lock:
                    self._open[delivery.ask.ask_id] = delivery.ask.run, delivery.ask.round
        return delivery

    def push(self, reply: ReplyHead | Failure, bundle: Path | None = None) -> None:
        with self._watched():
            self._link.push(reply, bundle)
            with self._lock:
                self._open.pop(reply.ask_id, None)
                self._answered += 1

    def cancelled(self) -> frozenset[str]:
        return self._link.cancelled()

    def close(self) -> None:
        self._link.close()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """One call: what it raises is kept as the last error, and that it went through as being connected."""
        try:
            yield
        except ThinwireError as error:
            self._now(connected_at=None, last_error=str(error), last_error_at=self._wall())
            raise
        self._now(connected_at=self._at.connected_at or self._wall())

    def _now(self, **changed: Any) -> None:
        with self._lock:
            for ask_id in self._link.cancelled():
                self._open.pop(ask_id, None)
            at = replace(self._at, at=self._wall(), answered=self._answered, **changed)
            if at.connected_at is None:
                at = replace(at, state="connecting" if at.last_error_at is None else "away")
            elif self._open:
                run, number = next(reversed(self._open.values()))
                at = replace(at, state="working", run=run, round=number)
            else:
                at = replace(at, state="idle")
            self._at = at
            at.save(self._folder)
