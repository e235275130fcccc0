"""Count the assignments that a device admitted today, on disk before the work begins: a kill does not undo a count.

One file, `policy.json`: the day, and a key for each attempt at an assignment. `KEY` is open: its work may go on.
`KEY-` has ended: with a reply, with a failure, or withdrawn. The same assignment after that is another attempt, and
counts. `KEY+` is an open attempt that was begun again, after a restart of this process: that is free, `FREE` times.

Invariant: of each kind at most `rounds_a_day` attempts begin on one day, whatever the aggregator repeats or renames;
only a restart of the client repeats one for free, and at most `FREE` times. A file that cannot be read admits
nothing: it may have been full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from pathlib import Path

from thinwire.client.disk.state import Write
from thinwire.core.errors import DataLost
from thinwire.core.home import write_atomically
from thinwire.core.types import Ask

FILE = "policy.json"
FORMAT = 1
RELEASED = datetime(2026, 1, 1).astimezone()  # this program is not older: a clock before it was never set
FREE = (
    3  # times that one attempt is begun again: a device with a bad battery finishes its round, a loop of crashes ends
)
ENDED, RESUMED = "-", "+"  # after a key
SLACK = timedelta(hours=1)  # a clock that is set right steps back by less; a day must not come twice


@dataclass(frozen=True)
class Day:
    """What was admitted on a day: kind -> keys with their marks. `at` is when this was written, the latest time ever
    seen.
    """

    date: date
    at: datetime
    let_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_free(self, kind: str, key: str) -> bool:
        """Return whether this key is open and may be begun again without being counted."""
        keys = self.let_in.get(kind, ())
        return key in keys and keys.count(key + RESUMED) < FREE

    def count(self, kind: str) -> int:
        """Return how many attempts of this kind were counted."""
        return sum(not key.endswith(RESUMED) for key in self.let_in.get(kind, ()))

    def on(self, now: datetime) -> Day:
        """This day, or a new one where one has begun; time never goes back here."""
        if now.date() > self.date:
            return Day(now.date(), now)
        return replace(self, at=max(now, self.at))

    def with_one(self, kind: str, key: str) -> Day:
        """Return the day with one more attempt; an open one is begun again for free as long as `is_free`."""
        if self.is_free(kind, key):
            return self._with(kind, (*self.let_in[kind], key + RESUMED))
        ended = self.with_end(kind, key)
        return ended._with(kind, (*ended.let_in.get(kind, ()), key))

    def with_end(self, kind: str, key: str) -> Day:
        """Return the day in which this key's attempt has ended; a key that is not open changes nothing."""
        keys = self.let_in.get(kind, ())
        if key not in keys:
            return self
        left = (other for other in keys if other != key + RESUMED)
        return self._with(kind, tuple(other + ENDED if other == key else other for other in left))

    def _with(self, kind: str, keys: tuple[str, ...]) -> Day:
        return replace(self, let_in={**self.let_in, kind: keys})


class DayFile:
    """The file of one device. `DataLost` from `read`: it is damaged; from `keep`: the disk refuses."""

    def __init__(self, folder: Path, write: Write = write_atomically) -> None:
        self.path, self._write = folder / FILE, write

    def read(self) -> Day | None:
        """The last day that was kept; None before the first."""
        try:
            raw = json.loads(self.path.read_bytes())
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']!r}")
            kept = {str(kind): tuple(map(str, keys)) for kind, keys in raw["let_in"].items()}
            at = datetime.fromisoformat(raw["at"])
            if at.tzinfo is None or not all(isinstance(keys, list) for keys in raw["let_in"].values()):
                raise ValueError("it is not what was written")
            return Day(date.fromisoformat(raw["date"]), at, kept)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLost(
                f"{FILE} on this device cannot be read",
                why=f"{self.path}: {type(error).__name__}",
                hint=f"look at it, then delete it: counting begins anew ({self.path})",
            ) from error

    def keep(self, day: Day) -> None:
        raw = {"format": FORMAT, "date": day.date.isoformat(), "at": day.at.isoformat(), "let_in": dict(day.let_in)}
        self._write(self.path, json.dumps(raw, separators=(",", ":")).encode())


def believed(now: datetime, last: Day | None, skew_s: float = 0.0) -> str:
    """Why this clock cannot be believed, or "" when it can: a Pi boots without one.

    The aggregator's clock (this one is `skew_s` behind it) can raise a doubt and never settle one: else who asks would
    also say what time it is.
    """
    if now < RELEASED:
        return "this device's clock has not been set"
    if last is not None and now < last.at - SLACK:
        return f"this device's clock was set back; where that is right, {FILE} on this device can be deleted"
    if abs(skew_s) > SLACK.total_seconds():
        return f"this device's clock and the aggregator's are {abs(skew_s) / 3600:.1f} hours apart"
    return ""


def key_of(ask: Ask) -> str:
    """Return what stands for this assignment in the counts."""
    said = json.dumps([ask.run, ask.identity, ask.ask_id])
    return hashlib.sha256(said.encode()).hexdigest()[:32]
