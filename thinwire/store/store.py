"""The store: the one object through which all durable state but models and payloads is written and read."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from sqlalchemy import Connection, func, insert, select, update

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import NotFound, Refused
from thinwire.core.events import ENDED
from thinwire.core.fleet import TaskReport
from thinwire.store import schema
from thinwire.store.alerts import Alerts
from thinwire.store.audit import AuditLog
from thinwire.store.database import Database, database_url
from thinwire.store.device_registry import StoredRoster
from thinwire.store.forgetting import Forgotten, forget, remove
from thinwire.store.journal import JournalReader, Recorder
from thinwire.store.kept_runs import KeptRuns
from thinwire.store.one_time_secrets import Invitations
from thinwire.store.privacy_ledger import PrivacyLedger
from thinwire.store.queries import RunQueries
from thinwire.store.read_models import (
    Source,
)
from thinwire.store.sessions import Logins
from thinwire.store.tables import Command, Run
from thinwire.store.tokens import Tokens
from thinwire.store.users import Users
from thinwire.store.work_queue import Commands, RunQueue

if TYPE_CHECKING:
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan

RunCommand = Literal["stop", "stop-after-round", "pause", "resume"]
IDENTITY_BYTES = 8  # random; the probability that two of a million runs share one is 3e-8


class Store(RunQueries, RunQueue, JournalReader, Recorder, KeptRuns):
    """The aggregator's store. Several threads and processes may use it at once; every call is one short transaction.

    Invariant: a write is durable when it returns (SQLite: WAL, synchronous=FULL) and changes nothing when it raises. A
    disk error raises `DataLost`; a database server that does not answer raises `Unreachable`.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        RunQueries.__init__(self, database)
        RunQueue.__init__(self, database)
        JournalReader.__init__(self, database)
        Recorder.__init__(self, database)
        KeptRuns.__init__(self, database, clock)
        self.roster, self.invitations = StoredRoster(database, clock), Invitations(database, clock)
        self.commands, self.logins = Commands(database, clock), Logins(database, clock)
        self.users, self.tokens = Users(database, clock), Tokens(database, clock)
        self.audit, self.privacy = AuditLog(database, clock), PrivacyLedger(database, clock)
        self.alerts = Alerts(database, clock)

    @classmethod
    def open(
        cls,
        path_or_url: str | Path,
        *,
        read_only: bool = False,
        upgrade: bool = False,
        clock: Clock | None = None,
        durable: bool = True,
    ) -> Self:
        """Open a SQLite file or a database's URL, and create the database if there is none.

        Raise `DataLost` if it is damaged, newer than this program, or not writable (unless `read_only`). An older
        database raises it too, unless `upgrade` is set: the aggregator sets it at its start, and the upgrade keeps a
        copy. Without `durable` a power cut may damage the database: for a folder that its process removes.
        """
        database = Database(database_url(path_or_url), read_only, durable)
        try:
            schema.prepare(database, upgrade)
        except BaseException:
            database.close()
            raise
        return cls(database, clock or RealClock())

    @property
    def url(self) -> str:
        """Return the URL for `open` in this or another process, with the password if there is one."""
        return self._database.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Close the database's connections."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create_run(
        self, task: str, plan: RunPlan, layout: Layout, task_report: TaskReport, *, source: Source = "devices",
        name: str = "", command_id: int = 0,
    ) -> str:  # fmt: skip
        """Create a run `TASK-N` with the status `preparing`, and return its id.

        The command `command_id` names the run from then on. If a process died before it queued that run, the next call
        prepares the same run again; it raises `Refused` if a person has stopped the run.

        Invariant: an id is never given again, because the row of a deleted run stays.
        """
        row = {
            "source": source, "status": "preparing", "plan": plan.to_json(), "layout": layout.to_json(),
            "size": layout.size, "task_report": dataclasses.asdict(task_report), "created_at": self._clock.wall(),
            "rounds_total": plan.run.rounds, "name": name,
        }  # fmt: skip
        with self._database.writing() as connection:
            if run_id := _prepared(connection, command_id):
                connection.execute(update(Run).where(Run.c.run_id == run_id), row)
                return run_id
            number = int(connection.scalar(select(func.max(Run.c.task_number)).where(Run.c.task == task)) or 0) + 1
            run_id = f"{task}-{number}"
            identity = secrets.token_hex(IDENTITY_BYTES) if source == "devices" else ""
            own = {"run_id": run_id, "task": task, "task_number": number, "identity": identity}
            connection.execute(insert(Run), row | own)
            if command_id:
                connection.execute(update(Command).where(Command.c.id == command_id), {"run_id": run_id})
        return run_id

    def command_run(self, verb: RunCommand, run_id: str, who: str = "operator") -> int:
        """Leave a command about a run for the aggregator, and return its number.

        Raise `Refused` if a run that is over, simulated or not handed over yet is to be paused or resumed, and if a run
        is to be resumed that is not paused.
        """
        row = self.run(run_id)
        if verb in ("pause", "resume") and (row.source == "sim" or row.status in (*ENDED, "preparing")):
            why = "it is simulated" if row.source == "sim" else f"it is {row.status}"
            is_over = row.status in ENDED and row.source != "sim"
            clone = f"thinwire runs clone {row.run_id}"
            more = f"more rounds: thinwire runs extend {row.run_id} --rounds N"
            if row.plan["secure"]["enabled"]:  # its masks were planned for its own rounds
                more = f"more rounds from its model: {clone} --set run.init=run:{row.run_id}"
            more += f"; from the start: {clone}"
            raise Refused(f"{row.run_id} has nothing to {verb}", why, more if is_over else "thinwire runs list")
        if verb == "resume" and row.status != "paused":
            raise Refused(f"{row.run_id} is not paused", why=f"it is {row.status}", hint=f"thinwire runs show {run_id}")
        return self.commands.add(verb if verb == "stop-after-round" else f"{verb}-run", row.run_id, who=who)

    def revoke_device(self, name: str, who: str, fingerprint: str, is_running: Callable[[], bool]) -> int | None:
        """Revoke a device, and leave a command for a running aggregator, which clears what is open.

        Return the command's number; None if no aggregator is running, since the next one clears it at its start. Raise
        like `StoredRoster.revoke`. The command is about the key: its name may go to another device before the
        aggregator reads the command.
        """
        args = {"device": name, "fingerprint": self.roster.revoke(name, who, fingerprint)}
        return self.commands.add("revoke", args=args, who=who) if is_running() else None

    def remove_device(self, name: str, who: str = "operator") -> None:
        """Remove a device that never got an assignment; its name and key may be used again.

        Raise `Refused` if it has worked, has spent privacy, or is online.
        """
        with self._database.writing() as connection:
            remove(connection, name, who, self._clock.wall())
        self.roster.refresh()

    def forget_device(self, name: str, who: str = "operator", with_others: bool = False) -> Forgotten | None:
        """Put a pseudonym in the place of a revoked device in journal, tables and ledger; raise `Refused` if it may
        still take part, or if other devices go with it and `with_others` is False.

        Return None if nothing names it, as after an earlier call. Either way the file is written again, so that no
        freed page keeps the name.
        """
        try:
            with self._database.writing() as connection:
                found = forget(connection, name, who, self._clock.wall(), with_others)
        except NotFound:
            found = None
        self._database.compact()
        return found


def _prepared(connection: Connection, command_id: int) -> str:
    """Return the run that an earlier process began to prepare for a command; "" if there is none."""
    made = (
        select(Run.c.run_id, Run.c.status)
        .join(Command, Command.c.run_id == Run.c.run_id)
        .where(Command.c.id == command_id)
    )
    found = connection.execute(made).first()
    if found is None:
        return ""
    if found.status != "preparing":
        raise Refused(f"{found.run_id} is {found.status}", "it ended before it was in the queue", "start another run")
    return str(found.run_id)
