"""How many asks a device let in today, on disk before the work begins: a kill in between counts it all the same.

One file, `policy.json`: the day, and the keys of what was let in on it. Law: of each kind at most `rounds_a_day`
answers are made on one day, whatever is killed, sent again or renamed. A key stands for one answer: an ask comes
again with the same key until it was answered, and with another one after, so that asking twice under one id counts
twice. A file that cannot be read lets nothing in: it may have been full.
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
SLACK = timedelta(hours=1)  # a clock that is set right steps back by less; a day must not come twice


@dataclass(frozen=True)
class Day:
    """What was let in on a day: kind of ask -> keys. `at` is when this was written, the latest time ever seen."""

    date: date
    at: datetime
    let_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def has(self, kind: str, key: str) -> bool:
        return key in self.let_in.get(kind, ())

    def count(self, kind: str) -> int:
        return len(self.let_in.get(kind, ()))

    def on(self, now: datetime) -> Day:
        """This day, or a new one where one has begun; time never goes back here."""
        if now.date() > self.date:
            return Day(now.date(), now)
        return replace(self, at=max(now, self.at))

    def with_one(self, kind: str, key: str) -> Day:
        if self.has(kind, key):
            return self
        return replace(self, let_in={**self.let_in, kind: (*self.let_in.get(kind, ()), key)})


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


def key_of(ask: Ask, sequence: int) -> str:
    """What stands for the one answer that this ask can get: `sequence` is the last that was given in its run."""
    said = json.dumps([ask.run, ask.ask_id, sequence])
    return hashlib.sha256(said.encode()).hexdigest()[:32]
