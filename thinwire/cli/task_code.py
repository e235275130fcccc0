"""Which code a task's name means here: --task, then task.py beside the plan, then what is installed.

A task.py has no name of its own: it is the code of the task that the plan's file names, not of one that --set names.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.client.task import LoadedTask


def task_spec(name: str, plan: Path, given: str | None) -> str:
    """The NAME=MODULE that a plan's task resolves to; `TaskError` says all three ways when there is none."""
    from thinwire.client.task import GROUP, installed_tasks
    from thinwire.core.errors import TaskError

    if given:
        named, equals, module = given.partition("=")
        if not equals:
            return f"{name}={given}"
        if named != name:
            raise TaskError(
                f"--task names {named!r}, the plan trains {name!r}",
                why=f'{plan} says [run] task = "{name}"',
                hint=f"--task {name}={module}",
            )
        return given
    beside = plan.absolute().parent / "task.py"
    found, otherwise = f"no {beside}", "thinwire init DIR writes one"
    if beside.is_file():
        its = _named_in(plan)
        if its in (None, name):
            return f"{name}={beside}"
        found, otherwise = f"{beside} is that of {its!r}, which the plan names", f"or the task {its!r}"
    if installed := installed_tasks().get(name):
        return f"{name}={installed}"
    raise TaskError(
        f"no code for the task {name!r}",
        why=f"no --task, {found}, no installed entry point {GROUP}:{name}",
        hint=f"--task {name}=path/to/task.py; {otherwise}",
    )


def _named_in(plan: Path) -> str | None:
    """The task that a plan's file names, whatever --set makes of it."""
    named: str | None = tomllib.loads(plan.read_text()).get("run", {}).get("task")
    return named


def load(name: str, plan: Path, given: str | None) -> LoadedTask:
    """Import it."""
    from thinwire.client.task import load_task

    return load_task(task_spec(name, plan, given))
