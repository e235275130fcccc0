"""`thinwire task check`: check that a module is a task, and report what one round of it costs.

A plan names its task; the code behind the name is found in this order: `--task`, then task.py beside the plan, then the
installed entry points. A task.py has no name of its own. It is the code of the task that the plan's file names, not of
one that `--set` names.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from thinwire.cli import console
from thinwire.cli.params import Data, Json
from thinwire.core.formatting import duration, figure, figures, size
from thinwire.core.plan_values import TaskName

if TYPE_CHECKING:
    from thinwire.client.task import LoadedTask


app = typer.Typer(name="task", help="Tasks: the model and the data of a run.", no_args_is_help=True)


@app.callback()
def top() -> None:
    """A task is a module with model(), data(client) and loss(model, batch)."""


@app.command()
def check(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="dotted name or .py file of the task")],
    data: Data = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="plan with codec, batch and lr")] = None,
    json: Json = False,
) -> None:
    """Check a task by one local step, one encode and one aggregation in this process."""
    found = checked(module, data, plan)
    if json:
        console.document(found)
        return
    for line in lines(found):
        console.line(line)
    its_own = plan is not None and Path(module).absolute() == plan.absolute().parent / "task.py"
    task = "" if its_own else f" --task {found['task']}={module}"
    console.note(f"next: thinwire sim {plan or 'PLAN'} --clients 4{task}")


def task_spec(name: str, plan: Path, given: str | None) -> str:
    """Return the NAME=MODULE for the task `name` of `plan`; `TaskError` lists all three places if none has its code."""
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
    its_file = beside.with_name(f"{name}.py")
    found, otherwise = f"no {beside}", "thinwire init DIR writes one"
    if beside.is_file() and its_file.is_file() and its_file != beside:
        raise TaskError(
            f"two files beside {plan} may be the task {name!r}",
            why=f"{its_file.name} has its name, and task.py is what a plan takes",
            hint=f"--task {name}={its_file}, or --task {name}={beside}",
        )
    if beside.is_file():
        its = tomllib.loads(plan.read_text()).get("run", {}).get("task")  # before any `--set`
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


def load(name: str, plan: Path, given: str | None) -> LoadedTask:
    """Import the task `name` of `plan`."""
    from thinwire.client.task import load_task

    return load_task(task_spec(name, plan, given))


def checked(module: str, data: Path | None, plan: Path | None) -> dict[str, Any]:
    """Run the check of a task and return the document of `task check --json`.

    The check follows `plan`, or a plan of defaults without one.
    """
    from thinwire.aggregation import codecs
    from thinwire.client import ClientInfo, load_task
    from thinwire.client.task_check import rehearse
    from thinwire.core import RunPlan
    from thinwire.core.plan_rules import as_error
    from thinwire.reports.secure_rounds import round_cost, uplink_text, upload_s

    read = (
        RunPlan.load(plan, codecs=codecs)
        if plan
        else RunPlan.parse(f'[run]\ntask = "{_name_of(module)}"\n[local]\nlr = 0.01')
    )
    if refused := read.check(codecs):
        raise as_error(refused)
    task = load_task(module if "=" in module else f"{read.run.task}={module}")
    found = dataclasses.asdict(rehearse(task, ClientInfo(data=data.absolute() if data else None), read))
    if read.secure.enabled:  # the check itself trains and aggregates in the clear
        cost = round_cost(read, found["parameters"], None)
        codec = f"{uplink_text(read)} ({cost['selected']} clients)"
        found |= {"codec": codec, "up_bytes": cost["up_bytes"]}
    uploads = upload_s(found["up_bytes"])
    return {"task": task.name, "plan": str(plan) if plan else None, **found, "upload_s_at_mbit": uploads}


def _name_of(module: str) -> str:
    """Return the name of a task that no plan names: what stands before =, else that of its file.

    >>> _name_of("ecg=heart.py"), _name_of("bad/key.py"), _name_of("pkg.ecg"), _name_of("a b.py")
    ('ecg', 'key', 'ecg', 'task')
    """
    named, equals, _ = module.partition("=")
    found = named if equals else Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    try:
        return str(TypeAdapter(TaskName).validate_python(found))
    except ValidationError:
        return "task"


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report of a check as lines for a person."""
    yield f"{found['task']}: a task that trains"
    yield f"model      {found['parameters']} trained parameters in {found['tensors']} tensors{_beside(found)}"
    if found["left_out"]:
        yield f"not sent   {found['left_out']}"
    tested = "no test data (it will not be measured)"
    if found["test_examples"] is not None:
        tested = f"{found['test_examples']} to be measured on"
    yield f"data       {_count(found['train_examples'])} examples to train on, {tested}"
    yield f"batch      {', '.join(found['batch'])}"
    yield f"loss       {figure(found['loss_before'])} before one step, {figure(found['loss_after'])} after it"
    yield f"metrics    {figures(found['metrics'])}"
    for name in found["counted_once"]:
        yield f"           {name} has a count of 1 over {found['measured']} examples, as a mean has: small batches and"
        yield "           small clients then count as much as large ones; return the sum and the number of examples"
    whose = " of train()" if found["own_train"] else ""
    held = size(found["peak_bytes"])
    yield f"step       {found['step_s'] * 1000:.2f} ms{whose}; this process held {held} at most"
    if found["own_train"]:
        yield from _own_train(found)
    ratio = found["dense_bytes"] / max(1, found["up_bytes"])
    yield f"a round    {size(found['up_bytes'])} up by {found['codec']}, {ratio:.1f} times less than dense;"
    first = f", {size(found['dense_bytes'])} the first time" if found["down_bytes"] != found["dense_bytes"] else ""
    yield f"           {size(found['down_bytes'])} down{first}"
    times = ", ".join(f"{duration(value)} at {rate} Mb/s" for rate, value in found["upload_s_at_mbit"].items())
    yield f"upload     {times}"


def _own_train(found: dict[str, Any]) -> Iterator[str]:
    """Yield what the task's own train() told its context."""
    done, total = found["train_steps"]
    steps = f"{done} of {total or 'an unknown number of'} steps" if done else "no steps (context.progress)"
    yield f"train()    reported {steps} and {figures(found['reported']) or 'no metrics (context.report)'}"
    if found["state"]:
        yield f"state      {'; '.join(found['state'])}"


def _beside(found: dict[str, Any]) -> str:
    """Return the note on buffers and frozen tensors of the model, or ""."""
    kinds = [f"{found[kind]} {kind}" for kind in ("buffers", "frozen") if found[kind]]
    return f", {' and '.join(kinds)} beside them" if kinds else ""


def _count(examples: int | None) -> str:
    """Return the number of examples in words; None means unknown."""
    return "an unknown number of" if examples is None else str(examples)
