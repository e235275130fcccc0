"""`thinwire run PLAN`: hand a run to the aggregator, and follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import say
from thinwire.cli.options import Home, Json, PlanFile, Sets, Task, overrides

DETACHED = 130


def run(
    plan: PlanFile,
    task: Task = None,
    sets: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", help="hand it over, print its id and end")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a plan on the devices of the aggregator of this machine, and follow it to its end.

    Ctrl-C detaches (130): the run goes on.
    """
    from thinwire.aggregation import codecs
    from thinwire.cli.places import opened, require_alive
    from thinwire.core import RunPlan

    read = RunPlan.load(plan, overrides(sets))
    if refused := read.check(codecs):
        raise refused[0].error()
    require_alive(home)
    with opened(home, read_only=False) as store:
        from thinwire.cli.handover import hand_over

        run_id = hand_over(store, home, read, plan, task)
        if detach:
            _detached(run_id, home, json)
            return
        raise typer.Exit(_followed(run_id, home, json))


def _detached(run_id: str, home: Path | None, json: bool) -> None:
    from thinwire.cli.places import again

    if json:
        say.document({"run_id": run_id})
    else:
        say.line(run_id)
        say.note(f"watch it: {again(f'runs watch {run_id}', home)}")


def _followed(run_id: str, home: Path | None, json: bool) -> int:
    """Follow until the end; the exit code is the run's."""
    from thinwire.cli.places import again, opened
    from thinwire.cli.runs.follow import follow
    from thinwire.cli.runs.shown import run_document

    with opened(home) as store:
        try:
            code = follow(store, run_id, home)
        except KeyboardInterrupt:
            say.note(f"detached: {run_id} goes on")
            say.note(f"  watch it: {again(f'runs watch {run_id}', home)}")
            say.note(f"  stop it:  {again(f'runs stop {run_id}', home)}")
            return DETACHED
        if json:
            say.document(run_document(store, run_id))
        elif code == 0:
            say.line(run_id)
            say.note(f"the model: {again(f'runs model {run_id} --out model.safetensors', home)}")
        return code
