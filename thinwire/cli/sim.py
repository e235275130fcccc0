"""`thinwire sim PLAN`: the same plan and task in this process, with as many clients as wanted."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli import say
from thinwire.cli.options import Data, Home, Json, PlanFile, Sets, Task, overrides


def sim(
    plan: PlanFile,
    clients: Annotated[int, typer.Option("--clients", min=1, help="how many clients to simulate")],
    task: Task = None,
    data: Data = None,
    split: Annotated[
        str, typer.Option(metavar="SPEC", help='how data is cut: iid, "dirichlet(0.3)", "by(KEY)", "shards(N)"')
    ] = "iid",
    sets: Sets = None,
    debug: Annotated[bool, typer.Option("--debug", help="raise a task's error where it happens")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a plan without devices or network: stored, shown and exported like any other run."""
    from thinwire.aggregation import codecs
    from thinwire.cli.simulated import simulated
    from thinwire.core import RunPlan

    read = RunPlan.load(plan, overrides(sets))
    if refused := read.check(codecs):
        raise refused[0].error()
    document, code = simulated(read, plan, task, clients=clients, split=split, data=data, debug=debug, home=home)
    if json:
        say.document(document)
    else:
        say.line(document["run_id"])
    raise typer.Exit(code)
