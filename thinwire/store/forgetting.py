"""Forget a device: a random pseudonym takes the place of its name and key, wherever the store has them.

What names a device is found by the names of fields, in events and in tables alike, because a text such as "loss" may be
a device's name and a metric's too. `ROLES` says what each field holds. A test compares it with all events and columns,
so that none is left out.

Everything is one transaction: after a crash all of it is done or nothing, and the command may be given again. Segments
are packed again with the same numbers. The snapshot of an ended run is deleted: its whole journal is still there, and
replaying it gives the state with the pseudonym.

Refused while a run that is not over names the device: its assignments and update ids carry the name, so the aggregator
could no longer tell which replies it has.

The store binds no event by a digest. A digest of messages of a secure round (`PhaseClosed.messages`) was computed over
messages that had the name, and stays: it holds no name, but who guesses all of the messages could confirm the guess.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Table, and_, delete, func, select, update

from thinwire.core.errors import NotFound, Refused
from thinwire.core.events import ENDED
from thinwire.core.formatting import grouped
from thinwire.store.audit import WAS, act
from thinwire.store.database import METADATA
from thinwire.store.device_registry import next_change, unknown
from thinwire.store.journal import COMPRESSION_LEVEL
from thinwire.store.privacy_devices import KEY_LETTERS, PrivacyParticipant, put_pseudonym
from thinwire.store.tables import (
    Action,
    Client,
    Device,
    Journal,
    Measure,
    Note,
    Run,
    Segment,
    Snapshot,
)

FORGOTTEN: Final = "forgotten-"
# What a field may hold. name: a device's name, or a list of them. keys: a mapping by name. keys and ids, keys and
# words: with ids or reasons as values. ids: assignment and update ids, with the name in the middle. words: a text or
# reasons. code: "code" or "code: words". fields: a mapping whose keys are fields. clipped: see `value`.
ROLES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("device", "instead_of", "added", "removed", "later", "outstanding", "slowest", "devices"), "name"),
    **dict.fromkeys(("selected", "used_by", "used_key", "fingerprint", "other_keys"), "name"),
    **dict.fromkeys(("codecs", "standings", "received", "clients", "by_client"), "keys"),
    **dict.fromkeys(("reasons", "codec_reasons", "not_selected"), "keys and words"),
    "assignments": "keys and ids", "dropped": "names or ids", "clipped": "clipped", "reason": "code",
    **dict.fromkeys(("assignment_id", "update_id", "aggregated", "capped", "chosen"), "ids"),
    **dict.fromkeys(("text", "note", "notes", "detail", "why", "state_lost", "status_text"), "words"),
    **dict.fromkeys(("deadline_reason", "sampling", "selection_reason", "work_reason", "weight_reason"), "words"),
    "codec_reason": "words", "sentence": "words", "hint": "words", "waited_for": "name",
    "before": "keys and words",
    "sets": "keys and words",  # keys of a plan; the value of one may be names
    **dict.fromkeys(("header", "args", "result", "explanation"), "fields"),
}  # fmt: skip
PLAIN: Final = frozenset({  # fields with text that names no device
    "status", "kind", "digest", "file", "parts", "counters", "state", "change", "change_parts", "base_digest", "codec",
    "names", "metrics", "spent", "robust", "units", "widths", "spread", "phase", "messages", "population", "release",
    "train_metrics", "secure_sum", "downtimes", "run_id", "task", "source", "plan", "layout", "task_report", "identity",
    "model_digest", "model_file", "metrics0", "spread0", "outcome", "last_outcome", "task_version", "what", "who",
    "body", "address", "name", "hello", "booked", "brought", "public_key", "how", "samples", "work", "secret_hash",
    "code_hash", "token_hash", "totals", "subject", "acknowledged_by", "failure", "user", "role", "password_hash",
    "tags", "deleted_by", "sent_to", "norms", "report_digest",
})  # fmt: skip
NAMED: Final = frozenset({("invitations", "name")})  # a column that is a device's name in this table only
_WORD = re.compile("[a-z0-9-]+")  # in a text: a name, and what could be one
_CODE = re.compile("[a-z-]+")
OWN_RULE: Final = frozenset(
    {
        "journal",
        "segments",
        "snapshots",
        "devices",
        "measures",
        "privacy_participants",
        "privacy_spent",
        "refusal_notes",
    }
)


@dataclass(frozen=True)
class Forgotten:
    """Holds what was done: the pseudonym, how many rows changed, and earlier names that another device has now."""

    pseudonym: str
    rows: int
    runs: tuple[str, ...] = ()
    kept_names: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # earlier enrolments of the device that were forgotten with it


@dataclass(frozen=True)
class Renaming:
    """Replaces the names of one device in JSON values, each by its own pseudonym, so that two ids never become one."""

    names: Mapping[str, str]

    def fields(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mapping of fields, such as an event or a row, with the pseudonym."""
        return {name: self.value(ROLES.get(name, ""), value) for name, value in held.items()}

    def value(self, role: str, value: Any) -> Any:
        """Return the value of a field with this role with the pseudonym."""
        if role == "name":
            return self._each(value, self._exact)
        if role.startswith("keys") and isinstance(value, dict):
            of = {"keys and ids": "ids", "keys and words": "words"}.get(role, "")
            return {self._exact(name): self.value(of, held) for name, held in value.items()}
        if role == "ids":
            return self._each(value, self._id)
        if role == "names or ids":
            return self._each(value, lambda one: self._id(self._exact(one)))
        if role == "words":
            return self._words(value)
        if role == "code" and isinstance(value, str):
            code, colon, words = value.partition(":")
            return code + colon + self._text(words) if _CODE.fullmatch(code) else self._text(value)
        if role == "clipped" and isinstance(value, dict):
            if value.keys() <= {"means", "clients"}:  # of a round in its table; of an event: by update id
                return self.fields(value)
            return {self._id(one): held for one, held in value.items()}
        return self.fields(value) if role == "fields" and isinstance(value, dict) else value

    def _each(self, value: Any, change: Callable[[str], str]) -> Any:
        """Return a string, the strings of a list, or the keys of a mapping, changed."""
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): held for key, held in value.items()}
        return [self._each(one, change) for one in value] if isinstance(value, list | tuple) else value

    def _words(self, value: Any) -> Any:
        """Return a text, or reasons [[code, numbers], ...], in which the name may be among the numbers."""
        if isinstance(value, str):
            return self._text(value)
        if not isinstance(value, list | tuple):
            return value
        if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict):  # a pair
            return [value[0], {name: self._words(held) for name, held in value[1].items()}]
        return [self._words(one) for one in value]

    def _exact(self, one: str) -> str:
        return self.names.get(one, one)

    def _id(self, one: str) -> str:
        """Return RUN.ROUND.NAME... or RUN/NAME/SEQUENCE with the pseudonym."""
        for separator, place in ((".", 2), ("/", 1)):
            parts = one.split(separator)
            if len(parts) > place and parts[place] in self.names:
                return separator.join([*parts[:place], self.names[parts[place]], *parts[place + 1 :]])
        return one

    def _text(self, one: str) -> str:
        return _WORD.sub(lambda found: self._exact(found[0]), one)


def forget(connection: Connection, name: str, who: str, at: float, with_others: bool = False) -> Forgotten:
    """Put a pseudonym in the place of a device; raise `Refused` while it may take part, `NotFound` if nothing names it.

    A device that joined again with a new key reports its earlier keys, and nothing proves that they were its own. The
    revoked devices with these keys are forgotten with it, because their spending is one sum: `Refused` names them
    unless `with_others`. The privacy ledger keeps all its spending, under the pseudonym. Measurements of its link and
    speed are deleted, and its row too: then its name and key are free.
    """
    columns = (Device.c.fingerprint, Device.c.state, Device.c.other_keys)
    device = connection.execute(select(*columns).where(Device.c.name == name)).first()
    if device is not None and device.state != "revoked":
        raise Refused(
            f"{name} is {device.state}",
            "a device that may take part is not forgotten",
            f"thinwire devices revoke {name}",
        )
    keys = set() if device is None else {device.fingerprint, *device.other_keys}
    others = connection.execute(
        select(Device.c.name, Device.c.fingerprint, Device.c.state).where(Device.c.name != name)
    ).all()
    keys -= {row.fingerprint for row in others if row.state != "revoked"}
    same = {row.name for row in others if row.fingerprint in keys}  # this device, when it had another key
    if same and not with_others:
        raise Refused(
            f"{name} is forgotten only together with {', '.join(sorted(same))}",
            f"{name} has reported their keys as its own earlier ones, so the privacy ledger counts them as one device",
            f"thinwire devices forget {name} --yes, if all of them may be forgotten",
        )
    taken = {row.name for row in others} - same
    before = set[str]().union(*(_earlier(connection, one) for one in (name, *same)))
    names = {one: FORGOTTEN + secrets.token_hex(8) for one in (name, *sorted((before | same) - taken - {name}))}
    pseudonym = names[name]
    made = Renaming(names | {key: pseudonym for key in keys if len(key) == KEY_LETTERS})
    rows = put_pseudonym(connection, keys, pseudonym) + _own_rows(connection, made)
    changed, runs = _journal(connection, made)
    rows += changed
    for table in METADATA.sorted_tables:
        if table.name not in OWN_RULE:
            more, of_runs = _table(connection, table, made)
            rows, runs = rows + more, runs | of_runs
    going = select(Run.c.run_id).where(Run.c.run_id.in_(runs), Run.c.status.not_in(ENDED))
    if run_id := connection.scalar(going.limit(1)):
        raise Refused(
            f"{name} is named in {run_id}, which is not over",
            "its assignments and update ids carry the name",
            f"forget it when the run is over, or thinwire runs stop {run_id}",
        )
    if not rows:
        raise NotFound(
            f"nothing names a device {name!r}", "it was never here, or is forgotten", "thinwire devices list"
        )
    connection.execute(delete(Snapshot).where(Snapshot.c.run_id.in_(runs)))
    act(connection, at, who, pseudonym, "forget")
    return Forgotten(pseudonym, rows, tuple(sorted(runs)), tuple(sorted(before & taken)), tuple(sorted(same)))


def remove(connection: Connection, name: str, who: str, at: float) -> None:
    """Remove the row of a device that never got an assignment. Invitations and actions that name it stay."""
    row = connection.execute(select(*Device.c).where(Device.c.name == name)).first()
    if row is None:
        raise unknown(connection, name)
    has_worked = connection.scalar(select(Client.c.run_id).where(Client.c.device == name).limit(1))
    keys = [row.fingerprint, *row.other_keys]
    spent = connection.scalar(select(PrivacyParticipant.c.entry).where(PrivacyParticipant.c.device.in_(keys)).limit(1))
    if has_worked or spent is not None or row.booked or row.brought:
        raise Refused(
            f"{name} is not removed",
            why=f"it has worked in {has_worked}" if has_worked else "the privacy ledger counts what it has spent",
            hint=f"thinwire devices revoke {name}, and then to remove its name: thinwire devices forget {name}",
        )
    if row.online:
        raise Refused(
            f"{name} is not removed",
            why="it is online, and would enroll again",
            hint=f"stop its client first, or thinwire devices revoke {name}",
        )
    change = next_change(connection)
    connection.execute(delete(Device).where(Device.c.name == name))
    if (other := connection.scalar(select(Device.c.name).limit(1))) is not None:
        connection.execute(update(Device).where(Device.c.name == other), {"change": change})  # caches notice it
    act(connection, at, who, name, "remove", f"key {grouped(row.fingerprint)}")


def _earlier(connection: Connection, name: str) -> set[str]:
    """Return the earlier names of a device, by the renames in the audit log."""
    found, wanted = set[str](), {name}
    renames = select(Action.c.device, Action.c.detail).where(Action.c.what == "rename").order_by(Action.c.id.desc())
    for row in connection.execute(renames):
        if row.device in wanted:
            was = row.detail.removeprefix(WAS)
            found.add(was)
            wanted.add(was)
    return found


def _own_rows(connection: Connection, made: Renaming) -> int:
    """Delete the row, measurements, refusals, and details with addresses."""
    rows, change = 0, next_change(connection)
    for table, column in ((Device, Device.c.fingerprint), (Measure, Measure.c.device), (Note, Note.c.name)):
        rows += connection.execute(delete(table).where(column.in_(made.names))).rowcount
    # the number of the last change must not come again, or a running aggregator would miss a change
    another = select(func.min(Device.c.name)).scalar_subquery()
    connection.execute(update(Device).where(Device.c.name == another).values(change=change))
    own = Action.c.device.in_(made.names)  # its details may have an address or the key; those of a rename have names
    connection.execute(update(Action).where(own, Action.c.what != "rename").values(detail=""))
    connection.execute(update(Action).where(own, Action.c.who == Action.c.device).values(who=""))  # the device itself
    return rows


def _journal(connection: Connection, made: Renaming) -> tuple[int, set[str]]:
    """Replace the name in the events of runs on devices, and of the devices; return how many, and of which runs."""
    on_devices = set(connection.scalars(select(Run.c.run_id).where(Run.c.source == "devices")))
    changed, runs = 0, set[str]()
    for row in connection.execute(select(Journal.c.seq, Journal.c.run_id, Journal.c.body)).all():
        if row.run_id is not None and row.run_id not in on_devices:
            continue
        if (new := made.fields(row.body)) != row.body:
            connection.execute(update(Journal).where(Journal.c.seq == row.seq).values(body=new))
            changed, runs = changed + 1, runs | ({row.run_id} if row.run_id else set())
    for run_id, last in connection.execute(select(Segment.c.run_id, Segment.c.last_seq)).all():
        if run_id not in on_devices:
            continue
        mine = and_(Segment.c.run_id == run_id, Segment.c.last_seq == last)
        events = json.loads(zlib.decompress(connection.scalars(select(Segment.c.body).where(mine)).one()))
        renamed = [[seq, kind, made.fields(body)] for seq, kind, body in events]
        if renamed != events:
            packed = zlib.compress(json.dumps(renamed, separators=(",", ":")).encode(), COMPRESSION_LEVEL)
            connection.execute(update(Segment).where(mine).values(body=packed))
            changed, runs = changed + sum(a != b for a, b in zip(renamed, events, strict=True)), runs | {run_id}
    return changed, runs


def _table(connection: Connection, table: Table, made: Renaming) -> tuple[int, set[str]]:
    """Replace the name in the columns of one table; return how many rows, and of which runs."""
    role = {one: "name" if (table.name, one.name) in NAMED else ROLES.get(one.name, "") for one in table.c}
    columns, run_id = [one for one in table.c if role[one]], table.c.get("run_id")
    if not columns:
        return 0, set()
    wanted = select(*dict.fromkeys([*table.primary_key, *columns, *([] if run_id is None else [run_id])]))
    if run_id is not None and table.name != "commands":
        wanted = wanted.where(run_id.in_(select(Run.c.run_id).where(Run.c.source == "devices").scalar_subquery()))
    if table.name == Action.name:
        wanted = wanted.where(table.c.device != "")  # other actions are on users and tokens, which may be called alike
    changed, runs = 0, set[str]()
    for row in connection.execute(wanted).mappings().all():
        new = {one.name: made.value(role[one], row[one.name]) for one in columns}
        if new := {column: value for column, value in new.items() if value != row[column]}:
            mine = and_(*(key == row[key.name] for key in table.primary_key))
            connection.execute(update(table).where(mine).values(new))
            changed, runs = changed + 1, runs | ({str(row["run_id"])} - {""} if run_id is not None else set())
    return changed, runs
