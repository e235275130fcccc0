"""The store: one object through which everything durable but models and frames is written and read."""

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

IDENTITY_BYTES = 8  # random: of a million runs two share one with a probability of 3e-8


class Store:
    """Used by several threads and processes at once; every call is one short transaction.

    A write is durable when it returns (SQLite: WAL, synchronous=FULL) and leaves nothing when it raises. Disk
    trouble is `DataLost`, a database server that does not answer `Unreachable`.
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
        """Open a SQLite file or a database's URL; it is made where there is none.

        `DataLost` when it is damaged, newer than this program, cannot be written (and is not `read_only`), or is older:
        only who says `upgrade` (the aggregator, when it starts) changes an old one, after a copy was made. One that
        is not `durable` may be damaged by a power cut: it is for a folder that its process removes.
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
        """What `open` takes, in this or another process; it holds the password where there is one."""
        return self._database.url.render_as_string(hide_password=False)

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Writing what happens.

    def create_run(
        self, task: str, plan: RunPlan, layout: Layout, task_report: TaskReport, *, source: Source = "devices"
    ) -> str:
        """A new run `TASK-N` that is `preparing` until its status says otherwise."""
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
        """Append events to the journal and to all that is read from it, together with what was measured of devices."""
        self._recorder.record(run_id, events, measured)

    def note(self, run_id: str, events: Sequence[Event]) -> None:
        """Let events that decide nothing be appended with the run's next record, or by `record_noted`."""
        self._recorder.note(run_id, events)

    def record_noted(self) -> None:
        """Append all that was noted; what cannot be written now stays noted, and is tried again."""
        self._recorder.record_noted()

    def gathering(self, run_id: str) -> AbstractContextManager[None]:
        """For a run that nobody resumes: what happens in it is written half a second later, or when a round closes."""
        return self._recorder.gathering(run_id)

    def record_device(self, event: DeviceJoined | DeviceLeft) -> None:
        self._recorder.record_device(event)

    def record_restart(self, gone_at: float = 0.0, set_by_s: float = 0.0) -> None:
        """The aggregator starts: every device counts as away until it says hello. `gone_at`: when the one before it was
        last alive, as far as is known without the journal; `set_by_s`: by how much the wall clock was set since.
        """
        self._recorder.record_restart(self._clock.wall(), gone_at, set_by_s)

    # Reading it.

    def events(self, run_id: str | None, after: int = 0, limit: int | None = None) -> list[tuple[int, Event]]:
        """(seq, event) behind `after`; `seq` rises over all runs. None: those of the devices."""
        return journal.events(self._database, run_id, after, limit)

    def head_taken(self, run_id: str) -> HeadTaken | None:
        """Which round of a run whose asks go ahead took its answers last, and since when."""
        return journal.head_taken(self._database, run_id)

    def gone(self, seq: int, at: float, now: float) -> tuple[float, float]:
        """When the aggregator that wrote event `seq` at `at` was last alive: no earlier than that, by its own clock.

        And by how much that is known to have been set since.
        """
        return journal.gone(self._database, seq, at, now)

    def last_seq(self, run_id: str | None = None) -> int:
        """The newest event's seq, of a run or of all; cheap enough to ask ten times a second."""
        return journal.last_seq(self._database, run_id)

    def runs(self) -> list[RunRow]:
        return queries.runs(self._database)

    def run(self, name: str) -> RunRow:
        """By id, unique beginning of one, or `latest`; raises `NotFound`."""
        return queries.run(self._database, name)

    def next_run(self) -> RunRow | None:
        """The run to serve now: the first of `line`."""
        return next(iter(queries.line(self._database, most=1)), None)

    def owned(self) -> list[RunRow]:
        """The runs that a process of their own simulates or hands over, as far as they are not over."""
        return queries.owned(self._database)

    def line(self) -> list[RunRow]:
        """The runs on devices in the order in which they are served: a begun one, then the queue, oldest first."""
        return queries.line(self._database)

    def ended_since(self, since: float) -> list[RunRow]:
        """The runs on devices that are over since then (wall-clock), oldest first."""
        return queries.ended_since(self._database, since)

    def untold(self, run_id: str) -> list[str]:
        """The devices that were asked something in a run and of which nothing says that they have heard of its end."""
        return untold(self._database, run_id)

    def rounds(self, run_id: str) -> list[RoundRow]:
        return queries.rounds(self._database, run_id)

    def updates(self, run_id: str, round: int | None = None) -> list[UpdateRow]:  # noqa: A002
        """One row an ask, of the whole run or of one round."""
        return queries.updates(self._database, run_id, round)

    def clients(self, run_id: str) -> list[ClientRow]:
        return queries.clients(self._database, run_id)

    def models(self, run_id: str) -> list[ModelRow]:
        return queries.models(self._database, run_id)

    def devices(self) -> list[DeviceInfo]:
        return queries.devices(self._database)

    def measures(self, *kinds: str) -> list[MeasureRow]:
        """What is known of the links and the speed of all devices, over all runs on devices; of some kinds alone."""
        return queries.all_of(self._database, kinds)

    def folded_rounds(self, device: str) -> list[tuple[str, list[int]]]:
        """The rounds of each run that a device's updates are part of, run by run: what stays when it is shut out."""
        return queries.folded_rounds(self._database, device)

    def device_updates(self, name: str, limit: int = 50) -> list[UpdateRow]:
        """What a device was asked last and what came of it, newest first, over all runs on devices."""
        return queries.device_updates(self._database, name, limit)

    def device_actions(self, name: str | None = None, limit: int = 100) -> list[DeviceAction]:
        """Who did what to devices (or to one of them) and when, newest first."""
        return audit.actions(self._database, name, limit)

    def door_notes(self, limit: int = 100) -> list[DoorNote]:
        """What the door refused and why, newest first; the newest thousand are kept."""
        return audit.notes(self._database, limit)

    def last_act(self) -> int:
        """Rises with all that people, devices and the door wrote beside the journal; as cheap as `last_seq`."""
        return audit.last(self._database)

    # Orders of people.

    def order(self, kind: str, run_id: str = "", args: Mapping[str, Any] | None = None, who: str = "operator") -> int:
        return operators.order(self._database, kind, run_id, args or {}, who, self._clock.wall())

    def pending_orders(self) -> list[Order]:
        return operators.pending(self._database)

    def answer(self, order_id: int, result: Mapping[str, Any]) -> None:
        operators.answer(self._database, order_id, result, self._clock.wall())

    def result(self, order_id: int) -> dict[str, Any] | None:
        """What came of an order; None while it waits."""
        return operators.result(self._database, order_id)

    # The page's door.

    def new_login_code(self, valid_s: float = 600) -> str:
        return self._logins.new_code(valid_s)

    def redeem(self, code: str) -> str | None:
        """A session's token for a valid code, once."""
        return self._logins.redeem(code)

    def session(self, token: str) -> bool:
        return self._logins.valid(token)

    def end_session(self, token: str) -> None:
        self._logins.end(token)
