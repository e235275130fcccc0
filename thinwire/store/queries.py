"""Queries: reading runs, rounds, assignments, devices and measurements as frozen rows."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import RowMapping, bindparam, case, func, select

from thinwire.core.errors import NotFound
from thinwire.core.events import ENDED
from thinwire.core.fleet import DeviceRow
from thinwire.core.types import PHASES
from thinwire.store.database import Database, as_row, columns_of, dicts
from thinwire.store.read_models import (
    ClientRow,
    DeviceInfo,
    MeasureRow,
    ModelRow,
    PhaseRow,
    PointRow,
    RoundRow,
    RunRow,
    UpdateRow,
    WorkRow,
)
from thinwire.store.round_explanation import RoundExplanation, stored
from thinwire.store.run_list import ALL, ClientKey, RunFilter, SortKey, clients_in_order, counts_of, ids_of, in_order
from thinwire.store.tables import Checkpoint, Client, Device, Measure, Round, RoundPhase, Run, Update
from thinwire.store.work_queue import run_row


class RunQueries:
    """Reads runs, rounds, assignments, devices and measurements; each call is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def runs(self, with_deleted: bool = False) -> list[RunRow]:
        """Return all runs, latest first; with those that a person deleted only if it is said."""
        wanted = columns_of(Run, RunRow).order_by(Run.c.number.desc())
        if not with_deleted:
            wanted = wanted.where(Run.c.deleted_at.is_(None))
        return [run_row(found) for found in self._database.rows(wanted)]

    def some_runs(
        self, found: RunFilter = ALL, sort: SortKey = "number", descending: bool = True, first: int = 0, limit: int = 50
    ) -> list[RunRow]:  # fmt: skip
        """Return a page of the runs that match, in this order."""
        return self.runs_of(ids_of(self._database, found, sort, descending, first, limit))

    def runs_of(self, ids: Sequence[str]) -> list[RunRow]:
        """Return the runs with these ids, in their order; an unknown id is left out."""
        places = in_order(ids)
        rows = map(run_row, self._database.rows(columns_of(Run, RunRow).where(Run.c.run_id.in_(ids)))) if ids else ()
        return sorted(rows, key=lambda row: places[row.run_id])

    def run_ids(self, found: RunFilter = ALL) -> list[str]:
        """Return the ids of all runs that match, latest first."""
        return ids_of(self._database, found)

    def run_counts(self, found: RunFilter = ALL) -> tuple[int, dict[str, int]]:
        """Return how many runs match, and how many of all runs have each status."""
        return counts_of(self._database, found)

    def run(self, name: str) -> RunRow:
        """Return the run of this id, of a unique prefix of one, or the `latest`.

        Raise `NotFound` if there is none, or if a person deleted it (then with who and when).
        """
        with self._database.reading() as connection:
            row = connection.execute(_RUN, {"the_run": name}).mappings().first()
            if row is None:
                ids = {found.run_id: found.status for found in connection.execute(_IDS)}
                whole = [run_id for run_id, status in ids.items() if status != "preparing"]
                found = whole[-1] if name == "latest" and whole else _named(name, list(ids))
                row = connection.execute(_RUN, {"the_run": found}).mappings().one()
        if row["deleted_at"]:
            raise deleted(run_row(row))
        return run_row(row)

    def deleted_run(self, run_id: str) -> RunRow | None:
        """Return what is left of a run that a person deleted; None for any other id."""
        wanted = columns_of(Run, RunRow).where(Run.c.run_id == run_id, Run.c.deleted_at.is_not(None))
        return next((run_row(found) for found in self._database.rows(wanted)), None)

    def rounds(
        self, run_id: str, first: int = 1, last: int | None = None, *, changed_after: int = 0, limit: int | None = None
    ) -> list[RoundRow]:  # fmt: skip
        """Return the rounds of a run from `first` to `last`; only those whose `changed` is above `changed_after`.

        At most `limit` are returned, whichever.
        """
        wanted, numbers = _ROUNDS.where(_ROUND.run_id == run_id), _ROUND.round
        if changed_after:
            wanted = wanted.where(_ROUND.changed > changed_after)
        if first > 1:
            wanted = wanted.where(numbers >= first)
        if last is not None:
            wanted = wanted.where(numbers <= last)
        found = self._database.rows(wanted.limit(limit))
        found.sort(key=lambda row: int(row["round"]))  # with ORDER BY, SQLite would not use the index of `changed`
        return [as_row(RoundRow, row) for row in found]

    def rounds_of(self, run_id: str, numbers: Collection[int]) -> list[RoundRow]:
        """Return these rounds of a run."""
        return [row for number in sorted(numbers) for row in self.rounds(run_id, number, number)]

    def rounds_with(self, run_id: str, versions: Collection[int]) -> list[RoundRow]:
        """Return the rounds after which a run had these model versions: the first with each version made it."""
        wanted = _ROUNDS.where(_ROUND.run_id == run_id, _ROUND.version.in_(versions)).order_by(_ROUND.round)
        return [as_row(RoundRow, row) for row in self._database.rows(wanted)]

    def round_count(self, run_id: str) -> tuple[int, int]:
        """Return how many rounds a run has opened, and the number of the last transaction that changed one."""
        with self._database.reading() as connection:
            opened, changed = connection.execute(_COUNT, {"the_run": run_id}).one()
        return int(opened or 0), int(changed or 0)

    def open_rounds(self, run_id: str, first: int, last: int) -> list[int]:
        """Return the numbers of the open rounds from `first` to `last`."""
        wanted = select(Round.c.round).where(
            Round.c.run_id == run_id, Round.c.round.between(first, last), Round.c.reason == ""
        )
        with self._database.reading() as connection:
            return list(connection.scalars(wanted.order_by(Round.c.round)))

    def points(self, run_id: str, most: int) -> list[PointRow]:
        """Return the measured rounds of a run as points of its curves: every one, or every 2nd, 4th, 8th of them.

        At most `most` + 1 are returned, with the first and the newest. Invariant: no more rows are read than are
        returned, and the points stay as they are until their number is halved.
        """
        newest = select(func.max(Round.c.point)).where(Round.c.run_id == run_id)
        with self._database.reading() as connection:
            count = int(connection.scalar(newest) or 0)
            step = 1 << max(0, math.ceil(math.log2(max(1, count) / most)))
            numbers = {1, *range(step, count, step), count}
            wanted = columns_of(Round, PointRow).where(Round.c.run_id == run_id, Round.c.point.in_(numbers))
            return [as_row(PointRow, found) for found in dicts(connection.execute(wanted.order_by(Round.c.point)))]

    def explanations(self, run_id: str, first: int = 1, last: int | None = None) -> list[RoundExplanation]:
        """Return the stored explanations of the closed rounds from `first` to `last`."""
        columns = select(Round.c.round, Round.c.seconds, Round.c.explanation)
        wanted = columns.where(Round.c.run_id == run_id, Round.c.round >= first, Round.c.reason != "")
        if last is not None:
            wanted = wanted.where(Round.c.round <= last)
        with self._database.reading() as connection:
            return [stored(*found) for found in connection.execute(wanted.order_by(Round.c.round))]

    def slowest_rounds(self, run_id: str, count: int) -> list[RoundExplanation]:
        """Return the stored explanations of the closed rounds that took longest, the slowest first.

        An index has the rounds in this order, so no others are read.
        """
        wanted = select(Round.c.round, Round.c.seconds, Round.c.explanation).where(Round.c.run_id == run_id)
        slowest = wanted.where(Round.c.seconds > 0).order_by(Round.c.seconds.desc(), Round.c.round.desc()).limit(count)
        with self._database.reading() as connection:
            return [stored(*found) for found in connection.execute(slowest) if found[2]]

    def most_waited_for(self, run_id: str) -> tuple[dict[str, int], dict[str, int]]:
        """Return the client that was the slowest of a round most often, and the one waited for in vain, with counts."""
        found = list[dict[str, int]]()
        with self._database.reading() as connection:
            for column in (Client.c.times_slowest, Client.c.times_silent):
                wanted = select(Client.c.device, column).where(Client.c.run_id == run_id, column > 0)
                most = connection.execute(wanted.order_by(column.desc(), Client.c.device).limit(1)).first()
                found.append({most[0]: most[1]} if most else {})
        return found[0], found[1]

    def updates(
        self, run_id: str, round: int | None = None, last: int | None = None, *, changed_after: int = 0,  # noqa: A002
        devices: Sequence[str] | None = None, outcomes: Sequence[str] = (), with_reason: bool = False,
    ) -> list[UpdateRow]:  # fmt: skip
        """Return one row for each assignment of the run, of one of its rounds, or of those from `round` to `last`.

        Only those whose `changed` is above `changed_after`, of these `devices`, with one of `outcomes`, and if
        `with_reason` with one for their loss or a reduced weight.
        """
        wanted = columns_of(Update, UpdateRow).where(Update.c.run_id == run_id)
        if round is not None:
            wanted = wanted.where(Update.c.round.between(round, round if last is None else last))
        if changed_after:
            wanted = wanted.where(Update.c.changed > changed_after)
        if devices is not None:
            wanted = wanted.where(Update.c.device.in_(devices))
        if outcomes:
            wanted = wanted.where(Update.c.outcome.in_(outcomes))
        if with_reason:
            wanted = wanted.where((Update.c.reason != "") | (Update.c.weight_reason != ""))
        ordered = wanted.order_by(Update.c.round, Update.c.device, Update.c.assigned_at)
        return [as_row(UpdateRow, found) for found in self._database.rows(ordered)]

    def latest_work(
        self, run_id: str, since: int, devices: Sequence[str] | None = None, last: int = 2**31 - 1
    ) -> list[WorkRow]:  # fmt: skip
        """Return what tables of clients show of the assignments from round `since` to `last`, oldest first."""
        wanted = columns_of(Update, WorkRow).where(Update.c.run_id == run_id, Update.c.round.between(since, last))
        if devices is not None:
            wanted = wanted.where(Update.c.device.in_(devices))
        ordered = wanted.order_by(Update.c.round, Update.c.assigned_at)
        with self._database.reading() as connection:
            return [WorkRow(*found) for found in connection.execute(ordered)]

    def updates_into(self, run_id: str, number: int, since: int, outcomes: Sequence[str] = ()) -> list[UpdateRow]:
        """Return the assignments of earlier rounds that were aggregated into this one, and with one of `outcomes` those
        of the rounds after `since` that may still be.
        """
        wanted = columns_of(Update, UpdateRow).where(Update.c.run_id == run_id)
        found = self._database.rows(
            wanted.where(Update.c.aggregated_round == number, Update.c.aggregated_round != Update.c.round)
        )
        if outcomes:
            between = Update.c.round.between(since + 1, number - 1) & Update.c.outcome.in_(outcomes)
            found += self._database.rows(wanted.where(between))
        return sorted((as_row(UpdateRow, one) for one in found), key=lambda one: (-one.round, one.device))

    def phases(self, run_id: str, round: int | None = None) -> list[PhaseRow]:  # noqa: A002
        """Return the closed phases of the run's rounds, or of one, in order; none without secure aggregation."""
        own = RoundPhase.c
        wanted = select(RoundPhase).where(own.run_id == run_id).order_by(own.round)
        if round is not None:
            wanted = wanted.where(own.round == round)
        return phase_rows(self._database.rows(wanted))

    def clients(
        self, run_id: str, first: int = 0, count: int | None = None, sort: ClientKey = "device",
        descending: bool = False, devices: Sequence[str] | None = None,
    ) -> list[ClientRow]:  # fmt: skip
        """Return each device's part in a run, or that of these `devices`, in this order: `count` of them from the place
        `first` on.
        """
        wanted = columns_of(Client, ClientRow).where(Client.c.run_id == run_id)
        if devices is not None:
            wanted = wanted.where(Client.c.device.in_(devices))
        ordered = clients_in_order(wanted, sort, descending)
        return [as_row(ClientRow, found) for found in self._database.rows(ordered.offset(first).limit(count))]

    def client_count(self, run_id: str) -> tuple[int, int]:
        """Return how many devices take part in a run, and how many of them were selected."""
        wanted = select(func.count(), func.count().filter(Client.c.selected > 0)).where(Client.c.run_id == run_id)
        with self._database.reading() as connection:
            there, selected = connection.execute(wanted).one()
        return int(there), int(selected)

    def client_names(self, run_id: str) -> list[str]:
        """Return the devices that take part in a run, by name."""
        wanted = select(Client.c.device).where(Client.c.run_id == run_id).order_by(Client.c.device)
        with self._database.reading() as connection:
            return list(connection.scalars(wanted))

    def not_in_run(self, run_id: str, names: Sequence[str]) -> list[str]:
        """Return those of these devices that take no part in a run, by name."""
        return sorted({*names}.difference(self.client_names(run_id))) if names else []

    def offline(self, names: Sequence[str] | None = None) -> dict[str, float | None]:
        """Return the devices that are offline, all or those of these names, with the moment of their last request."""
        wanted = select(Device.c.name, Device.c.seen_at, Device.c.last_seen_at).where(Device.c.online.is_(False))
        if names is not None:
            wanted = wanted.where(Device.c.name.in_(names))
        with self._database.reading() as connection:
            return {name: max(filter(None, heard), default=None) for name, *heard in connection.execute(wanted)}

    def online_since(self) -> dict[str, float]:
        """Return the devices that are online, with the moment of their registration, infinity if it is unknown."""
        wanted = select(Device.c.name, Device.c.seen_at).where(Device.c.online.is_(True)).order_by(Device.c.name)
        with self._database.reading() as connection:
            return {name: math.inf if seen_at is None else seen_at for name, seen_at in connection.execute(wanted)}

    def models(self, run_id: str, versions: Collection[int] | None = None) -> list[ModelRow]:
        """Return the model versions of a run, or those of them with these numbers, oldest first."""
        wanted = columns_of(Checkpoint, ModelRow).where(Checkpoint.c.run_id == run_id).order_by(Checkpoint.c.version)
        if versions is not None:
            wanted = wanted.where(Checkpoint.c.version.in_(versions))
        return [
            ModelRow(**{**found, "parts": [(name, length, digest) for name, length, digest in found["parts"]]})
            for found in self._database.rows(wanted)
        ]

    def devices(self, names: Sequence[str] | None = None) -> list[DeviceInfo]:
        """Return all devices by name, or those with these names."""
        wanted = select(*Device.c).order_by(Device.c.name)
        own, of = Client.c, Run.c
        columns = (own.device, own.arrived, own.payload_up, own.last_outcome, of.run_id, of.status)
        parts = select(*columns).join(Run, (of.run_id == own.run_id) & (of.source == "devices"))
        if names is not None:
            wanted, parts = wanted.where(Device.c.name.in_(names)), parts.where(Client.c.device.in_(names))
        with self._database.reading() as connection:
            known = connection.execute(wanted).mappings().all()
            done = connection.execute(parts.order_by(func.coalesce(Client.c.last_at, 0.0))).all()
        sums: dict[str, tuple[int, int, str, str, bool]] = {}
        for device, arrived, payload, outcome, run_id, status in done:
            before = sums.get(device, (0, 0, "", "", False))
            last = (outcome, run_id, status in ENDED) if outcome else before[2:]
            sums[device] = (before[0] + arrived, before[1] + payload, *last)
        return [
            DeviceInfo(
                device_row(d), d["online"], d["seen_at"], max(filter(None, (d["seen_at"], d["last_seen_at"])),
                    default=None),
                d["hello"], d["tags"], *sums.get(d["name"], (0, 0, "")),
            )
            for d in known
        ]  # fmt: skip

    def measures(self, *kinds: str) -> list[MeasureRow]:
        """Return the measured links and speeds of all devices, over all runs on devices.

        With `kinds`, only measurements of these kinds are returned.
        """
        wanted = columns_of(Measure, MeasureRow).order_by(Measure.c.device, Measure.c.kind, Measure.c.work)
        if kinds:
            wanted = wanted.where(Measure.c.kind.in_(kinds))
        return [as_row(MeasureRow, found) for found in self._database.rows(wanted)]

    def aggregated_rounds(self, device: str) -> list[tuple[str, list[int]]]:
        """Return (run, rounds) for a device's aggregated updates, which stay in the model when it is revoked."""
        own, of = Update.c, Run.c
        aggregated = own.outcome.in_(("aggregated", "aggregated-late")) & own.aggregated_round.is_not(None)
        wanted = select(of.run_id, own.aggregated_round, of.number).join(Run, of.run_id == own.run_id)
        mine = wanted.where(own.device == device, aggregated, of.source == "devices").distinct()
        with self._database.reading() as connection:
            found = connection.execute(mine.order_by(of.number, own.aggregated_round)).all()
        rounds: dict[str, list[int]] = {}
        for run_id, number, _ in found:
            rounds.setdefault(run_id, []).append(int(number or 0))
        return list(rounds.items())

    def device_updates(
        self, name: str, limit: int = 50, since: float | None = None, until: float | None = None
    ) -> list[UpdateRow]:  # fmt: skip
        """Return a device's last assignments and their outcomes over all runs on devices, latest first.

        With `since` and `until`, those that were assigned between these moments.
        """
        wanted = columns_of(Update, UpdateRow).join(Run, Run.c.run_id == Update.c.run_id)
        wanted = wanted.where(Update.c.device == name, Run.c.source == "devices", Run.c.deleted_at.is_(None))
        if since is not None and until is not None:
            wanted = wanted.where(Update.c.assigned_at.between(since, until))
        latest = (Update.c.assigned_at.desc().nulls_last(), Run.c.number.desc(), Update.c.round.desc())
        wanted = wanted.order_by(*latest).limit(limit)
        return [as_row(UpdateRow, found) for found in self._database.rows(wanted)]


def phase_rows(found: Iterable[dict[str, Any]]) -> list[PhaseRow]:
    """Make `PhaseRow` values of rows of the table, in the order of rounds and phases."""
    shown, before = list[PhaseRow](), (0, 0.0)
    for row in sorted(found, key=lambda row: (row["round"], PHASES.index(row["phase"]))):
        since = before[1] if before[0] == row["round"] else 0.0
        own = {name: row[name] for name in row if name != "run_id"}
        shown.append(PhaseRow(**own, seconds=max(0.0, row["elapsed_s"] - since)))
        before = row["round"], row["elapsed_s"]
    return shown


def device_row(found: Mapping[str, Any] | RowMapping) -> DeviceRow:
    """Make a `DeviceRow` of a row of the table."""
    return DeviceRow(**{name: found[name] for name in DeviceRow.__dataclass_fields__})


# Written once: SQLAlchemy takes longer to build such a statement than SQLite to answer it.
_ROUND = Round.c
_ACCEPTED = (Update.c.run_id == Round.c.run_id) & (Update.c.round == Round.c.round) & (Update.c.outcome == "accepted")
_ARRIVED = select(func.count()).where(_ACCEPTED).scalar_subquery()
_ROUNDS = columns_of(Round, RoundRow, arrived=case((Round.c.reason == "", _ARRIVED), else_=0))
_RUN = columns_of(Run, RunRow).where(Run.c.run_id == bindparam("the_run"))
_OF_RUN = Round.c.run_id == bindparam("the_run")  # of each column by itself: then an index has the largest value
_COUNT = select(*(select(func.max(one)).where(_OF_RUN).scalar_subquery() for one in (Round.c.round, Round.c.changed)))
_IDS = select(Run.c.run_id, Run.c.status).where(Run.c.deleted_at.is_(None)).order_by(Run.c.number)


def deleted(row: RunRow) -> NotFound:
    """Return the error about a run that a person deleted."""
    return NotFound(f"{row.run_id} was deleted", why=deleted_text(row), hint="thinwire runs list --deleted")


def deleted_text(row: RunRow) -> str:
    """Return by whom and when a run was deleted."""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.deleted_at))
    return f"deleted by {row.deleted_by} on {at}"


def _named(name: str, ids: list[str]) -> str:
    if name in ids:
        return name
    found = [run_id for run_id in ids if name and run_id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        why, hint = "an id's beginning names a run if no other id begins so", " or ".join(found[-3:])
        raise NotFound(f"{name!r} begins the names of {len(found)} runs", why=why, hint=hint)
    if not ids:
        raise NotFound(f"no run {name!r}", why="there are no runs yet", hint="thinwire run PLAN")
    near = difflib.get_close_matches(name, ids, n=3, cutoff=0.4) or ids[-3:]
    raise NotFound(f"no run {name!r}", why="no run's id is this one, and none begins with it", hint=" or ".join(near))
