"""The commands of `thinwire privacy`: `plan` tells what a run would cost, `ledger` what was spent by whom on what,
and `report` what one run guarantees under which assumptions.

`ledger settle` charges more. A restored aggregator does not know what was spent since its backup, and begins no private
round of a population until a person has settled it (store/privacy_ledger.py).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, PlanFile, Sets, Task, checked_plan
from thinwire.cli.plan import Clients, parameters_of
from thinwire.cli.privacy.report import report, verify

app = typer.Typer(
    name="privacy", help="Privacy: what a run costs, what was spent by whom on what.", no_args_is_help=True
)
ledger_app = typer.Typer(
    name="ledger", help="The privacy ledger: show it, settle what a restore lost.", invoke_without_command=True
)
app.add_typer(ledger_app)
app.command()(report)
app.command()(verify)


@app.command()
def plan(
    plan: PlanFile,
    sets: Sets = None,
    clients: Clients = None,
    size: Annotated[
        int | None, typer.Option("--size", metavar="PARAMETERS", min=1, help="trained parameters; default: the task's")
    ] = None,
    task: Task = None,
    json: Json = False,
) -> None:
    """Show what a private run would cost a client, and how noise, participations and clients trade."""
    from thinwire.cli import privacy_cost
    from thinwire.core.errors import UsageError

    if size is not None and task is not None:
        raise UsageError(
            "--size and --task", why="each of them gives the number of parameters", hint="leave one of them out"
        )
    read = checked_plan(plan, sets)
    if read.privacy.mode == "off":
        raise UsageError(
            f"{plan} has no differential privacy",
            why='[privacy] mode = "off": nothing is noised, so no epsilon bounds what a model tells of a client',
            hint='[privacy] mode = "central", with clip and target_epsilon (docs/how/private-rounds.md)',
        )
    run = privacy_cost.private_run(read, size if size is not None else parameters_of(read, plan, task), clients)
    if json:
        console.document({"plan": str(plan), **privacy_cost.to_json(run)})
    else:
        privacy_cost.print_plan(run)


@ledger_app.callback()
def ledger(
    context: typer.Context,
    population: Annotated[str | None, typer.Option("--population", metavar="P", help="name of one population")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="D", help="name of one device")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show the privacy ledger: noised releases by population and run, with the epsilon that they cost together.

    A release is spent as its round opens, also if the round ends without a result. With --device: the releases for
    which this device was selected.
    """
    if context.invoked_subcommand is not None:
        return
    from thinwire.cli.local_state import opened
    from thinwire.cli.privacy.render import document, run_text, show, summaries
    from thinwire.reports.privacy import ledger as spendings

    with opened(home) as store:
        rows, blocked = store.privacy.rows(population, device), store.privacy.unknown()
        runs = {row.run_id: row for row in store.runs()}
    deltas = {run_id: _delta(row.plan) for run_id, row in runs.items()}
    if population is not None:
        blocked = {name: why for name, why in blocked.items() if name == population or not name}
    found, of_runs = summaries(rows, deltas), [] if device is not None else spendings(rows, runs)
    if json:
        console.document(document(rows, found, blocked) | {"runs": [asdict(one) for one in of_runs]})
        return
    show(rows, found, blocked, deltas, device)
    for one in of_runs:
        console.sentence(f"{one.run_id}: {run_text(one)}")
        if one.unreleased:
            console.sentence(one.unreleased)


@ledger_app.command()
def settle(
    population: Annotated[str, typer.Argument(metavar="POPULATION", help="name of the population")],
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, metavar="N", help="rounds to charge, as the costliest kind of release")
    ],
    release: Annotated[
        str,
        typer.Option("--release", metavar="JSON", help="a costlier release, as thinwire client privacy --json has it"),
    ] = "",
    json: Json = False,
    home: Home = None,
) -> None:
    """Charge a population for rounds that a restored ledger may have lost, and allow private rounds again.

    N is the most rounds that can have begun between the backup and the restore. They are charged to every device as
    releases of the costliest kind in the ledger, or as --release if that costs more. The charge is never taken back.
    """
    from collections import Counter

    from thinwire.cli.local_state import opened, operator
    from thinwire.core.errors import UsageError
    from thinwire.privacy.accounting import costliest, releases_of

    with opened(home, read_only=False) as store:
        rows, deltas = store.privacy.rows(), [_delta(row.plan) for row in store.runs()]
        mine = [row for row in rows if row.population == population and row.count]
        spent = Counter[str]()
        for row in mine:
            spent[row.release] += row.count
        kinds = set(spent) or {row.release for row in rows if row.count}
        kinds |= {one.to_json() for one in releases_of({release: 1} if release else {})}
        charged = costliest(kinds, spent, rounds, min(deltas, default=DELTA)) if rounds else ""
        if rounds and not charged:
            raise UsageError(
                f"--rounds {rounds} is no valid charge to {population!r}",
                why="no release is in this ledger, so it is not known what one costs",
                hint="a device that took part has it: thinwire client privacy --json; then give it as --release JSON",
            )
        store.privacy.settle(population, rounds, charged, operator())
    if json:
        console.document({"population": population, "rounds": rounds, "release": charged})
    else:
        console.line(
            f"{population} is settled: {rounds} releases are charged to every device; private rounds may begin"
        )


DELTA = 1e-5  # of a run whose plan names none, and of a run that was deleted


def _delta(plan: dict[str, Any]) -> float:
    return float((plan.get("privacy") or {}).get("delta") or DELTA)
