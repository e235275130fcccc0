"""`thinwire sim PLAN`: the same plan and task in this process, with as many clients as wanted; or many such runs."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli import say
from thinwire.cli.options import Data, Home, Json, PlanFile, Sets, Task, overrides
from thinwire.cli.sim.axes import axes

SWEEP = "one key of the plan with several values: uplink.codec='identity|int8', local.lr=0.05,0.1; repeatable"
SPLIT = 'how data is cut: iid, "dirichlet(0.3)", "by(KEY)", "shards(N)"'


def sim(
    plan: PlanFile,
    clients: Annotated[int, typer.Option("--clients", min=1, help="how many clients to simulate")] = 20,
    task: Task = None,
    data: Data = None,
    split: Annotated[str, typer.Option(metavar="SPEC", help=SPLIT)] = "iid",
    sets: Sets = None,
    sweep: Annotated[list[str] | None, typer.Option("--sweep", metavar="KEY=A|B", help=SWEEP)] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="of a sweep: runs with each, from the plan's on")] = 1,
    workers: Annotated[int, typer.Option("--workers", min=1, help="of a sweep: processes that simulate at once")] = 1,
    processes: Annotated[int, typer.Option("--processes", min=1, help="that the clients of one run train in")] = 1,
    name: Annotated[str | None, typer.Option("--name", help="of a sweep: its group; default: the task's name")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="raise a task's error where it happens")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a plan without devices or network: stored, shown and exported like any other run.

    With --processes N its clients train in N processes, to the same bits as in one.

    With --sweep, --seeds or --name it is a group of runs, one for each combination: what is there is not made again,
    and thinwire runs compare --group NAME shows what they came to.
    """
    from thinwire.aggregation import codecs
    from thinwire.client.partitions import parse_split
    from thinwire.core import RunPlan

    parse_split(split)
    if sweep or seeds > 1 or name:
        from thinwire.cli.sim.swept import swept

        if debug:
            raise typer.BadParameter("--debug is for one run: leave --sweep, --seeds and --name out")
        if processes > 1:
            raise typer.BadParameter("--processes is for one run: a sweep's runs are made side by side with --workers")
        group, code = swept(
            plan, overrides(sets), axes(sweep or []), name=name, seeds=seeds, workers=workers, task=task,
            clients=clients, split=split, data=data, home=home,
        )  # fmt: skip
        if json:
            say.document(group)
        raise typer.Exit(code)
    if workers > 1:
        raise typer.BadParameter("--workers is for a sweep: give --sweep KEY=A|B or --seeds N too")

    from thinwire.cli.sim.simulated import simulated

    read = RunPlan.load(plan, overrides(sets))
    if refused := read.check(codecs):
        raise refused[0].error()
    document, code = simulated(
        read, plan, task, clients=clients, split=split, data=data, debug=debug, home=home, processes=processes
    )
    if json:
        say.document(document)
    else:
        say.line(document["run_id"])
    raise typer.Exit(code)
