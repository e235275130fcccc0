"""`thinwire runs clone`: start a new run with the plan of an old one, with changes.

The first model of the clone is that of the old run where the plan makes the same one, so the task's code is not needed
here. With another seed it is, and so it is with other personal layers. The model of another run (`[run] init =
"run:ID"`) is taken if its layout is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, RunId, Sets, Task, overrides

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.store import RunRow, Store


def clone(
    run_id: RunId,
    sets: Sets = None,
    name: Annotated[str, typer.Option("--name", help="name of the new run, for people")] = "",
    task: Task = None,
    show: Annotated[bool, typer.Option("--print", help="print the plan as TOML, start nothing")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Start a new run with the plan of an old one, with changes; print its id."""
    from thinwire.aggregation import codecs
    from thinwire.cli.local_state import again, opened, require_alive
    from thinwire.core import RunPlan
    from thinwire.core.plan_text import plan_text

    with opened(home, read_only=show) as store:
        row = store.run(run_id)
        old = RunPlan.from_json(row.plan)
        plan = RunPlan.parse(plan_text(old), f"the plan of {row.run_id}", overrides(sets))
        if show:
            console.line(plan_text(plan).rstrip())
            return
        if refused := plan.check(codecs):
            raise refused[0].error()
        require_alive(home)
        made = _submit(store, home, row, old, plan, name, task)
    if json:
        console.document({"run_id": made, "cloned_from": row.run_id})
    else:
        console.line(made)
        console.note(f"watch it: {again(f'runs watch {made}', home)}")


def _submit(
    store: Store, home: Path | None, row: RunRow, old: RunPlan, plan: RunPlan, name: str, task: str | None
) -> str:
    """Queue the clone with its first model, and return its id."""
    from thinwire.cli.local_state import aggregator_home
    from thinwire.cli.run import hand_over
    from thinwire.core import Layout
    from thinwire.core.errors import Refused
    from thinwire.core.plan_names import named_model
    from thinwire.server.model_files import require_counted, stored_model
    from thinwire.server.submit import first_model_of, submit

    if row.source != "devices":
        raise Refused(
            f"{row.run_id} was simulated",
            why="a clone runs on the devices of the aggregator",
            hint=f"thinwire runs clone {row.run_id} --print > plan.toml, then thinwire sim or thinwire run plan.toml",
        )
    place, layout = aggregator_home(home), Layout.from_json(row.layout)
    named = named_model(plan.run.init)
    other = store.run(named[0]) if named else None
    if other is not None:
        require_counted(plan, other)
    shares = old.local.personal_layers == plan.local.personal_layers
    takes = shares and other is not None and Layout.from_json(other.layout).digest == layout.digest
    if task or not (takes or _begins_alike(row, old, plan)):
        return hand_over(store, home, plan, Path.cwd() / "plan.toml", task, name)
    if plan.run.init == "device":
        params, buffers = first_model_of(layout)
        return submit(store, place, plan, layout, params, buffers, {}, row.task_report, name=name)
    named = None if plan.run.init == old.run.init else named
    found = stored_model(store, place, *(named or (row.run_id, "0")))
    return submit(
        store, place, plan, layout, found.params, found.buffers, found.row.counters, row.task_report,
        fixed=found.fixed, name=name,
    )  # fmt: skip


def _begins_alike(row: RunRow, old: RunPlan, plan: RunPlan) -> bool:
    """Return True if the clone begins with the first model of the old run; raise `TaskError` if not."""
    from thinwire.core.errors import TaskError

    keys = ["[local] personal_layers"] if old.local.personal_layers != plan.local.personal_layers else []
    keys += [f"[run] {key}" for key in ("task", "init") if getattr(old.run, key) != getattr(plan.run, key)]
    keys += ["[run] seed"] if not plan.run.init and old.run.seed != plan.run.seed else []
    if not keys:
        return True
    raise TaskError(
        f"the first model of this clone is not that of {row.run_id}",
        why=f"{keys[0]} differs, so the code of the task has to make it",
        hint=f"--task {plan.run.task}=MODULE",
    )
