"""This module stores the commands of people and the queue of runs, which the aggregator's service reads.

The dashboard and the command line write commands as rows. The service reads them several times a second, and executes
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, RowMapping, case, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused
from thinwire.core.fleet import TaskReport
from thinwire.store.database import Database, columns_of
from thinwire.store.read_models import CommandRow, RunRow
from thinwire.store.tables import Command, Run

START_RUN = "start-run"  # the command with a plan from which the aggregator makes a run
MAX_WAITING_RUNS = 20  # runs that wait for their start or in the queue before a further start is refused

_PENDING = (
    select(Command.c.id, Command.c.kind, Command.c.run_id, Command.c.args, Command.c.who, Command.c.at)
    .where(Command.c.answered_at.is_(None))
    .order_by(Command.c.id)
)


class Commands:
    """The commands for the aggregator's service, each with its result once it has taken effect.

    The dashboard and the command line write commands as rows, and the service executes them.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def add(self, kind: str, run_id: str = "", args: Mapping[str, Any] | None = None, who: str = "operator") -> int:
        """Add a command, and return its number."""
        row = {"kind": kind, "run_id": run_id, "args": dict(args or {}), "who": who, "at": self._clock.wall()}
        with self._database.writing() as connection:
            return int(connection.execute(insert(Command).values(row).returning(Command.c.id)).scalar_one())

    def add_start(self, args: Mapping[str, Any], who: str) -> int:
        """Add a command to start a run; raise `Refused` if `MAX_WAITING_RUNS` have not begun."""
        row = {"kind": START_RUN, "run_id": "", "args": dict(args), "who": who, "at": self._clock.wall()}
        starts = select(func.count()).where(Command.c.kind == START_RUN, Command.c.answered_at.is_(None))
        waiting = Run.c.status.in_(("preparing", "queued")) & (Run.c.source == "devices")
        with self._database.writing() as connection:
            there = sum(int(connection.scalar(each) or 0) for each in (starts, select(func.count()).where(waiting)))
            if there >= MAX_WAITING_RUNS:
                raise Refused(
                    f"{there} runs wait in the queue", f"no further ones are accepted while {MAX_WAITING_RUNS} wait",
                    "stop some of them, or wait until some have begun",
                )  # fmt: skip
            return int(connection.execute(insert(Command).values(row).returning(Command.c.id)).scalar_one())

    def pending(self) -> list[CommandRow]:
        """Return the commands without a result, oldest first."""
        with self._database.reading() as connection:
            return [CommandRow(**row) for row in connection.execute(_PENDING).mappings()]

    def pending_of(self, kind: str, run_id: str) -> CommandRow | None:
        """Return the oldest command of this kind for this run that has no result yet; None without one."""
        return next((one for one in self.pending() if (one.kind, one.run_id) == (kind, run_id)), None)

    def answer(self, command_id: int, result: Mapping[str, Any], run_id: str = "") -> None:
        """Store a command's result, and the run that it made.

        The first result stays, so a command that was executed twice has one result.
        """
        first = update(Command).where(Command.c.id == command_id, Command.c.answered_at.is_(None))
        values = {"result": dict(result), "answered_at": self._clock.wall(), **({"run_id": run_id} if run_id else {})}
        with self._database.writing() as connection:
            if connection.execute(first, values).rowcount == 0:
                _must_be(connection.scalar(select(Command.c.id).where(Command.c.id == command_id)), command_id)

    def args_of(self, kind: str, run_id: str) -> dict[str, Any]:
        """Return the arguments of the first command of this kind about a run; {} if there was none."""
        wanted = select(Command.c.args).where(Command.c.kind == kind, Command.c.run_id == run_id).order_by(Command.c.id)
        with self._database.reading() as connection:
            return dict(connection.scalar(wanted.limit(1)) or {})

    def result(self, command_id: int) -> dict[str, Any] | None:
        """Return a command's result, or None while it is pending; raise `NotFound` for an unknown number."""
        with self._database.reading() as connection:
            found = connection.execute(select(Command.c.id, Command.c.result).where(Command.c.id == command_id)).first()
        _must_be(found, command_id)
        return None if found is None else found.result


def _must_be(found: object, command_id: int) -> None:
    if found is None:
        raise NotFound(
            f"no command {command_id}", why="none has this number", hint="the number that the answer to a command names"
        )


def cancel_commands(connection: Connection, kind: str, fingerprint: str, why: str, at: float) -> None:
    """Answer the pending commands of a kind about a device's key as no longer needed."""
    open_ones = select(Command.c.id, Command.c.args).where(Command.c.kind == kind, Command.c.answered_at.is_(None))
    for row in connection.execute(open_ones).all():
        if row.args.get("fingerprint") == fingerprint:
            answered = {"result": {"done": False, "why": why}, "answered_at": at}
            connection.execute(update(Command).where(Command.c.id == row.id), answered)


_RUN_QUEUE = (
    columns_of(Run, RunRow)
    .where(Run.c.status.in_(("running", "waiting", "queued")), Run.c.source == "devices")
    .order_by(case({"running": 0, "waiting": 1, "queued": 2}, value=Run.c.status), Run.c.number)
)


class RunQueue:
    """The runs that are not over."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def run_queue(self) -> list[RunRow]:
        """Return the runs on devices in the order of service: a started one, then the queue, oldest first."""
        return [run_row(found) for found in self._database.rows(_RUN_QUEUE)]

    def owned(self) -> list[RunRow]:
        """Return the unfinished runs that a process of their own simulates or has not submitted yet."""
        going = Run.c.status.in_(("queued", "waiting", "running")) & (Run.c.source == "sim")
        wanted = columns_of(Run, RunRow).where(going | (Run.c.status == "preparing"))
        return [run_row(found) for found in self._database.rows(wanted.order_by(Run.c.number))]


def run_row(found: Mapping[str, Any] | RowMapping) -> RunRow:
    """Make a `RunRow` of a row of the table."""
    report = dict(found["task_report"])
    return RunRow(**{**found, "task_report": TaskReport(**{**report, "codecs": tuple(report["codecs"])})})
