"""The routes of a new run: the plan's schema, its check as a person types it, and the command to start it.

A check has no side effects. A command is a row of `store.commands`; the aggregator makes the run and answers.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from pydantic import Field

from thinwire.core.errors import PlanError, Refused, Unreachable
from thinwire.core.formatting import counted
from thinwire.core.owner_file import AggregatorFile
from thinwire.core.plan import RunPlan
from thinwire.core.plan_errors import Problem
from thinwire.core.plan_names import UPLOAD, named_model, upload_id
from thinwire.core.secure_numbers import fewest_devices
from thinwire.reports.plan_check import Estimate, PlanCheck, check_text, check_values, estimate
from thinwire.store import DeviceInfo, MeasureRow, Store
from thinwire.store.task_layouts import KnownTask, hosts, known_task, known_tasks
from thinwire.web.access import API, SettingsDep, StoreDep, from_state, visitor
from thinwire.web.problems import PROBLEMS
from thinwire.web.schemas import Answer, Body, LeftCommand
from thinwire.web.settings import may_serve, owner_file
from thinwire.web.uploads import Uploads

KEPT_S: Final = 3.0  # for which devices and links are not read again while a person types
MAX_PROBLEMS: Final = 100  # in one answer
AT_ONCE: Final = 2  # checks; one takes up to a second of a core, and pages are served by the same process
AT_MOST: Final = 20  # checks that run or wait: the last one waits about ten seconds
OF_ONE: Final = 4  # of them for one user, tokens included: nobody takes the turns of all others
Found = TypeVar("Found")
AGAIN: Final = "upload it again, or run:ID@0"


class Given(Body):
    """Holds a plan to check, as TOML (`text`) or as values by section and key (`plan`)."""

    text: str | None = Field(default=None, max_length=64_000)
    plan: dict[str, Any] | None = None


class NewRun(Body):
    """Holds a plan to run, as values by section and key."""

    plan: dict[str, Any]


class Wrong(Answer):
    """Holds a problem of a plan: its `place` is section and key, or empty; `hint` is what to try."""

    place: list[str]
    what: str
    why: str
    hint: str


class PlanChecked(Answer):
    """Holds what was found of a plan. `given` are its keys that differ from their defaults, `toml` is the same as text.

    `first_model` says where the first model would come from. `cost` is null while the plan has problems.
    """

    ok: bool
    problems: list[Wrong]
    given: dict[str, dict[str, Any]]
    toml: str
    digest: str
    first_model: str
    notes: list[str]
    cost: Estimate | None


class KnownTasks(Answer):
    """Holds the tasks that approved devices have, or that an earlier run had; by name, with the number of devices."""

    tasks: dict[str, int]


class Planning:
    """Checks plans and tells their cost; `settings_file` reads what `aggregator.toml` says now."""

    def __init__(self, store: Store, lock: Path | None) -> None:
        self._store, self._home = store, lock.parent.parent if lock else None
        self._uploads, self._turns, self._taken = Uploads(lock), anyio.CapacityLimiter(AT_ONCE), Counter[str]()
        self._known: tuple[float, str, KnownTask | None, list[DeviceInfo], list[MeasureRow]] | None = None

    @property
    def owner_file(self) -> AggregatorFile:
        """Return what `aggregator.toml` says; the defaults if the dashboard has no state directory to look at."""
        return owner_file(self._home) if self._home else AggregatorFile()

    async def in_turn(self, user: str, work: Callable[[], Found]) -> Found:
        """Return what `work` returns, in a thread; `AT_ONCE` run at a time, and the others wait without one.

        Raise `Unreachable` if `AT_MOST` run or wait already, or `OF_ONE` of this user.
        """
        why = f"the dashboard checks {AT_ONCE} at a time, and {AT_MOST - AT_ONCE} wait"
        if (is_one := self._taken[user] >= OF_ONE) or self._taken.total() >= AT_MOST:
            why = f"at most {OF_ONE} of a user run or wait" if is_one else why
            raise Unreachable("too many plans are being checked", why, "the same again in ten seconds")
        self._taken[user] += 1
        try:
            return await run_sync(work, limiter=self._turns)
        finally:
            self._taken -= Counter((user,))  # which drops a user without any

    def check(self, given: Given) -> PlanChecked:
        """Return every problem of a plan at its key, and what it would cost if it has none."""
        allow = self.owner_file.allow
        found = check_values(given.plan or {}, allow) if given.text is None else check_text(given.text, allow)
        found = self._with_upload(found)
        if found.plan is None or not found.ok:
            return _checked(found, [], None)
        known, there, measures = self._of_task(found.plan.run.task)
        if known is not None:  # once more, with the tensors that rules by layer name
            found = check_values(found.plan.to_json(), allow, known.layout, found.toml)
        cost = estimate(found.plan, known, there, measures) if found.plan is not None and found.ok else None
        return _checked(found, _notes(found.plan, known, there) if found.plan else [], cost)

    def leave_start(self, plan: dict[str, Any], who: str) -> int:
        """Leave a command to start a run of this plan, and return its number; raise `PlanError` if it is refused."""
        found = self._with_upload(check_values(plan, self.owner_file.allow), use=True)
        if found.plan is None or not found.ok:
            first = found.problems[0]
            more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
            raise PlanError(f"{first.what}{more}", first.why, first.hint)
        known, there, measures = self._of_task(found.plan.run.task)
        expected = estimate(found.plan, known, there, measures).summary()
        args = {"plan": found.plan.to_json(), "estimate": expected}
        return self._store.commands.add_start(args, who)

    def _with_upload(self, found: PlanCheck, use: bool = False) -> PlanCheck:
        """Add a problem to a plan whose uploaded model is not there; with `use` the file counts as used now."""
        if found.plan is None or not found.plan.run.init.startswith(UPLOAD):
            return found
        path = self._uploads.path(upload_id(found.plan.run.init))
        if path is None:
            why = "an upload goes when it was not used for a day; the run that began with it has it as its model 0"
            missing = Problem(("run", "init"), "there is no such upload", why, AGAIN)
            return replace(found, problems=[*found.problems, missing])
        if use:
            os.utime(path)
        return found

    def _of_task(self, task: str) -> tuple[KnownTask | None, list[DeviceInfo], list[MeasureRow]]:
        now, kept = time.monotonic(), self._known
        if kept is None or kept[1] != task or now - kept[0] > KEPT_S:
            devices = self._store.devices()
            kept = now, task, known_task(self._store, task), hosts(devices, task), self._store.measures()
            self._known = kept
        return kept[2:]


def _checked(found: PlanCheck, notes: list[str], cost: Estimate | None) -> PlanChecked:
    return PlanChecked(
        ok=found.ok, given={name: dict(table) for name, table in found.given.items()}, toml=found.toml, notes=notes,
        problems=[Wrong(**{**asdict(one), "place": list(one.place)}) for one in found.problems[:MAX_PROBLEMS]],
        digest=found.plan.digest if found.plan else "", first_model=_origin(found.plan) if found.plan else "",
        cost=cost,
    )  # fmt: skip


def _origin(plan: RunPlan) -> str:
    """Return in words where the first model of a run would come from."""
    init = plan.run.init
    if init in ("", "device"):
        return "a device makes the first model when the run begins"
    if named := named_model(init):
        run_id, model = named
        return f"{'the last model' if model == 'last' else f'model {model}'} of {run_id}"
    return "the uploaded model" if init.startswith(UPLOAD) else f"the file {init} on the aggregator's machine"


def _notes(plan: RunPlan, known: KnownTask | None, there: list[DeviceInfo]) -> list[str]:
    """Return sentences on what would keep a run waiting, though its plan is right."""
    notes, clients, waits = [], plan.cohort.clients, plan.cohort.wait_for
    needed = max(clients if isinstance(clients, int) else 0, waits if isinstance(waits, int) else len(waits))
    wants = "The plan wants"
    if plan.secure.enabled and (least := fewest_devices(plan)) > needed:
        wants, needed = "Secure aggregation needs", least
    if not there:
        notes.append(f"No approved device has the task {plan.run.task}: the run would wait for one.")
    elif needed > len(there):
        have = f"{len(there)} {'has' if len(there) == 1 else 'have'} the task"
        notes.append(f"{wants} {counted(needed, 'device')}, and {have}: the run would wait for more.")
    if known is not None and known.others:
        named = ", ".join(known.others[:3])
        notes.append(
            f"{counted(len(known.others), 'device')} with another layout of this task cannot take part: {named}."
        )
    return notes


@cache
def plan_schema() -> dict[str, Any]:
    """Return the JSON schema of a plan, from which the form is made."""
    return RunPlan.model_json_schema()


PlanningDep = Annotated[Planning, from_state("planning")]
router = APIRouter(prefix=API, responses=PROBLEMS)


@router.get("/plans/schema")
def schema() -> dict[str, Any]:
    """Return the JSON schema of a plan: sections, keys with descriptions, defaults and values."""
    return plan_schema()


@router.get("/plans/tasks")
def tasks(store: StoreDep) -> KnownTasks:
    """Return the tasks that a plan may name, each with the number of approved devices that have it."""
    devices = store.devices()
    return KnownTasks(tasks={name: len(hosts(devices, name)) for name in known_tasks(store)})


@router.post("/plans/check")
async def check(request: Request, planning: PlanningDep, given: Given) -> PlanChecked:
    """Check a plan, given as TOML or as values, without side effects."""
    return await planning.in_turn(visitor(request).person.user, partial(planning.check, given))


@router.post("/runs", status_code=202)
async def start_run(
    request: Request, settings: SettingsDep, planning: PlanningDep, new: NewRun
) -> LeftCommand:  # fmt: skip
    """Command a run of a plan; the aggregator makes it, and `/commands/{number}` tells its id or the refusal."""
    if not may_serve(settings.lock):
        raise Refused("no aggregator is running", "it makes the runs and drives them", settings.start_command)
    person = visitor(request).person
    leave = partial(planning.leave_start, new.plan, person.who)
    return LeftCommand(command=await planning.in_turn(person.user, leave))
