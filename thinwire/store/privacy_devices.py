"""This module computes which device has spent what in the privacy ledger, over all keys that it has had.

The ledger stores a device as the fingerprint of its key. A device that leaves and joins again gets a new key, and its
data are the same. At each registration it reports the earlier keys in its own ledger (`Hello.booked_keys`). From then
on it is charged for their spending too, and reports show that spending under its present name. A device can only add
to its own spending in this way: the key of another device stays charged to that device as well.

A device may bring releases that this ledger does not have under any of its keys: its earlier enrolment was forgotten,
or was at another aggregator. What it lacks at its first registration is stored as `brought`. Only this device is then
excluded from private rounds, until a person charges it: every other device reports for itself before it takes part. A
device that reports more than that shows that the ledger has lost entries, and blocks its population
(store/privacy_ledger.py).

Invariant: no registration lowers what is charged to a device.

The tables of the ledger stand here too. They outlive the runs that they are about, so they have no foreign key to one.
Entries are only added, so nothing that was spent is ever taken back.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    delete,
    select,
    update,
)

from thinwire.core.errors import Refused
from thinwire.core.fleet import MAX_POPULATIONS, Hello, population_key
from thinwire.store.audit import act
from thinwire.store.database import METADATA, BoundedInteger, BoundedText, needed, upsert
from thinwire.store.database import Counter as Number
from thinwire.store.tables import Device

# An entry of the privacy ledger (store/privacy_ledger.py). Rows are only added, and outlive their run.
#
# `release` is the JSON of a noised release, and `count` how many of it are spent. `state` is one of STATES there.
PrivacyEntry = Table(
    "privacy_ledger",
    METADATA,
    needed("id", Number, primary_key=True),
    needed("state", String(16)),
    needed("at", Double),
    needed("population", BoundedText(255)),
    needed("run_id", String(80), default=""),  # no foreign key
    needed("round", Integer, default=0),
    needed("release", Text, default=""),
    needed("count", BoundedInteger, default=1),
    needed("digest", String(64), default=""),  # of the released bytes
    needed("who", BoundedText, default=""),  # settled it
    Index(None, "population"),
    Index(None, "run_id", "round"),
)


# A device that was selected for a release; `device` is its key's fingerprint, in a simulation its name.
PrivacyParticipant = Table(
    "privacy_participants",
    METADATA,
    needed("entry", Number, ForeignKey("privacy_ledger.id"), primary_key=True),
    needed("device", String(64), primary_key=True, index=True),
)


# The sums of the privacy ledger: how many of each release a device has spent of each population.
#
# `device` is that of PrivacyParticipant, or "" for releases that everyone in the population spends.
#
# Invariant: at every commit `count` is the sum over the entries of the ledger.
PrivacySpent = Table(
    "privacy_spent",
    METADATA,
    needed("population", BoundedText(255), primary_key=True),
    needed("device", String(64), primary_key=True, index=True),
    needed("release", Text, primary_key=True),
    needed("count", BoundedInteger),
)


EVERYONE: Final = ""  # in place of a device in the sums: each one in the population spends it
KEY_LETTERS: Final = 64  # of a fingerprint; a name has at most 63, and a pseudonym fewer
SELDOM: Final = 40 * math.log(2)  # a device is in more sampled rounds than `most_booked` with a probability of 2^-40


@dataclass(frozen=True)
class Shortfall:
    """Holds the releases of a population in a device's own ledger, those of it here, and what it has brought."""

    reported: int
    known: int
    brought: int

    @property
    def missing(self) -> int:
        """Return how many releases are not here."""
        return self.reported - self.known

    @property
    def is_its_own(self) -> bool:
        """Return True if it says nothing about other devices: the device has brought the missing releases with it."""
        return self.missing <= self.brought


def bearers(connection: Connection) -> dict[str, tuple[str, ...]]:
    """Return the names of those who are charged for what is stored under a key, by the key's fingerprint.

    A revoked device whose key another device has in its ledger passes its spending on to that device.
    """
    rows = connection.execute(select(Device.c.name, Device.c.fingerprint, Device.c.state, Device.c.other_keys)).all()
    all_of, claimed = defaultdict[str, set[str]](set), {key for row in rows for key in row.other_keys}
    passes_on = {row.name for row in rows if row.state == "revoked" and row.fingerprint in claimed}
    for row in rows:
        for key in (row.fingerprint, *row.other_keys):
            all_of[key].add(row.name)
    return {key: tuple(sorted(names - passes_on or names)) for key, names in all_of.items()}


def sums(connection: Connection, population: str) -> dict[str, Counter[str]]:
    """Return how many of each release each device has spent, as it is stored; EVERYONE has those of all."""
    found, spent = defaultdict[str, Counter[str]](Counter), PrivacySpent
    of = select(spent.c.device, spent.c.release, spent.c.count).where(spent.c.population == population)
    for device, release, count in connection.execute(of):
        found[device][release] = count
    return found


def charge(connection: Connection, population: str, release: str, devices: Iterable[str], count: int = 1) -> None:
    """Add `count` releases to the sums of these devices, as they are stored."""
    same = {"population": population, "release": release, "count": count}
    upsert(connection, PrivacySpent, [{**same, "device": device} for device in devices], adds=True)


def shortfalls(connection: Connection, population: str) -> dict[str, Shortfall]:
    """Return the approved devices whose own ledgers have more releases than this one, most missing first."""
    key = population_key(population)
    columns = (Device.c.name, Device.c.fingerprint, Device.c.other_keys, Device.c.booked, Device.c.brought)
    approved = select(*columns).where(Device.c.state == "approved")
    if not (rows := [row for row in connection.execute(approved) if row.booked.get(key)]):
        return {}
    spent = sums(connection, population)
    of_all = sum(most_booked(release, count) for release, count in spent.pop(EVERYONE, Counter[str]()).items())
    found = dict[str, Shortfall]()
    for row in rows:
        known = of_all + sum(spent[one].total() for one in {row.fingerprint, *row.other_keys} - {EVERYONE})
        if (reported := int(row.booked[key])) > known:
            found[row.name] = Shortfall(reported, known, int(row.brought.get(key, 0)))
    return dict(sorted(found.items(), key=lambda one: -one[1].missing))


def most_booked(release: str, count: int) -> int:
    """Return how many of `count` releases of everyone one device can have in its own ledger.

    That is all of them, but with Poisson sampling: a device books the rounds in which it was sampled, each by a coin of
    its own. Bernstein's inequality bounds their number, but for a probability of 2^-40.

    >>> most_booked('{"rate": 0.01}', 1000), most_booked('{"rate": 1.0}', 1000)
    (44, 1000)
    """
    rate = float(json.loads(release).get("rate", 1.0))
    variance = rate * (1 - rate) * count
    most = rate * count + SELDOM / 3 + math.sqrt(SELDOM**2 / 9 + 2 * SELDOM * variance)
    return min(count, math.floor(most)) if rate < 1 else count


def without_sampling(release: str) -> str:
    """Return what a round costs a device that is known to have been in it: no coin hides that.

    >>> without_sampling('{"rate": 0.01, "variance": 4.0}')
    '{"rate": 1.0, "variance": 4.0}'
    """
    said = json.loads(release)
    return json.dumps({**said, "rate": 1.0}, sort_keys=True) if said.get("rate", 1.0) < 1 else release


def reported(connection: Connection, hello: Hello, at: float) -> dict[str, object]:
    """Return the columns of a device that follow from what it reports of its own ledger.

    `booked` is the most that it has ever reported. Of its earlier keys only those count that are in the ledger. A text
    that is no fingerprint is none, although the ledger may hold it: EVERYONE, a pseudonym, a simulated device.
    """
    columns = (Device.c.fingerprint, Device.c.booked, Device.c.other_keys, Device.c.brought, Device.c.hello)
    before = connection.execute(select(*columns).where(Device.c.name == hello.name)).first()
    if before is None:
        return {}
    said = [key for key in hello.booked_keys if len(key) == KEY_LETTERS]
    wanted = select(PrivacySpent.c.device).where(PrivacySpent.c.device.in_(said)).distinct()
    found = set(connection.scalars(wanted)) - {before.fingerprint, *before.other_keys}
    keys = sorted({*before.other_keys, *found})
    if found:
        names = sorted(connection.scalars(select(Device.c.name).where(Device.c.fingerprint.in_(found))))
        act(connection, at, hello.name, hello.name, "carry", ", ".join(names))
    brought, took_part = before.brought, select(PrivacySpent.c.count).where(PrivacySpent.c.device == before.fingerprint)
    if not before.hello and connection.scalar(took_part.limit(1)) is None:
        brought = _missing(connection, hello.booked, {before.fingerprint, *keys, EVERYONE})
    booked = before.booked | {key: max(n, before.booked.get(key, 0)) for key, n in hello.booked.items()}
    if len(booked) > MAX_POPULATIONS:
        raise Refused(
            f"{hello.name} has reported {len(booked)} populations of its ledger, and may report {MAX_POPULATIONS}",
            why="its ledger was replaced by another one, or it made populations up",
            hint=f"thinwire devices revoke {hello.name}; its data may join under another name",
        )
    return {"booked": booked, "other_keys": keys, "brought": brought}


def _missing(connection: Connection, booked: Mapping[str, int], devices: Iterable[str]) -> dict[str, int]:
    """Return how many of the reported releases are not stored under these devices, by the key of the population."""
    known, spent = Counter[str](), PrivacySpent.c
    of = select(spent.population, spent.device, spent.release, spent.count).where(spent.device.in_(devices))
    for population, device, release, count in connection.execute(of):
        known[population_key(population)] += most_booked(release, count) if device == EVERYONE else count
    return {key: n - known[key] for key, n in booked.items() if n > known[key]}


def put_pseudonym(connection: Connection, keys: Iterable[str], pseudonym: str) -> int:
    """Put a pseudonym in the place of all keys of one device, and return how many rows changed.

    A key that took part in a round beside another of them, as a copy of a device does, gets a pseudonym of its own, so
    that both releases stay spent. So does a key that a device which stays has reported: it goes on to pay for that key,
    and not for the others.
    """
    part, spent, rows, new = PrivacyParticipant, PrivacySpent, 0, dict[str, str]()
    devices, keys = connection.execute(select(Device.c.fingerprint, Device.c.other_keys)).all(), set(keys)
    claimed = {key for row in devices if row.fingerprint not in keys for key in row.other_keys}
    for key in sorted(keys):
        beside = select(part.c.entry).where(part.c.device == pseudonym).scalar_subquery()
        clash = connection.scalar(select(part.c.entry).where(part.c.device == key, part.c.entry.in_(beside)).limit(1))
        new[key] = pseudonym if clash is None and key not in claimed else f"{pseudonym}-{len(new)}"
        rows += connection.execute(update(part).where(part.c.device == key).values(device=new[key])).rowcount
        own = select(spent.c.population, spent.c.release, spent.c.count).where(spent.c.device == key)
        for population, release, count in connection.execute(own).all():
            charge(connection, population, release, [new[key]], count)
            rows += 1
        connection.execute(delete(spent).where(spent.c.device == key))
    for row in connection.execute(select(Device.c.name, Device.c.other_keys)).all():
        if new.keys() & set(row.other_keys):
            renamed = sorted({new.get(key, key) for key in row.other_keys})
            connection.execute(update(Device).where(Device.c.name == row.name).values(other_keys=renamed))
    return rows
