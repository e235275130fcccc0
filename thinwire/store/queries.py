"""Queries: reading runs, rounds, assignments, devices and measurements as frozen rows."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, case, func, select

from thinwire.core.errors import NotFound
from thinwire.core.fleet import DeviceRow, TaskReport
from thinwire.core.types import PHASES
from thinwire.store.database import Base, Database, upsert
from thinwire.store.read_models import (
    ClientRow,
    DeviceInfo,
    MeasureRow,
    ModelRow,
    PhaseRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from thinwire.store.tables import Checkpoint, Client, Device, Measure, Round, RoundPhase, Run, Update

Row = TypeVar("Row", RoundRow, UpdateRow, ClientRow)


class RunQueries:
    """Reads runs, rounds, assignments, devices and measurements; each call is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def runs(self) -> list[RunRow]:
        """Return all runs, latest first."""
        return [_run(found) for found in _all(self._database, _columns(Run, RunRow).order_by(Run.number.desc()))]

    def run(self, name: str) -> RunRow:
        """Return the run of this id, of a unique prefix of one, or the `latest`; raise `NotFound` if there is none."""
        with self._database.reading() as connection:
            ids = {
                row.run_id: row.status
                for row in connection.execute(select(Run.run_id, Run.status).order_by(Run.number))
            }
            whole = [run_id for run_id, status in ids.items() if status != "preparing"]
            found = whole[-1] if name == "latest" and whole else _named(name, list(ids))
            return _run(connection.execute(_columns(Run, RunRow).where(Run.run_id == found)).mappings().one())

    def line(self, most: int | None = None) -> list[RunRow]:
        """Return the runs on devices in the order of service: a started one, then the queue, oldest first."""
        turn = case({"running": 0, "waiting": 1, "queued": 2}, value=Run.status)
        there = Run.status.in_(("running", "waiting", "queued")) & (Run.source == "devices")
        wanted = _columns(Run, RunRow).where(there).order_by(turn, Run.number).limit(most)
        return [_run(found) for found in _all(self._database, wanted)]

    def next_run(self) -> RunRow | None:
        """Return the run to serve now, the first of `line`, or None."""
        return next(iter(self.line(most=1)), None)

    def owned(self) -> list[RunRow]:
        """Return the unfinished runs that a process of their own simulates or has not submitted yet."""
        going = Run.status.in_(("queued", "waiting", "running")) & (Run.source == "sim")
        wanted = _columns(Run, RunRow).where(going | (Run.status == "preparing"))
        return [_run(found) for found in _all(self._database, wanted.order_by(Run.number))]

    def rounds(
        self, run_id: str, first: int = 1, last: int | None = None, *, changed_after: int = 0
    ) -> list[RoundRow]:  # fmt: skip
        """Return the rounds of a run from `first` to `last`; only those whose `changed` is above `changed_after`."""
        there = (Update.run_id == Round.run_id) & (Update.round == Round.round) & (Update.outcome == "accepted")
        arrived = case((Round.reason == "", select(func.count()).where(there).scalar_subquery()), else_=0)
        wanted = _columns(Round, RoundRow, arrived=arrived).where(Round.run_id == run_id)
        if changed_after:
            wanted = wanted.where(Round.changed > changed_after)
        if first > 1:
            wanted = wanted.where(Round.round >= first)
        if last is not None:
            wanted = wanted.where(Round.round <= last)
        found = sorted(_all(self._database, wanted), key=lambda row: int(row["round"]))  # each by its own index
        return [RoundRow(**row) for row in found]

    def updates(self, run_id: str, round: int | None = None, last: int | None = None) -> list[UpdateRow]:  # noqa: A002
        """Return one row for each assignment of the run, of one of its rounds, or of those from `round` to `last`."""
        wanted = _columns(Update, UpdateRow).where(Update.run_id == run_id)
        if round is not None:
            wanted = wanted.where(Update.round.between(round, round if last is None else last))
        ordered = wanted.order_by(Update.round, Update.device, Update.assigned_at)
        return [UpdateRow(**found) for found in _all(self._database, ordered)]

    def phases(self, run_id: str, round: int | None = None) -> list[PhaseRow]:  # noqa: A002
        """Return the closed phases of the run's rounds, or of one, in order; none without secure aggregation."""
        own = RoundPhase.__table__.columns
        wanted = select(RoundPhase.__table__).where(own.run_id == run_id).order_by(own.round)
        if round is not None:
            wanted = wanted.where(own.round == round)
        rows = sorted(_all(self._database, wanted), key=lambda row: (row["round"], PHASES.index(row["phase"])))
        shown, before = list[PhaseRow](), (0, 0.0)
        for row in rows:
            since = before[1] if before[0] == row["round"] else 0.0
            shown.append(
                PhaseRow(
                    **{name: row[name] for name in row if name != "run_id"}, seconds=max(0.0, row["elapsed_s"] - since)
                )
            )
            before = row["round"], row["elapsed_s"]
        return shown

    def clients(self, run_id: str) -> list[ClientRow]:
        """Return each device's part in a run, by name."""
        wanted = _columns(Client, ClientRow).where(Client.run_id == run_id).order_by(Client.device)
        return [ClientRow(**found) for found in _all(self._database, wanted)]

    def models(self, run_id: str) -> list[ModelRow]:
        """Return the model versions of a run, oldest first."""
        wanted = _columns(Checkpoint, ModelRow).where(Checkpoint.run_id == run_id).order_by(Checkpoint.version)
        return [
            ModelRow(**{**found, "parts": [(name, length, digest) for name, length, digest in found["parts"]]})
            for found in _all(self._database, wanted)
        ]

    def devices(self) -> list[DeviceInfo]:
        """Return all devices by name."""
        with self._database.reading() as connection:
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
                device_row(d), d["online"], d["seen_at"], max(filter(None, (d["seen_at"], d["last_seen_at"])),
                    default=None),
                d["hello"], *sums.get(d["name"], (0, 0, "")),
            )
            for d in known
        ]  # fmt: skip

    def measures(self, *kinds: str) -> list[MeasureRow]:
        """Return the measured links and speeds of all devices, over all runs on devices.

        With `kinds`, only measurements of these kinds are returned.
        """
        wanted = _columns(Measure, MeasureRow).order_by(Measure.device, Measure.kind, Measure.work)
        if kinds:
            wanted = wanted.where(Measure.kind.in_(kinds))
        return [MeasureRow(**found) for found in _all(self._database, wanted)]

    def aggregated_rounds(self, device: str) -> list[tuple[str, list[int]]]:
        """Return (run, rounds) for a device's aggregated updates, which stay in the model when it is revoked."""
        aggregated = (
            Update.outcome.in_(("aggregated", "aggregated-late"))
            & Update.aggregated_round.is_not(None)
            & (Run.source == "devices")
        )
        wanted = select(Run.run_id, Update.aggregated_round).join(Run, Run.run_id == Update.run_id)
        ordered = (
            wanted.where(Update.device == device, aggregated).order_by(Run.number, Update.aggregated_round).distinct()
        )
        with self._database.reading() as connection:
            found = connection.execute(ordered.add_columns(Run.number)).all()
        rounds: dict[str, list[int]] = {}
        for run_id, number, _ in found:
            rounds.setdefault(run_id, []).append(int(number or 0))
        return list(rounds.items())

    def device_updates(self, name: str, limit: int = 50) -> list[UpdateRow]:
        """Return a device's last assignments and their outcomes over all runs on devices, latest first."""
        mine = (Client.run_id == Update.run_id) & (Client.device == name)  # uses an index to find the device's runs
        wanted = _columns(Update, UpdateRow).join(Client, mine).join(Run, Run.run_id == Update.run_id)
        wanted = wanted.where(Update.device == name, Run.source == "devices")
        wanted = wanted.order_by(Run.number.desc(), Update.round.desc(), Update.assigned_at.desc()).limit(limit)
        return [UpdateRow(**found) for found in _all(self._database, wanted)]


def device_row(found: Mapping[str, Any] | RowMapping) -> DeviceRow:
    """Make a `DeviceRow` of a row of the table."""
    return DeviceRow(**{name: found[name] for name in DeviceRow.__dataclass_fields__})


def _columns(table: type[Base], row: type[Any], **computed: ColumnElement[Any]) -> Select[Any]:
    """Return a select of the table's own columns: attributes of a mapped class take five times as long to compile."""
    own = table.__table__.columns
    return select(*(computed[name].label(name) if name in computed else own[name] for name in row.__dataclass_fields__))


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


def keep(connection: Connection, rows: Sequence[MeasureRow]) -> None:
    """Store measurements in the commit of the replies that they come from.

    They replace those of the same device, kind and work.
    """
    upsert(connection, Measure, [dataclasses.asdict(row) for row in rows])
