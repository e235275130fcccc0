"""`thinwire client doctor`: from the name of the aggregator to the room on the disk, each with what to do."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli import say
from thinwire.cli.client.joined import trusted
from thinwire.cli.doctor.disk import LEAST_BYTES, private, room
from thinwire.cli.doctor.findings import Finding, found, unseen
from thinwire.cli.doctor.kernels import kernels
from thinwire.cli.doctor.way import STEPS, walk
from thinwire.client.policy import FILE
from thinwire.core.home import MB

if TYPE_CHECKING:
    from thinwire.client.policy import Policy
    from thinwire.core.fleet import TaskReport
    from thinwire.core.layout import Layout

BYTES_A_PARAMETER = 4 * 3  # the model that came, the residual, and the answer that is kept; float32


def examine(folder: Path, aggregator: str | None, tasks: Sequence[str]) -> list[Finding]:
    """`aggregator` and `tasks`: as typed, else those of the last start, else what was joined and what is installed."""
    from thinwire.cli.service.typed import Typed, understood
    from thinwire.core.errors import ThinwireError
    from thinwire.core.home import holder

    remembered = Typed.remembered(folder)
    typed = remembered or Typed((), Path.cwd())
    last = understood("client", "start", typed.words)
    begins = (None if remembered else holder(folder / "lock")) or {}  # who starts says so before its words are kept
    try:
        url, trust = trusted(aggregator or last["aggregator"] or begins.get("aggregator"), folder)
    except ThinwireError as error:
        way = [Finding("joined", False, str(error), error.hint), *(unseen(what, "not joined") for what in STEPS)]
    else:
        way = walk(url, trust, folder)
    python = typed.folder / last["python"] if last["python"] else None
    size, looked = 0, list[Finding]()
    with contextlib.chdir(typed.folder if not tasks and typed.folder.is_dir() else "."):
        for spec in _specs(tasks or last["task"] or ()):
            finding, parameters = _task(spec, python, folder)
            looked, size = [*looked, finding], max(size, parameters)
    if not looked and begins:
        looked = [Finding("task", None, f"process {begins.get('pid', '?')} is still starting", "try again in a moment")]
    elif not looked:
        looked = [Finding("task", False, "no task is known here", "give one: --task NAME=path/to/task.py")]
    file = typed.folder / last["policy"] if last["policy"] else folder / FILE
    rules, policy = _policy(file)
    disk = _disk(folder, max(LEAST_BYTES, BYTES_A_PARAMETER * size), policy.min_free_disk_mb)
    return [*way, *looked, found("kernels", kernels), rules, disk]


def _policy(file: Path) -> tuple[Finding, Policy]:
    """What ends work here, by its keys; with the policy, or the default one where the file cannot be read."""
    from thinwire.client.policy import Policy, load_policy
    from thinwire.core.errors import PlanError

    try:
        policy = load_policy(file)
    except PlanError as error:
        return Finding("policy", False, str(error), error.hint), Policy()
    said = f"max_assignment_minutes = {policy.max_assignment_minutes:g}, min_free_disk_mb = {policy.min_free_disk_mb}"
    if policy.hours:
        said += f', hours = "{policy.hours}", hours_end_work = {str(policy.hours_end_work).lower()}'
    return Finding("policy", True, f"{said}; {file if file.exists() else f'no {file.name}: the defaults'}"), policy


def _specs(tasks: Sequence[str]) -> list[str]:
    from thinwire.client.task import installed_tasks

    return list(tasks) or [f"{name}={module}" for name, module in installed_tasks().items()]


def _task(spec: str, python: Path | None, folder: Path) -> tuple[Finding, int]:
    """The finding, and how many parameters the model has. `folder`: the client's, which its last start described."""
    size = 0

    def look() -> Finding | str:
        nonlocal size
        try:
            report, layout = _here(spec) if python is None else _elsewhere(spec, python)
        except ModuleNotFoundError as error:
            hint = "torch's build is the device's choice: README, torch" if error.name == "torch" else ""
            return Finding("task", False, f"{spec}: no module {error.name!r} in this environment", hint)
        if report.error:
            return Finding("task", False, f"{report.name}: {report.error}", "thinwire task check MODULE --data PATH")
        if layout is not None:
            size = layout.size
            if differs := _differs(report.name, layout, folder):
                return Finding("task", False, differs, "thinwire client reload")
        version, where = (f" {report.version}" if report.version else ""), (f", trained by {python}" if python else "")
        return f"{report.name}{version}, {size:,} parameters, layout {report.layout_digest[:12]}{where}"

    return found("task", look), size


def _differs(name: str, layout: Layout, folder: Path) -> str:
    """What is said where a client runs that knows another model under this task's name."""
    from thinwire.client.disk import described
    from thinwire.core.home import holder
    from thinwire.core.layout import differences

    known = described.last(folder).get(name)
    if known is None or known.digest == layout.digest or holder(folder / "lock") is None:
        return ""
    return f"{name}: its code gives another model than the client that runs has: {differences(layout, known)}"


def _here(spec: str) -> tuple[TaskReport, Layout | None]:
    from thinwire.client.bench import Here
    from thinwire.client.task import load_task

    task = Here(load_task(spec))
    report = task.report()
    return report, None if report.error else task.layout


def _elsewhere(spec: str, python: Path) -> tuple[TaskReport, Layout | None]:
    """By the interpreter that would train; what its process leaves behind is not the client's."""
    from thinwire.client.training.interpreter import Interpreter
    from thinwire.client.training.worker import Worker

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        worker = Worker([spec], Interpreter(python, Path(folder)))
        stack.callback(worker.close)
        worker.describe()
        (task,) = worker.described
    return task.report, task.parsed


def _disk(folder: Path, least: int, min_free_mb: int) -> Finding:
    if not folder.exists():
        above = next(path for path in folder.parents if path.exists())
        return Finding("disk", True, f"{say.size(_free(above))} free; {folder} is made by the first start or join")
    closed = private("disk", folder)
    if closed.ok is False:
        return closed
    kept = room("disk", folder, least + min_free_mb * MB)
    if not min_free_mb or "free" not in kept.said:
        return kept
    return replace(kept, said=f"{kept.said}; min_free_disk_mb = {min_free_mb} of them stay free")


def _free(folder: Path) -> int:
    import shutil

    return shutil.disk_usage(folder).free
