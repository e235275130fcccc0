"""Store what a person keeps of runs: tags, the archive, and the deletion of a run that is over.

Tags and the archive decide nothing in a run. Each change is one transaction with a row in `commands`, answered at once:
it is the audit log of persons' actions.

Deleting a run begins with `mark_deleted`: from its commit on nobody reads the run any more, and its id stays taken.
`delete_rows` then deletes the run's rounds, assignments, events and model versions, in many short transactions, so that
other runs can record between them. Invariant: after a kill anywhere, calling both again completes the deletion.

What stays: the run's row with its plan, the devices' sums in the run (`clients`), commands and actions, and every entry
of the privacy ledger.

With `keep_days` in the aggregator's settings, runs that ended earlier are deleted in the same way, and `delete_expired`
then deletes what else is older and names devices. Actions of persons and the privacy ledger stay in any case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.events import ENDED
from thinwire.core.run_events import RunDeleted
from thinwire.store.alerts import Alert
from thinwire.store.database import Database
from thinwire.store.journal import append
from thinwire.store.tables import (
    Action,
    Checkpoint,
    Client,
    Command,
    InvitationEntry,
    Journal,
    Measure,
    Note,
    Round,
    RoundPhase,
    Run,
    Segment,
    Snapshot,
    Update,
)

TAG: Final = re.compile(r"[a-z0-9-]{1,32}")
MAX_TAGS: Final = 16
DELETED_ROWS: Final = 2000  # rows that one transaction deletes, about: some milliseconds
OWNED: Final = (  # tables of what a run holds, each with the column by which its rows are deleted in order
    (Update, Update.c.round), (RoundPhase, RoundPhase.c.round), (Round, Round.c.round), (Snapshot, Snapshot.c.seq),
    (Segment, Segment.c.last_seq), (Journal, Journal.c.seq), (Checkpoint, Checkpoint.c.version),
)  # fmt: skip


CONNECTIONS: Final = ("DeviceOnline", "DeviceOffline")  # kinds of events in the journal


class KeptRuns:
    """Changes tags and the archive, and deletes runs."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def tag_run(self, run_id: str, add: Iterable[str], remove: Iterable[str] = (), who: str = "operator") -> list[str]:
        """Add and remove tags of a run, and return all of its tags, sorted; raise `UsageError` for an invalid tag."""
        adds, removes = dict.fromkeys(add), set(remove)
        with self._database.writing() as connection:
            known = _columns(connection, run_id)["tags"]
            tags = change_tags(known, adds, removes, run_id, "thinwire runs tag")
            if tags != known:
                connection.execute(update(Run).where(Run.c.run_id == run_id), {"tags": tags})
                self._audit(connection, "tag-run", run_id, who, {"add": [*adds], "remove": sorted(removes)})
        return tags

    def archive_run(self, run_id: str, is_archived: bool, who: str = "operator") -> None:
        """Put a run into the archive, which hides it from lists, or take it out; raise `Refused` if it is not over."""
        with self._database.writing() as connection:
            found = _columns(connection, run_id)
            if is_archived and found["status"] not in ENDED:
                raise Refused(
                    f"{run_id} is {found['status']}",
                    why="the archive hides runs that are over",
                    hint=f"thinwire runs stop {run_id}",
                )
            if is_archived != (found["archived_at"] is not None):
                values = {"archived_at": self._clock.wall() if is_archived else None}
                connection.execute(update(Run).where(Run.c.run_id == run_id), values)
                self._audit(connection, "archive-run" if is_archived else "unarchive-run", run_id, who, {})

    def mark_deleted(self, run_id: str, who: str) -> None:
        """Mark a run as deleted by a person, so that nobody reads it any more; the first mark stays.

        Raise `Refused` for a run that is not over.
        """
        with self._database.writing() as connection:
            found = _columns(connection, run_id, with_deleted=True)
            if found["deleted_at"] is not None:
                return
            if found["status"] not in ENDED:
                raise Refused(
                    f"{run_id} is {found['status']}",
                    why="only a run that is over can be deleted",
                    hint=f"thinwire runs stop {run_id}",
                )
            now = self._clock.wall()
            append(connection, None, RunDeleted(now, run_id, who))
            mark = {"deleted_at": now, "deleted_by": who, "tags": [], "archived_at": None, "name": "", "notes": []}
            connection.execute(update(Run).where(Run.c.run_id == run_id), mark)

    def delete_rows(self, run_id: str) -> Iterator[None]:
        """Delete the rounds, assignments, events and model versions of a run that is marked as deleted.

        It yields after each transaction, so that its caller can do other work.
        """
        with self._database.reading() as connection:
            if _columns(connection, run_id, with_deleted=True)["deleted_at"] is None:
                raise Refused(f"{run_id} is not marked as deleted", why="its rows are still read")
        for table, column in OWNED:
            mine, is_left = table.c.run_id == run_id, True
            while is_left:
                with self._database.writing() as connection:
                    last = connection.scalar(
                        select(column).where(mine).order_by(column).offset(DELETED_ROWS - 1).limit(1)
                    )
                    chunk = delete(table).where(mine)
                    connection.execute(chunk if last is None else chunk.where(column <= last))
                    is_left = last is not None
                yield

    def expired_runs(self, before: float) -> list[str]:
        """Return the runs that were over before this time and are not deleted, the oldest first."""
        wanted = select(Run.c.run_id).where(
            Run.c.status.in_(ENDED), Run.c.finished_at < before, Run.c.deleted_at.is_(None)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(wanted.order_by(Run.c.number)))

    def delete_expired(self, before: float) -> Iterator[None]:
        """Delete what names devices and was over before this time, and yield after each transaction.

        These are devices' sums in runs that are deleted, connections, invitations, closed alerts, refusals,
        measurements, and the address at which a device joined. Actions of persons and the privacy ledger stay.
        """
        last_invited = select(func.max(InvitationEntry.c.id)).scalar_subquery()  # no number is given twice
        gone = select(Run.c.run_id).where(Run.c.deleted_at.is_not(None), Run.c.finished_at < before)
        for statement in (
            delete(Client).where(Client.c.run_id.in_(gone)),
            delete(InvitationEntry).where(InvitationEntry.c.expires_at < before, InvitationEntry.c.id < last_invited),
            update(InvitationEntry)
            .where(InvitationEntry.c.expires_at < before)
            .values(name="", used_by="", used_key=""),
            delete(Alert).where(Alert.c.closed_at < before),
            delete(Note).where(Note.c.at < before),
            delete(Measure).where(Measure.c.at < before),
            update(Action)
            .where(Action.c.what == "join", Action.c.at < before, Action.c.detail != "")
            .values(detail=""),
        ):
            with self._database.writing() as connection:
                connection.execute(statement)
            yield
        newest = select(func.max(Journal.c.seq)).scalar_subquery()  # it stays, so that no number is given twice
        old = Journal.c.run_id.is_(None), Journal.c.kind.in_(CONNECTIONS), Journal.c.at < before, Journal.c.seq < newest
        is_left = True
        while is_left:  # one transaction would be long: an aggregator may have years of them
            with self._database.writing() as connection:
                last = connection.scalar(
                    select(Journal.c.seq).where(*old).order_by(Journal.c.seq).offset(DELETED_ROWS - 1).limit(1)
                )
                connection.execute(delete(Journal).where(*old, *([] if last is None else [Journal.c.seq <= last])))
                is_left = last is not None
            yield

    def _audit(self, connection: Connection, kind: str, run_id: str, who: str, args: Mapping[str, Any]) -> None:
        """Add a command that has taken effect already."""
        now = self._clock.wall()
        row = {"kind": kind, "run_id": run_id, "args": dict(args), "who": who, "at": now, "answered_at": now}
        connection.execute(insert(Command), {**row, "result": {"done": True}})


def change_tags(
    known: Sequence[str], add: Collection[str], remove: Collection[str], name: str, command: str
) -> list[str]:  # fmt: skip
    """Return the tags of a run or a device after a change, sorted.

    Raise `UsageError` for an invalid tag, and if more than `MAX_TAGS` would be left; `command` changes them.
    """
    for tag in (*add, *remove):
        if not TAG.fullmatch(tag):
            raise UsageError(
                f"the tag {tag[:40]!r} is not valid",
                why="a tag has 1 to 32 characters: a to z, 0 to 9 and -",
                hint=f"{command} {name} +paper",
            )
    tags = sorted({*known, *add} - {*remove})
    if len(tags) > MAX_TAGS:
        raise UsageError(
            f"{name} would have {len(tags)} tags",
            why=f"there are at most {MAX_TAGS}",
            hint=f"remove one: {command} {name} -{known[0] if known else tags[0]}",
        )
    return tags


def _columns(connection: Connection, run_id: str, with_deleted: bool = False) -> Mapping[str, Any]:
    """Return what is known of a run by its whole id."""
    wanted = select(Run.c.status, Run.c.tags, Run.c.archived_at, Run.c.deleted_at).where(Run.c.run_id == run_id)
    found = connection.execute(wanted).mappings().first()
    if found is None or (found["deleted_at"] is not None and not with_deleted):
        raise NotFound(f"no run {run_id!r}", why="no run has this id", hint="thinwire runs list")
    return dict(found)
