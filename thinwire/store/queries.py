"""Queries: reading runs, rounds, assignments, devices and measurements as frozen rows."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, case, delete, func, insert, select

from thinwire.core.errors import NotFound
from thinwire.core.events import DeviceTold
from thinwire.core.fleet import DeviceRow, TaskReport
from thinwire.store.audit import by_todays_name
from thinwire.store.database import Base, Database
from thinwire.store.device_tables import Action, Device
from thinwire.store.read_models import (
    ClientRow,
    DeviceAction,
    DeviceInfo,
    MeasureRow,
    ModelRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from thinwire.store.run_tables import Checkpoint, Client, Journal, Measure, Round, Run, Update

Row = TypeVar("Row", RoundRow, UpdateRow, ClientRow)


def runs(database: Database) -> list[RunRow]:
    """Return all runs, latest first."""
    return [_run(found) for found in _all(database, _columns(Run, RunRow).order_by(Run.number.desc()))]


def run(database: Database, name: str) -> RunRow:
    """Return the run of this id, of a unique prefix of one, or the `latest`.

    Raise `NotFound`, which names similar ids.
    """
    with database.reading() as connection:
        ids = {
            row.run_id: row.status for row in connection.execute(select(Run.run_id, Run.status).order_by(Run.number))
        }
        whole = [run_id for run_id, status in ids.items() if status != "preparing"]
        found = whole[-1] if name == "latest" and whole else _named(name, list(ids))
        return _run(connection.execute(_columns(Run, RunRow).where(Run.run_id == found)).mappings().one())


def line(database: Database, most: int | None = None) -> list[RunRow]:
    """Return the runs on devices in the order in which they are served: a started one, then the queue, oldest first."""
    turn = case({"running": 0, "waiting": 1, "queued": 2}, value=Run.status)
    there = Run.status.in_(("running", "waiting", "queued")) & (Run.source == "devices")
    wanted = _columns(Run, RunRow).where(there).order_by(turn, Run.number).limit(most)
    return [_run(found) for found in _all(database, wanted)]


def owned(database: Database) -> list[RunRow]:
    """Return the runs that no aggregator resumes: unfinished simulated ones, and those not in the queue yet."""
    going = Run.status.in_(("queued", "waiting", "running")) & (Run.source == "sim")
    wanted = _columns(Run, RunRow).where(going | (Run.status == "preparing"))
    return [_run(found) for found in _all(database, wanted.order_by(Run.number))]


def ended_since(database: Database, since: float) -> list[RunRow]:
    """Return the runs on devices that ended since a time (wall clock), oldest first."""
    over = Run.status.in_(("done", "failed", "stopped")) & (Run.source == "devices") & (Run.finished_at >= since)
    return [_run(found) for found in _all(database, _columns(Run, RunRow).where(over).order_by(Run.number))]


def rounds(database: Database, run_id: str) -> list[RoundRow]:
    """Return the run's rounds from 1 on."""
    there = (Update.run_id == Round.run_id) & (Update.round == Round.round) & (Update.outcome == "accepted")
    arrived = case((Round.reason == "", select(func.count()).where(there).scalar_subquery()), else_=0)
    wanted = _columns(Round, RoundRow, arrived=arrived).where(Round.run_id == run_id).order_by(Round.round)
    return [RoundRow(**found) for found in _all(database, wanted)]


def updates(database: Database, run_id: str, round_number: int | None = None) -> list[UpdateRow]:
    """Return one row for each assignment of the run or of one round, by round, device and time."""
    wanted = _columns(Update, UpdateRow).where(Update.run_id == run_id)
    if round_number is not None:
        wanted = wanted.where(Update.round == round_number)
    ordered = wanted.order_by(Update.round, Update.device, Update.asked_at)
    return [UpdateRow(**found) for found in _all(database, ordered)]


def device_updates(database: Database, device: str, limit: int) -> list[UpdateRow]:
    """Return a device's last assignments in runs on devices, latest first."""
    mine = (Client.run_id == Update.run_id) & (Client.device == device)  # uses an index to find the device's runs
    wanted = _columns(Update, UpdateRow).join(Client, mine).join(Run, Run.run_id == Update.run_id)
    wanted = wanted.where(Update.device == device, Run.source == "devices")
    wanted = wanted.order_by(Run.number.desc(), Update.round.desc(), Update.asked_at.desc()).limit(limit)
    return [UpdateRow(**found) for found in _all(database, wanted)]


def clients(database: Database, run_id: str) -> list[ClientRow]:
    """Return each device's part in a run, by name."""
    wanted = _columns(Client, ClientRow).where(Client.run_id == run_id).order_by(Client.device)
    return [ClientRow(**found) for found in _all(database, wanted)]


def models(database: Database, run_id: str) -> list[ModelRow]:
    """Return the stored versions, oldest first; the files of some may have been pruned."""
    wanted = _columns(Checkpoint, ModelRow).where(Checkpoint.run_id == run_id).order_by(Checkpoint.version)
    return [
        ModelRow(**{**found, "parts": [(name, length, digest) for name, length, digest in found["parts"]]})
        for found in _all(database, wanted)
    ]


def devices(database: Database) -> list[DeviceInfo]:
    """Return all devices by name, with their contributions to runs on devices."""
    with database.reading() as connection:
        known = connection.execute(select(*Device.__table__.c).order_by(Device.name)).mappings().all()
        parts = select(Client.device, Client.arrived, Client.payload_up, Client.last_outcome).join(
            Run, (Run.run_id == Client.run_id) & (Run.source == "devices")
        )
        done = connection.execute(parts.order_by(func.coalesce(Client.last_at, 0.0))).all()
    sums: dict[str, tuple[int, int, str]] = {}
    for device, arrived, payload, outcome in done:
        before = sums.get(device, (0, 0, ""))
        sums[device] = (before[0] + arrived, before[1] + payload, outcome or before[2])
    return [
        DeviceInfo(
            device_row(d), d["online"], d["seen_at"], max(filter(None, (d["seen_at"], d["heard_at"])), default=None),
            d["hello"], *sums.get(d["name"], (0, 0, "")),
        )
        for d in known
    ]  # fmt: skip


def folded_rounds(database: Database, device: str) -> list[tuple[str, list[int]]]:
    """Return (run, rounds) for a device's aggregated updates in runs on devices, oldest run first."""
    folded = Update.outcome.in_(("folded", "late")) & Update.folded_round.is_not(None) & (Run.source == "devices")
    wanted = select(Run.run_id, Update.folded_round).join(Run, Run.run_id == Update.run_id)
    ordered = wanted.where(Update.device == device, folded).order_by(Run.number, Update.folded_round).distinct()
    with database.reading() as connection:
        found = connection.execute(ordered.add_columns(Run.number)).all()
    rounds: dict[str, list[int]] = {}
    for run_id, number, _ in found:
        rounds.setdefault(run_id, []).append(int(number or 0))
    return list(rounds.items())


def device_row(found: Mapping[str, Any] | RowMapping) -> DeviceRow:
    """Make a `DeviceRow` of a row of the table."""
    return DeviceRow(**{name: found[name] for name in DeviceRow.__dataclass_fields__})


def _columns(table: type[Base], row: type[Any], **computed: ColumnElement[Any]) -> Select[Any]:
    return select(
        *(computed[name].label(name) if name in computed else getattr(table, name) for name in row.__dataclass_fields__)
    )


def _all(database: Database, wanted: Select[Any]) -> list[dict[str, Any]]:
    with database.reading() as connection:
        return [dict(found) for found in connection.execute(wanted).mappings()]


def _run(found: Mapping[str, Any] | RowMapping) -> RunRow:
    report = dict(found["task_report"])
    return RunRow(**{**found, "task_report": TaskReport(**{**report, "codecs": tuple(report["codecs"])})})


def _named(name: str, ids: list[str]) -> str:
    if name in ids:
        return name
    found = [run_id for run_id in ids if name and run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{name!r} begins the names of {len(found)} runs", hint=" or ".join(found[-3:]))
    if not ids:
        raise NotFound(f"no run {name!r}", why="there are no runs yet", hint="thinwire run PLAN")
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.4) or ids[-3:]
    raise NotFound(f"no run {name!r}", why="no run's id is that, or begins so", hint=" or ".join(near))


FIELDS = [field.name for field in dataclasses.fields(MeasureRow)]


def keep(connection: Connection, rows: Sequence[MeasureRow]) -> None:
    """Store measurements in the commit of the replies that they come from.

    They replace those of the same device, kind and work.
    """
    for row in rows:
        connection.execute(delete(Measure).filter_by(device=row.device, kind=row.kind, work=row.work))
    if rows:
        connection.execute(insert(Measure), [dataclasses.asdict(row) for row in rows])


def all_of(database: Database, kinds: Sequence[str] = ()) -> list[MeasureRow]:
    """Return the measurements of all kinds or of these, by device, kind and work."""
    wanted = select(*(getattr(Measure, name) for name in FIELDS)).order_by(Measure.device, Measure.kind, Measure.work)
    if kinds:
        wanted = wanted.where(Measure.kind.in_(kinds))
    with database.reading() as connection:
        return [MeasureRow(**found) for found in connection.execute(wanted).mappings()]


def behind(row: RunRow, line: Sequence[RunRow]) -> str:
    """Describe which runs a queued run waits for; `line` is the result of `Store.line()`.

    Return "" for a run that is served now, has ended, or is simulated and so waits for no other.
    """
    ids = [one.run_id for one in line]
    if row.status != "queued" or row.run_id not in ids[1:]:
        return ""
    first = line[0]
    does = first.status_text if first.status == "waiting" else first.status
    between = ids[1 : ids.index(row.run_id)]
    if not between:
        return f"waiting in the queue behind {first.run_id}, which is {does}"
    others = between[0] if len(between) == 1 else f"{len(between)} more"
    return f"waiting in the queue behind {first.run_id} and {others}; {first.run_id} is {does}"


TOLD = "told"  # marks a confirmation in the list of renames


def untold(database: Database, run_id: str) -> list[str]:
    """Return the devices of a run that have not confirmed that they know of its end.

    The journal records confirmations by the names that the devices had then.
    """
    said = select(Journal.body).where(Journal.run_id == run_id, Journal.kind == DeviceTold.__name__)
    columns = (getattr(Action, name) for name in DeviceAction.__dataclass_fields__)
    renames = select(*columns).where(Action.what == "rename").order_by(Action.id.desc())
    with database.reading() as connection:
        asked = connection.scalars(select(Client.device).where(Client.run_id == run_id).order_by(Client.device)).all()
        told = [DeviceTold(**body) for body in connection.scalars(said)]
        happened = [DeviceAction(**row) for row in connection.execute(renames).mappings()]
    happened += [DeviceAction(one.at, "", one.device, TOLD, "") for one in told]
    happened.sort(key=lambda one: one.at, reverse=True)
    heard = {today for today, one in by_todays_name(happened) if one.what == TOLD}
    return [device for device in asked if device not in heard]
