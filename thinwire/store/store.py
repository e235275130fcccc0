"""The store: the one object through which all durable state but models and payloads is written and read."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import func, insert, select

from thinwire.core.clock import Clock, RealClock
from thinwire.core.events import DeviceJoined, DeviceLeft, Event, HeadTaken
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.store import audit, journal, operators, queries, schema
from thinwire.store.database import Database, database_url
from thinwire.store.device_registry import StoredRoster
from thinwire.store.invitations import Invitations
from thinwire.store.journal import Recorder
from thinwire.store.operators import Logins
from thinwire.store.queries import untold
from thinwire.store.read_models import (
    ClientRow,
    DeviceAction,
    DeviceInfo,
    DoorNote,
    MeasureRow,
    ModelRow,
    Order,
    RoundRow,
    RunRow,
    Source,
    UpdateRow,
)
from thinwire.store.run_tables import Run

IDENTITY_BYTES = 8  # random; the probability that two of a million runs share one is 3e-8


class Store:
    """The aggregator's store. Several threads and processes may use it at once; every call is one short transaction.

    Invariant: a write is durable when it returns (SQLite: WAL, synchronous=FULL) and changes nothing when it raises. A
    disk error raises `DataLost`; a database server that does not answer raises `Unreachable`.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._recorder, self._logins = Recorder(database), Logins(database, clock)
        self.roster, self.invitations = StoredRoster(database, clock), Invitations(database, clock)

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

    # Writing

    def create_run(
        self, task: str, plan: RunPlan, layout: Layout, task_report: TaskReport, *, source: Source = "devices"
    ) -> str:
        """Create a run `TASK-N` with the status `preparing`, and return its id."""
        with self._database.writing() as connection:
            number = int(connection.scalar(select(func.max(Run.task_number)).where(Run.task == task)) or 0) + 1
            run_id = f"{task}-{number}"
            row = {
                "run_id": run_id, "task": task, "task_number": number, "source": source, "status": "preparing",
                "plan": plan.to_json(), "layout": layout.to_json(), "size": layout.size,
                "task_report": dataclasses.asdict(task_report), "created_at": self._clock.wall(),
                "rounds_total": plan.run.rounds,
                "identity": secrets.token_hex(IDENTITY_BYTES) if source == "devices" else "",
            }  # fmt: skip
            connection.execute(insert(Run), row)
        return run_id

    def record(self, run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
        """Append events to the journal and apply them to the read tables, together with measurements of devices."""
        self._recorder.record(run_id, events, measured)

    def note(self, run_id: str, events: Sequence[Event]) -> None:
        """Keep events that decide nothing until the run's next `record`, or until `record_noted`."""
        self._recorder.note(run_id, events)

    def record_noted(self) -> None:
        """Append all noted events; after an error they stay noted for the next attempt."""
        self._recorder.record_noted()

    def gathering(self, run_id: str) -> AbstractContextManager[None]:
        """Return a context in which a run's events are written every half second, and when a round closes.

        It is for a run that nobody resumes after a crash.
        """
        return self._recorder.gathering(run_id)

    def record_device(self, event: DeviceJoined | DeviceLeft) -> None:
        """Record that a device has connected or disconnected."""
        self._recorder.record_device(event)

    def record_restart(self, gone_at: float = 0.0, set_by_s: float = 0.0) -> None:
        """Record that the aggregator has started: every device is offline until it registers.

        `gone_at` is the time at which the previous aggregator was last alive, as far as it is known without the
        journal. `set_by_s` is the number of seconds by which the wall clock was set since.
        """
        self._recorder.record_restart(self._clock.wall(), gone_at, set_by_s)

    # Reading

    def events(self, run_id: str | None, after: int = 0, limit: int | None = None) -> list[tuple[int, Event]]:
        """Return (seq, event) with seq above `after`; `seq` rises over all runs.

        With None as the run, the events of the devices are returned.
        """
        return journal.events(self._database, run_id, after, limit)

    def head_taken(self, run_id: str) -> HeadTaken | None:
        """Return the event by which the current round of a pipelined run became current, or None if there is none."""
        return journal.head_taken(self._database, run_id)

    def gone(self, seq: int, at: float, now: float) -> tuple[float, float]:
        """Return (last_alive_at, clock_step_s) of the aggregator that wrote event `seq` at time `at`.

        `last_alive_at` is by that aggregator's own clock and never before `at`. `clock_step_s` is the known change of
        the clock since.
        """
        return journal.gone(self._database, seq, at, now)

    def last_seq(self, run_id: str | None = None) -> int:
        """Return the latest event's seq, of a run or of all; cheap enough for ten calls a second."""
        return journal.last_seq(self._database, run_id)

    def runs(self) -> list[RunRow]:
        """Return all runs, latest first."""
        return queries.runs(self._database)

    def run(self, name: str) -> RunRow:
        """Return the run of this id, of a unique prefix of one, or the `latest`; raise `NotFound` if there is none."""
        return queries.run(self._database, name)

    def next_run(self) -> RunRow | None:
        """Return the run to serve now, the first of `line`, or None."""
        return next(iter(queries.line(self._database, most=1)), None)

    def owned(self) -> list[RunRow]:
        """Return the unfinished runs that a process of their own simulates or has not submitted yet."""
        return queries.owned(self._database)

    def line(self) -> list[RunRow]:
        """Return the runs on devices in the order of service: a started one, then the queue, oldest first."""
        return queries.line(self._database)

    def ended_since(self, since: float) -> list[RunRow]:
        """Return the runs on devices that ended since a time (wall clock), oldest first."""
        return queries.ended_since(self._database, since)

    def untold(self, run_id: str) -> list[str]:
        """Return the devices of a run that have not confirmed that they know of its end."""
        return untold(self._database, run_id)

    def rounds(self, run_id: str) -> list[RoundRow]:
        """Return the run's rounds from 1 on."""
        return queries.rounds(self._database, run_id)

    def updates(self, run_id: str, round: int | None = None) -> list[UpdateRow]:  # noqa: A002
        """Return one row for each assignment of the run, or of one of its rounds."""
        return queries.updates(self._database, run_id, round)

    def clients(self, run_id: str) -> list[ClientRow]:
        """Return each device's part in a run, by name."""
        return queries.clients(self._database, run_id)

    def models(self, run_id: str) -> list[ModelRow]:
        """Return the model versions of a run, oldest first."""
        return queries.models(self._database, run_id)

    def devices(self) -> list[DeviceInfo]:
        """Return all devices by name."""
        return queries.devices(self._database)

    def measures(self, *kinds: str) -> list[MeasureRow]:
        """Return the measured links and speeds of all devices, over all runs on devices.

        With `kinds`, only measurements of these kinds are returned.
        """
        return queries.all_of(self._database, kinds)

    def folded_rounds(self, device: str) -> list[tuple[str, list[int]]]:
        """Return (run, rounds) for a device's aggregated updates, which stay in the model when it is revoked."""
        return queries.folded_rounds(self._database, device)

    def device_updates(self, name: str, limit: int = 50) -> list[UpdateRow]:
        """Return a device's last assignments and their outcomes over all runs on devices, latest first."""
        return queries.device_updates(self._database, name, limit)

    def device_actions(self, name: str | None = None, limit: int = 100) -> list[DeviceAction]:
        """Return the actions on all devices or on one, with actor and time, latest first."""
        return audit.actions(self._database, name, limit)

    def door_notes(self, limit: int = 100) -> list[DoorNote]:
        """Return the refusals of the device API and their reasons, latest first; the last thousand are kept."""
        return audit.notes(self._database, limit)

    def last_act(self) -> int:
        """Return a number that rises with every row written outside the journal by users, devices and the device API.

        The call is as cheap as `last_seq`.
        """
        return audit.last(self._database)

    # Commands of operators

    def order(self, kind: str, run_id: str = "", args: Mapping[str, Any] | None = None, who: str = "operator") -> int:
        """Add a command for the aggregator, and return its number."""
        return operators.order(self._database, kind, run_id, args or {}, who, self._clock.wall())

    def pending_orders(self) -> list[Order]:
        """Return the commands without a result, oldest first."""
        return operators.pending(self._database)

    def answer(self, order_id: int, result: Mapping[str, Any]) -> None:
        """Store the result of a command."""
        operators.answer(self._database, order_id, result, self._clock.wall())

    def result(self, order_id: int) -> dict[str, Any] | None:
        """Return the result of a command, or None while it is pending."""
        return operators.result(self._database, order_id)

    # Logins of the dashboard

    def new_login_code(self, valid_s: float = 600) -> str:
        """Return a new login code for the dashboard."""
        return self._logins.new_code(valid_s)

    def redeem(self, code: str) -> str | None:
        """Return a session's token for a valid code, which is then used up; None for any other code."""
        return self._logins.redeem(code)

    def session(self, token: str) -> bool:
        """Return True if a session with this token is open."""
        return self._logins.valid(token)

    def end_session(self, token: str) -> None:
        """End the session with this token."""
        self._logins.end(token)
