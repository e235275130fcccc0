"""A run's journal as it grows, read with a connection that stays open: quick enough to be looked at all the time."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.passing import Answer
from thinwire.core.events import Event, RunStatusChanged
from thinwire.store.journal import from_json


class Journal:
    """Of the newest run in `home`, or of none yet. Any thread may call it."""

    def __init__(self, home: Path) -> None:
        self.file = home / "aggregator" / "store.sqlite3"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._seq = 0
        self._outstanding: set[Answer] = set()
        self._seen: defaultdict[str, set[int]] = defaultdict(set)  # kind of event -> rounds
        self.events: list[Event] = []

    def look(self) -> list[Event]:
        """All events so far."""
        with self._lock:
            for seq, kind, body in self._rows():
                self._seq = seq
                event = from_json({**json.loads(body), "event": kind})
                self._take(kind, event)
            return list(self.events)

    def outstanding(self) -> set[Answer]:
        """What was requested and has neither come nor failed."""
        self.look()
        with self._lock:
            return set(self._outstanding)

    def has_answer(self, answer: Answer) -> bool:
        """Whether it has come or failed, or its round was closed."""
        assigned = self.has("RoundOpened", answer.round)
        return assigned and (self.has("RoundClosed", answer.round) or answer not in self.outstanding())

    def has(self, kind: str, number: int) -> bool:
        """Whether there is such an event of this round."""
        self.look()
        return number in self._seen[kind]

    def ended(self) -> str:
        """The status with which the run is over, else ""."""
        said = [e.status for e in self.look() if isinstance(e, RunStatusChanged)]
        return said[-1] if said and said[-1] in ("done", "failed", "stopped") else ""

    def joined_at(self, device: str) -> list[float]:
        """When processes of this device have come, to any process of the aggregator; in seconds since 1970."""
        self.look()
        with self._lock:
            if self._connection is None:
                return []
            wanted = (
                "SELECT json_extract(body, '$.at') FROM journal"
                " WHERE kind = 'DeviceOnline' AND json_extract(body, '$.device') = ? ORDER BY seq"
            )
            return [float(at) for (at,) in self._connection.execute(wanted, (device,))]

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()

    def _rows(self) -> list[tuple[int, str, str]]:
        if self._connection is None:
            if not self.file.exists():
                return []
            self._connection = sqlite3.connect(f"file:{self.file}?mode=ro", uri=True, check_same_thread=False)
            self._connection.execute("PRAGMA busy_timeout=10000")
        try:
            rows = self._connection.execute(
                "SELECT seq, kind, body FROM journal WHERE run_id IS NOT NULL AND seq > ? ORDER BY seq", (self._seq,)
            )
            return rows.fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []

    def _take(self, kind: str, event: Event) -> None:
        said: Any = event
        self.events.append(event)
        if hasattr(event, "round"):
            self._seen[kind].add(said.round)
        if kind == "RoundOpened":
            self._outstanding |= {Answer(said.round, device) for device in said.assignments}
        elif kind in ("ClientSelected", "ClientReconnected"):
            self._outstanding.add(Answer(said.round, said.device))
        elif kind in ("UpdateAccepted", "UpdateDropped", "ClientFailed"):
            self._outstanding.discard(Answer(getattr(said, "assignment_round", said.round), said.device))
