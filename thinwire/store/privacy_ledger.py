"""The privacy ledger of the aggregator: which noised releases were spent, of which population, on which devices.

The ledger's key is the population, not the run. A round reserves its releases in the transaction that opens it, and
commits them in the one that closes it. A reservation that is never committed stays spent.

A restored ledger has lost what was reserved after its backup. Nobody knows how much that was, so a restore adds
an entry `unknown`, which blocks the private rounds of every population until a person settles that population with a
number of releases. Devices have ledgers of their own, and report the number of their entries at each registration. A
population is blocked too while an approved device reports more of its releases than are in this ledger, as after a
copy of an older state directory. A settlement below what a device reports is refused. Which device is charged for
what, and what happens with one that joins again: store/privacy_devices.py.

An entry without participants counts for everyone in its population: a settlement, because nobody knows who took part,
and a round with Poisson sampling, in which sampled and other clients pay alike. It counts for devices too that enrolled
later, which is more than they spent. A device books the rounds alone in which it was sampled. So a sampled round proves
no more than its rate of what a device reports, and a settlement of what devices report is charged without sampling.

A device is stored as the fingerprint of its key, because its name may change or go to another device. A simulated
device has no key and is stored by its name. `forget` puts a pseudonym in the place of a device, and keeps every count.

The table `privacy_spent` has the sums, so that to open a round takes as long in the thousandth round as in the first.

Invariant: entries are only added, and only their state changes, from `reserved` to `committed` or `lost`. So what is
spent never falls. Nothing is committed that is not reserved. At every commit a sum is that over the entries.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, exists, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import DataLost, NotFound, Refused, UsageError
from thinwire.core.events import ClientSelected
from thinwire.core.fleet import MAX_RELEASES, population_key
from thinwire.core.run_events import PrivacyCommitted, PrivacyReserved
from thinwire.store.database import Database
from thinwire.store.privacy_devices import (
    EVERYONE,
    PrivacyEntry,
    PrivacyParticipant,
    bearers,
    charge,
    shortfalls,
    sums,
    without_sampling,
)
from thinwire.store.tables import Device, Run

# The round is open, or ended without a release; its release is made; it was open in a backup that was restored, and is
# never committed; a backup of time `at` was restored, for all populations; a person's charge after that.
STATES = ("reserved", "committed", "lost", "unknown", "settled")
BROUGHT = (
    "has {} releases of {} in its own ledger from an enrolment that is not known here (forgotten, or at another "
    "aggregator); charge it: {}"
)


@dataclass(frozen=True)
class PrivacyRow:
    """Holds an entry of the privacy ledger; `state` is one of STATES.

    `devices` are the selected ones by today's names, and by the fingerprint of its key one that is not enrolled now.
    """

    id: int
    state: str
    at: float
    population: str
    run_id: str
    round: int
    release: str
    count: int
    digest: str
    who: str
    devices: tuple[str, ...] = ()


def reserve(connection: Connection, run_id: str, event: PrivacyReserved) -> None:
    """Add a reservation; raise `DataLost` while it is not known what the population has spent.

    A simulation is a population of its own, of which a restore has lost nothing that anybody else spends.
    """
    if connection.scalar(select(Run.c.source).where(Run.c.run_id == run_id)) != "sim":
        require_known(connection, event.population)
    row = {
        "state": "reserved", "at": event.at, "population": event.population, "run_id": run_id, "round": event.round,
        "release": event.release,
    }  # fmt: skip
    entry = connection.execute(insert(PrivacyEntry).values(row).returning(PrivacyEntry.c.id)).scalar_one()
    keys = _keys(connection, run_id, event.devices)
    _add(connection, [(entry, key) for key in keys])
    charge(connection, event.population, event.release, keys or [EVERYONE])


def join(connection: Connection, run_id: str, event: ClientSelected) -> None:
    """Add a device that was selected in the middle of a round to the participants of the round's releases."""
    part, entry, keys = PrivacyParticipant, PrivacyEntry, _keys(connection, run_id, [event.device])
    of = (part.c.entry == entry.c.id,)
    mine = select(entry.c.id, entry.c.population, entry.c.release).where(
        entry.c.run_id == run_id, entry.c.round == event.round,
        exists().where(*of), ~exists().where(*of, part.c.device.in_(keys)),
    )  # fmt: skip
    for row in connection.execute(mine).all():
        _add(connection, [(row.id, key) for key in keys])
        charge(connection, row.population, row.release, keys)


def _add(connection: Connection, participants: Iterable[tuple[int, str]]) -> None:
    if rows := [{"entry": entry, "device": device} for entry, device in participants]:
        connection.execute(insert(PrivacyParticipant), rows)


def _keys(connection: Connection, run_id: str, devices: Sequence[str]) -> list[str]:
    """Return each device as it is stored."""
    enrolled = select(Device.c.name, Device.c.fingerprint).join(Run, Run.c.run_id == run_id)
    rows = connection.execute(enrolled.where(Run.c.source == "devices", Device.c.name.in_(devices)))
    keys = dict(rows.all())
    return sorted({keys.get(name, name) for name in devices})


def commit(connection: Connection, run_id: str, event: PrivacyCommitted) -> None:
    """Commit the reservations of a round; raise `DataLost` if it has none, since then nothing may be released."""
    own = (PrivacyEntry.c.run_id == run_id, PrivacyEntry.c.round == event.round, PrivacyEntry.c.state == "reserved")
    values = {"state": "committed", "digest": event.digest}
    if connection.execute(update(PrivacyEntry).where(*own).values(values)).rowcount == 0:
        raise DataLost(
            f"round {event.round} of {run_id} has no open reservation in the privacy ledger",
            why="it was never reserved, or was open in a backup that was restored: another aggregator may have "
            "released it with other noise",
            hint="the next round reserves its own; nothing of this one is released",
        )


def require_known(connection: Connection, population: str) -> None:
    """Raise `DataLost` if a restore or a device shows that the ledger lacks entries of this population."""
    entry = PrivacyEntry.c
    unknown = connection.execute(
        select(entry.id, entry.at).where(entry.state == "unknown").order_by(entry.id.desc()).limit(1)
    ).first()
    of_device = exists().where(PrivacyParticipant.c.entry == entry.id)
    settled = select(func.max(entry.id)).where(entry.state == "settled", entry.population == population, ~of_device)
    if unknown is not None and (connection.scalar(settled) or 0) < unknown.id:
        raise DataLost(
            f"it is not known how much privacy the population {population!r} has spent",
            why=f"the ledger was restored from a backup of {_moment(unknown.at)}, and later rounds are not in it",
            hint=_settle(population, "N, the most rounds that can have begun since then; 0 if none can"),
        )
    for name, found in shortfalls(connection, population).items():
        if not found.is_its_own:
            raise DataLost(
                f"it is not known how much privacy the population {population!r} has spent",
                why=f"{name} has {found.reported} releases of it in its own ledger, and {found.known} in this one",
                hint=_settle(population, f"{found.missing}, or more")
                + f"; it charges everyone, so if you do not believe {name}: thinwire devices revoke {name}",
            )


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _settle(population: str, rounds: str, device: str = "") -> str:
    whom = f"--device {device} " * bool(device)
    return f"thinwire privacy ledger settle {shlex.quote(population)} {whom}--rounds {rounds}"


class PrivacyLedger:
    """Reads the privacy ledger, and settles what a restore has lost. Reservations and commits come by the journal."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def spent(self, population: str) -> dict[str, int]:
        """Return how many of each release the population has spent, by its JSON.

        Raise `DataLost` while that is not known: nothing may be compared with a budget then.
        """
        of = select(PrivacyEntry.c.release, func.sum(PrivacyEntry.c.count)).where(
            PrivacyEntry.c.population == population, PrivacyEntry.c.count > 0
        )
        with self._database.reading() as connection:
            require_known(connection, population)
            rows = connection.execute(of.group_by(PrivacyEntry.c.release))
            return {release: int(n) for release, n in rows}

    def spent_by_device(
        self, population: str, devices: Iterable[str] = (), simulated: bool = False
    ) -> dict[str, dict[str, int]]:
        """Return how many of each release each device took part in, by its name.

        Releases of everyone count for every device. `devices` are in the result also if they have no entry. Raise like
        `spent`, but for the population of a simulation.
        """
        with self._database.reading() as connection:
            if not simulated:
                require_known(connection, population)
            names, spent = bearers(connection), sums(connection, population)
        alike = spent.pop(EVERYONE, Counter[str]())
        found = {device: Counter(alike) for device in devices}
        for key, counts in spent.items():
            for device in names.get(key, (key,)):
                found.setdefault(device, Counter(alike)).update(counts)
        return {device: dict(counted) for device, counted in sorted(found.items())}

    def excluded(self, population: str) -> dict[str, str]:
        """Return the devices that may not take part in private rounds of a population until a person has charged them.

        Each has the reason, as a phrase about it. Its own ledger has releases that are not in this one.
        """
        with self._database.reading() as connection:
            return {
                name: BROUGHT.format(found.missing, population, _settle(population, f"{found.missing}", name))
                for name, found in shortfalls(connection, population).items()
                if found.is_its_own
            }  # fmt: skip

    def bearers(self) -> dict[str, tuple[str, ...]]:
        """Return the devices that are charged for what is stored under a key, by the key's fingerprint."""
        with self._database.reading() as connection:
            return bearers(connection)

    def may_release(self, run_id: str, number: int) -> bool:
        """Return True if a round has a reservation that can be committed.

        An open round of a restored aggregator has none: it ends without a release.
        """
        own = (PrivacyEntry.c.run_id == run_id, PrivacyEntry.c.round == number, PrivacyEntry.c.state == "reserved")
        with self._database.reading() as connection:
            return connection.scalar(select(PrivacyEntry.c.id).where(*own).limit(1)) is not None

    def rows(self, population: str | None = None, device: str | None = None, after: int = 0) -> list[PrivacyRow]:
        """Return the entries, oldest first: all, those of a population, or those in which a device took part.

        Those without participants are among a device's, since they count for everyone. `after` is the id of the last
        entry that is not wanted.
        """
        columns = [PrivacyEntry.c[name] for name in PrivacyRow.__dataclass_fields__ if name != "devices"]
        wanted = select(*columns).where(PrivacyEntry.c.id > after).order_by(PrivacyEntry.c.id)
        took_part = select(PrivacyParticipant.c.entry, PrivacyParticipant.c.device).where(
            PrivacyParticipant.c.entry > after
        )
        if population is not None:
            mine = PrivacyEntry.c.population.in_(("", population))  # a restore is about all of them
            wanted = wanted.where(mine)
            took_part = took_part.join(PrivacyEntry, PrivacyEntry.c.id == PrivacyParticipant.c.entry).where(mine)
        with self._database.reading() as connection:
            names, devices = bearers(connection), defaultdict[int, set[str]](set)
            for entry, one in connection.execute(took_part):
                devices[entry].update(names.get(one, (one,)))
            found = [
                PrivacyRow(**row, devices=tuple(sorted(devices[row["id"]])))
                for row in connection.execute(wanted).mappings()
            ]
        return [row for row in found if device is None or device in row.devices or not row.devices]

    def size(self, population: str, run_id: str) -> tuple[int, int, int]:
        """Return how many entries `rows` has for a population, their participants, and a run's committed rounds."""
        entry, part = PrivacyEntry, PrivacyParticipant
        mine = entry.c.population.in_(("", population))
        of_run = entry.c.run_id == run_id, entry.c.state == "committed"
        committed = select(func.count(entry.c.round.distinct())).where(*of_run)
        took_part = select(func.count()).select_from(part).join(entry, entry.c.id == part.c.entry).where(mine)
        with self._database.reading() as connection:
            found = (select(func.count()).select_from(entry).where(mine), took_part, committed)
            entries, parts, released = (int(connection.scalar(one) or 0) for one in found)
        return entries, parts, released

    def blocked(self, population: str) -> str:
        """Return why no private round of a population may begin, and what to do about it; "" if one may."""
        with self._database.reading() as connection:
            try:
                require_known(connection, population)
            except DataLost as error:
                return f"{error}: {error.hint}"
        return ""

    def unknown(self) -> dict[str, str]:
        """Return the populations whose private rounds are blocked, with the reason.

        The population "" stands for all those that are not in the ledger, which a restore blocks too.
        """
        found = dict[str, str]()
        with self._database.reading() as connection:
            simulated = exists().where(Run.c.run_id == PrivacyEntry.c.run_id, Run.c.source == "sim")
            known = set(connection.scalars(select(PrivacyEntry.c.population).where(~simulated).distinct()))
            for population in sorted(known | {""}):
                try:
                    require_known(connection, population)
                except DataLost as error:
                    found[population] = error.why
        return found

    def settle(self, population: str, rounds: int, release: str, who: str, device: str = "") -> None:
        """Charge `rounds` more of `release` to everyone in the population, for what this ledger may have lost.

        It unblocks the population. Rounds that a device has in its own ledger cost what they cost without sampling,
        because it was in them. With `device` it charges this device alone, for what it has brought with it or lost
        with its own ledger. Raise `UsageError` if nothing of the population is unknown, `NotFound` for an unknown
        device, and `Refused` if a device's own ledger shows that there were more.
        """
        if not population or not bool(device) <= rounds <= MAX_RELEASES or (rounds and not release):
            raise UsageError(
                f"--rounds {rounds} of {release!r} is no valid charge to {population!r}",
                why=f"it has a population, from 0 (for a device from 1) to {MAX_RELEASES} rounds, and their release",
                hint=_settle(population or "POPULATION", "N", device),
            )
        with self._database.writing() as connection:
            key, found = EVERYONE, shortfalls(connection, population)
            if device:
                key = _accept(connection, population, device)
                found = {name: one for name, one in found.items() if name == device}
            else:
                _require_unknown(connection, population)
                found = {name: one for name, one in found.items() if not one.is_its_own}
            for name, one in found.items():
                if rounds < one.missing:
                    raise Refused(
                        f"--rounds {rounds} is less than what devices have recorded",
                        why=f"{name} has {one.reported} releases in its own ledger, and {one.known} in this one",
                        hint=_settle(population, f"{one.missing}, or more", device),
                    )
            certain = rounds if device else max((one.missing for one in found.values()), default=0)
            for charged, count in _charges(release, rounds, certain):
                row = {
                    "state": "settled", "at": self._clock.wall(), "population": population, "count": count,
                    "who": who, "release": charged if count else "",
                }  # fmt: skip
                entry = connection.execute(insert(PrivacyEntry).values(row).returning(PrivacyEntry.c.id)).scalar_one()
                if device:
                    _add(connection, [(entry, key)])
                if count:
                    charge(connection, population, charged, [key], count)


def _charges(release: str, rounds: int, certain: int) -> list[tuple[str, int]]:
    """Return what is charged for so many rounds: releases, each with its count.

    A device was in `certain` of them for certain, by its own ledger or a person's word, so sampling amplifies nothing
    of these. The others have the rate of the release.
    """
    full = without_sampling(release) if rounds else release
    if full == release or not 0 < certain < rounds:
        return [(full if certain else release, rounds)]
    return [(full, certain), (release, rounds - certain)]


def _accept(connection: Connection, population: str, device: str) -> str:
    """Return the key of a device that is charged for what it brought: what it lacks after that, the ledger has lost."""
    found = connection.execute(select(Device.c.fingerprint, Device.c.brought).where(Device.c.name == device)).first()
    if found is None:
        raise NotFound(f"no device {device!r}", why="no device of this name is enrolled", hint="thinwire devices list")
    left = {key: count for key, count in found.brought.items() if key != population_key(population)}
    connection.execute(update(Device).where(Device.c.name == device).values(brought=left))
    return str(found.fingerprint)


def _require_unknown(connection: Connection, population: str) -> None:
    """Raise `UsageError` if nothing of a population is unknown."""
    try:
        require_known(connection, population)
    except DataLost:
        return
    raise UsageError(
        f"nothing is to be settled for the population {population!r}",
        why="its ledger was not restored from a backup, and no device reports more than it has",
        hint="thinwire privacy ledger; --device NAME charges one device",
    )
