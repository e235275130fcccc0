"""`thinwire run PLAN`: submit a run to the aggregator of this machine, and follow it.

The task is imported in this process, where it was typed. The first model comes from the plan's `[run] init`: from the
task, a file, another run, or later from a device.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import console
from thinwire.cli.local_state import aggregator_home
from thinwire.cli.params import Anyway, Home, Json, PlanFile, Sets, Task, checked_plan
from thinwire.cli.runs.track import Track, opener, start_follower
from thinwire.cli.task import load
from thinwire.core.formatting import counted
from thinwire.core.signals import INTERRUPTED

if TYPE_CHECKING:
    from thinwire.client.task import Initial
    from thinwire.core import RunPlan, Vector
    from thinwire.store import Store


SHOWN = 3  # devices that are named
SECURE = "[secure] enabled"
TASK = "[run] task"


def run(
    plan: PlanFile,
    task: Task = None,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", help="print the run's id and end")] = False,
    yes: Anyway = False,
    track: Track = None,
    name: Annotated[str, typer.Option("--name", help="name of the run, for people")] = "",
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a plan on the devices of the aggregator of this machine, and follow it to its end.

    Ctrl-C detaches (130): the run goes on.
    """
    from thinwire.cli.local_state import adds_device, open_store, require_alive

    read = checked_plan(plan, sets)
    if track:
        opener(track, "")  # an error before there is a run
    about = require_alive(home)
    with open_store(home, read_only=False) as store:
        if not yes:
            require_known(store, read, home)
        run_id = hand_over(store, home, read, plan, task, name)
        if said := begins_early(read, len(may_train(store, read.run.task))):
            console.note(said)
        if not known_devices(store):
            console.note(f"no device has joined yet; to add one: {adds_device(about, home, read.run.task)}")
        if track:
            start_follower(run_id, track, home)
        if detach:
            _detached(run_id, home, json)
            return
        raise typer.Exit(_followed(run_id, home, json))


def require_known(store: Store, plan: RunPlan, home: Path | None) -> None:
    """Raise `TooFewClients` if a plan wants more devices than are known, or a task that none of them has.

    At a terminal the person decides. Such a run would wait without an end, and nobody would see why before looking.
    """
    from thinwire.cli.local_state import command_line
    from thinwire.core.errors import TooFewClients

    task, every = plan.run.task, known_devices(store)
    having = may_train(store, task)
    known = having or every
    lacking = {TASK: f"trains the task {task}, which no known device has"} if every and not having else {}
    if not (lacking := lacking | too_many(plan, known)):
        return
    count = f", and {len(known)} {'is' if len(known) == 1 else 'are'} known" if lacking.keys() != {TASK} else ""
    count += " with this task" if count and len(known) < len(every) else ""
    said = f"the plan {', '.join(lacking.values())}{count}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        if typer.confirm(f"{said}. Submit it, and wait for the others?", err=True):
            return
        raise typer.Exit(INTERRUPTED)
    listed = command_line("devices list", home)
    ways = [listed if lacking.keys() == {TASK} else f"again when all are in the list of {listed}"]
    keys = [key for key in lacking if key not in (SECURE, TASK)]
    ways += [f"less in [cohort] {', '.join(keys)}"] if keys else []
    ways += [f"{SECURE} = false"] if SECURE in lacking else []
    ways += [f"thinwire client start --task {task}=MODULE on a device"] if TASK in lacking else []
    raise TooFewClients(
        said, why="the run would wait until others have joined",
        hint=f"{'; '.join(ways)}; or --yes to submit it and wait",
    )  # fmt: skip


def known_devices(store: Store) -> set[str]:
    """Return the names of the devices that are not revoked."""
    return {row.name for row in store.roster.rows() if row.state != "revoked"}


def may_train(store: Store, task: str) -> set[str]:
    """Return the names of the devices that have this task, or have not told their tasks yet, and are not revoked.

    A task that a device could not import counts: `thinwire devices list` shows what is wrong with it there.
    """
    known = [info for info in store.devices() if info.row.state != "revoked"]
    return {info.row.name for info in known if not info.hello or task in (one.get("name") for one in info.tasks)}


def too_many(plan: RunPlan, known: Collection[str]) -> dict[str, str]:
    """Return the keys of a plan that want more than the `known` devices, each with what it wants as a phrase.

    They are keys of `[cohort]`, and SECURE. With `wait_for = 1`, the default, a run begins with the first device that
    joins, so it wants none that is known.

    >>> from thinwire.core import RunPlan
    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nclients=3\\nwait_for=["a", "b"]')
    >>> too_many(plan, {"a"})
    {'clients': 'selects 3 devices a round', 'wait_for': 'waits for b (not known)'}
    """
    from thinwire.core.secure_numbers import fewest_devices

    found, cohort = dict[str, str](), plan.cohort
    if isinstance(cohort.clients, int) and cohort.clients > len(known):
        found["clients"] = f"selects {counted(cohort.clients, 'device')} a round"
    if isinstance(wait_for := cohort.wait_for, int):
        if wait_for > max(1, len(known)):
            found["wait_for"] = f"waits for {counted(wait_for, 'device')}"
    elif absent := [name for name in wait_for if name not in known]:
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        found["wait_for"] = f"waits for {', '.join(absent[:SHOWN])}{more} (not known)"
    if cohort.min_updates >= 1 and (needed := int(cohort.min_updates)) > len(known):
        found["min_updates"] = f"needs {counted(needed, 'update')} a step"
    if plan.secure.enabled and "clients" not in found and (least := fewest_devices(plan)) > len(known):
        found[SECURE] = f"needs {counted(least, 'device')} for secure aggregation"
    return found


def begins_early(plan: RunPlan, known: int | None = None) -> str:
    """Return a sentence if a run without a wait begins with fewer devices than its rounds may select; else "".

    `known` devices are those that could be selected, None where nobody knows.

    >>> from thinwire.core import RunPlan
    >>> begins_early(RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1'), 5)
    'the run begins as soon as 1 device of 5 is connected; [cohort] wait_for = 5 waits for all of them'
    """
    from thinwire.server.policy.cohort import fewest_to_begin

    if isinstance(plan.cohort.clients, int) or plan.cohort.wait_for != 1:
        return ""
    fewest = fewest_to_begin(plan)
    if not fewest or (known is not None and known <= fewest):
        return ""
    count, are, all_ = counted(fewest, "device"), "is" if fewest == 1 else "are", "N waits for more"
    if known is not None:
        count, all_ = f"{count} of {known}", f"{known} waits for all of them"
    return f"the run begins as soon as {count} {are} connected; [cohort] wait_for = {all_}"


def _detached(run_id: str, home: Path | None, json: bool) -> None:
    """Print the id of a run and how to watch it."""
    from thinwire.cli.local_state import command_line

    if json:
        console.document({"run_id": run_id})
    else:
        console.line(run_id)
        console.note(f"watch it: {command_line(f'runs watch {run_id}', home)}")


def _followed(run_id: str, home: Path | None, json: bool) -> int:
    """Follow a run until its end and return its exit code; Ctrl-C detaches and leaves the run going."""
    from thinwire.cli.local_state import command_line, open_store
    from thinwire.cli.runs.progress import follow
    from thinwire.cli.runs.render import run_document

    with open_store(home) as store:
        try:
            code = follow(store, run_id, home)
        except KeyboardInterrupt:
            console.note(f"detached: {run_id} goes on")
            console.note(f"  watch it: {command_line(f'runs watch {run_id}', home)}")
            console.note(f"  stop it:  {command_line(f'runs stop {run_id}', home)}")
            return INTERRUPTED
        if json:
            console.document(run_document(store, run_id))
        elif code == 0:
            console.line(run_id)
            console.note(f"the model: {command_line(f'runs model {run_id} --out model.safetensors', home)}")
        return code


def hand_over(store: Store, home: Path | None, plan: RunPlan, file: Path, task: str | None, name: str = "") -> str:
    """Submit a run with its first model to the aggregator's queue and return its id.

    The task `task`, or the one beside the plan `file`, is imported in this process. `name` is for people.
    """
    from thinwire.client.task import initial_model, report, require_own_loop
    from thinwire.server.submit import FirstModel, submit

    require_absolute_files(plan)
    code = load(plan.run.task, file, task)
    require_own_loop(plan, code)
    made = initial_model(code, plan.run.seed, plan.local.personal_layers)
    if made.left_out:
        console.note(f"warning: {made.left_out}")
    place = aggregator_home(home)
    vector, buffers, counters = first_model(store, home, plan, file, made)
    first = FirstModel(made.layout, report(code), vector, buffers, counters, made.fixed)
    return submit(store, place, plan, first, name=name)


def require_absolute_files(plan: RunPlan) -> None:
    """Raise `PlanError` if a reduction or an optimizer is in a FILE.py that the aggregator would seek in its folder."""
    from thinwire.core.errors import PlanError

    for key, spec in (("reduce", plan.server.reduce), ("optimizer", plan.server.optimizer)):
        file = spec.rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_absolute():
            raise PlanError(
                f'[server] {key} = "{spec}" with a relative path',
                why="the aggregator imports the file, and looks for it in the folder in which it was started",
                hint=f'[server] {key} = "{Path(file).absolute()}{spec.removeprefix(file)}"',
            )


def first_model(
    store: Store, home: Path | None, plan: RunPlan, file: Path, made: Initial
) -> tuple[Vector, Vector, Mapping[str, int]]:
    """Return (params, buffers, counters) of the first model by the plan's `[run] init`.

    A relative file name is resolved beside the plan if the file exists there, else in the current folder. `TaskError`
    if the model of another run has another layout, `PlanError` if a private run would begin with an uncounted cost.
    """
    from thinwire.core.plan_names import named_model
    from thinwire.server.model_files import model_of_run, read_model_file, require_counted_file

    init = plan.run.init
    if init in ("", "device"):  # the aggregator requests a device's model when the run begins
        return made.vector, made.buffers, made.counters
    if named_model(init):
        other = model_of_run(store, aggregator_home(home), plan, made.layout)
        return other.params, other.buffers, other.row.counters
    path = Path(init).expanduser()
    beside = file.absolute().parent / path
    path = beside if beside.exists() else path
    found = read_model_file(path, made.layout, made.buffers, made.fixed)
    require_counted_file(plan, path)
    return found
