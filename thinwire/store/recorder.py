"""The one way in which a run's facts become durable: journal and read tables in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, select, update

from thinwire.core.errors import NotFound
from thinwire.core.events import DeviceJoined, DeviceLeft, Event, to_json
from thinwire.store.database import Database
from thinwire.store.projection import Facts, Projection
from thinwire.store.tables import Device, Journal, Run


class Recorder:
    """Appends events. After `record` returned they survive a power cut; when it raises, none of them happened."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._facts: dict[str, Facts] = {}

    def record(self, run_id: str, events: Sequence[Event]) -> None:
        """Append a run's events and show what they say; raises `DataLost`."""
        if not events:
            return
        facts = self._facts.get(run_id) or self._find(run_id)
        with self._database.writing() as connection:
            connection.execute(insert(Journal), [_row(run_id, event) for event in events])
            projection = Projection(connection, facts)
            for event in events:
                projection.apply(event)
            projection.finish()

    def record_device(self, event: DeviceJoined | DeviceLeft) -> None:
        """A device came or went: journalled with no run, and shown as online or not."""
        online = isinstance(event, DeviceJoined)
        with self._database.writing() as connection:
            connection.execute(insert(Journal), [_row(None, event)])
            seen = {"online": online, **({"seen_at": event.at} if online else {})}
            connection.execute(update(Device).where(Device.name == event.device), seen)

    def record_restart(self, at: float) -> None:
        """A new life of the aggregator: whoever was online is not, until it comes again."""
        with self._database.writing() as connection:
            online = connection.scalars(select(Device.name).where(Device.online.is_(True))).all()
            if online:
                left = [_row(None, DeviceLeft(at, name, "the aggregator started anew")) for name in online]
                connection.execute(insert(Journal), left)
                connection.execute(update(Device).values(online=False))

    def _find(self, run_id: str) -> Facts:
        with self._database.reading() as connection:
            found = connection.execute(select(Run.size, Run.plan).where(Run.run_id == run_id)).first()
        if found is None:
            raise NotFound(f"no run {run_id!r}")
        return self._facts.setdefault(run_id, Facts(run_id, found.size, found.plan["run"]["metric"]))


def _row(run_id: str | None, event: Event) -> dict[str, object]:
    body = to_json(event)
    return {"run_id": run_id, "at": event.at, "kind": body.pop("event"), "body": body}
