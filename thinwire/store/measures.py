"""What is known of each device's link and speed: rows that are replaced whole, in the commit of what they come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from thinwire.store.database import Database
from thinwire.store.rows import MeasureRow
from thinwire.store.tables import Measure

FIELDS = [field.name for field in dataclasses.fields(MeasureRow)]


def keep(connection: Connection, rows: Sequence[MeasureRow]) -> None:
    """Put these in the place of those of the same device, kind and work."""
    for row in rows:
        connection.execute(delete(Measure).filter_by(device=row.device, kind=row.kind, work=row.work))
    if rows:
        connection.execute(insert(Measure), [dataclasses.asdict(row) for row in rows])


def all_of(database: Database, kinds: Sequence[str] = ()) -> list[MeasureRow]:
    """By device, kind and work: all, or those of some kinds."""
    wanted = select(*(getattr(Measure, name) for name in FIELDS)).order_by(Measure.device, Measure.kind, Measure.work)
    if kinds:
        wanted = wanted.where(Measure.kind.in_(kinds))
    with database.reading() as connection:
        return [MeasureRow(**found) for found in connection.execute(wanted).mappings()]
