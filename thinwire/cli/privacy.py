"""Define the commands of `thinwire privacy`.

`plan` shows what a run would cost, and `ledger` what was spent by whom on what. `report` prints what one run guarantees
under which assumptions, as a signed document for a data-protection officer, which `verify` checks.

`ledger settle` charges more. A restored aggregator does not know what was spent since its backup, and begins no private
round of a population until a person has settled it (store/privacy_ledger.py).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json, PlanFile, Sets, Task, checked_plan, read_file
from thinwire.cli.plan import Clients, parameters_of
from thinwire.cli.privacy_ledger import DELTA, document, run_text, show, summaries

if TYPE_CHECKING:
    from thinwire.store import Store

app = typer.Typer(
    name="privacy", help="Privacy: what a run costs, what was spent by whom on what.", no_args_is_help=True
)
ledger_app = typer.Typer(
    name="ledger", help="The privacy ledger: show it, settle what a restore lost.", invoke_without_command=True
)
app.add_typer(ledger_app)


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
    from thinwire.cli.local_state import open_store
    from thinwire.reports.privacy import ledger as spendings

    with open_store(home) as store:
        rows, blocked = store.privacy.rows(population, device), store.privacy.unknown()
        runs = {row.run_id: row for row in store.runs(with_deleted=True)}
        names = {row.population for row in rows if row.population} | ({population} if population else set())
        excluded = {name: store.privacy.excluded(name) for name in sorted(names)}
    deltas = {run_id: _delta(row.plan) for run_id, row in runs.items()}
    if population is not None:
        blocked = {name: why for name, why in blocked.items() if name == population or not name}
    found, of_runs = summaries(rows, deltas), [] if device is not None else spendings(rows, runs)
    if json:
        more = {"excluded": excluded, "runs": [asdict(one) for one in of_runs]}
        console.document(document(rows, found, blocked) | more)
        return
    show(rows, found, blocked, deltas, device)
    for name, why in [pair for of in excluded.values() for pair in of.items()]:
        console.note(f"{name} takes part in no private round: it {why}")
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
    device: Annotated[
        str, typer.Option("--device", metavar="D", help="charge this device alone, which brought its ledger or lost it")
    ] = "",
    json: Json = False,
    home: Home = None,
) -> None:
    """Charge a population for rounds that a restored ledger may have lost, and allow private rounds again.

    N is the most rounds that can have begun between the backup and the restore. They are charged to every device as
    releases of the costliest kind in the ledger, or as --release if that costs more. Rounds that a device has in its
    own ledger are charged without sampling. The charge is never taken back.

    With --device, N is the number of rounds in which this device took part before it enrolled here: under an enrolment
    that was forgotten, at another aggregator, or with a ledger that it lost.
    """
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        charged = _release_to_charge(store, population, rounds, release, device)
        store.privacy.settle(population, rounds, charged, operator(), device)
    if json:
        console.document({"population": population, "rounds": rounds, "release": charged, "device": device})
    elif device:
        console.line(f"{device} is charged {rounds} releases of {population}; it may take part in private rounds")
    else:
        console.line(
            f"{population} is settled: {rounds} releases are charged to every device; private rounds may begin"
        )


def _release_to_charge(store: Store, population: str, rounds: int, release: str, device: str) -> str:
    """Return the costliest of the population's releases and of `release`, as JSON; "" for no rounds.

    A population without releases is charged the costliest of all populations. `UsageError` if there is none at all.
    """
    from collections import Counter

    from thinwire.core.errors import UsageError
    from thinwire.privacy.accounting import costliest, releases_of
    from thinwire.store.privacy_devices import without_sampling

    rows, deltas = store.privacy.rows(), [_delta(row.plan) for row in store.runs(with_deleted=True)]
    spent = Counter[str]()
    for row in rows:
        if row.population == population and row.count:
            spent[row.release] += row.count
    kinds = set(spent) or {row.release for row in rows if row.count}
    kinds |= {one.to_json() for one in releases_of({release: 1} if release else {})}
    kinds = {without_sampling(kind) for kind in kinds} if device else kinds
    charged = costliest(kinds, spent, rounds, min(deltas, default=DELTA)) if rounds else ""
    if rounds and not charged:
        raise UsageError(
            f"--rounds {rounds} is no valid charge to {population!r}",
            why="no release is in this ledger, so it is not known what one costs",
            hint="a device that took part has it: thinwire client privacy --json; then give it as --release JSON",
        )
    return charged


def _delta(plan: dict[str, Any]) -> float:
    return float((plan.get("privacy") or {}).get("delta") or DELTA)


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run, its unique beginning, or latest")],
    json: Json = False,
    html: Annotated[bool, typer.Option("--html", help="print one HTML page")] = False,
    home: Home = None,
) -> None:
    """Report on a run's differential privacy by NIST SP 800-226, signed by the aggregator's key.

    Redirect --json or --html to a file; anyone can check it with `thinwire privacy verify FILE --pin KEY`.
    """
    from thinwire.cli.local_state import aggregator_home, open_store
    from thinwire.core.errors import UsageError
    from thinwire.reports.privacy_report import as_page, privacy_report, report_lines, sign_report, signing_key

    if json and html:
        raise UsageError("--json and --html", why="the report has one form at a time", hint="leave one of them out")
    with open_store(home) as store:
        made = privacy_report(store, store.run(run))
    signed = sign_report(made, signing_key(aggregator_home(home)))
    if json:
        console.document(signed)
    elif html:
        sys.stdout.write(as_page(signed))  # as it is: a page that was changed is not valid
    else:
        before = ""
        for label, text in report_lines(signed):
            console.sentence(text, begin=f"{'' if label == before else label:<11}")
            before = label or before
        console.sentence(f"{signed['signed_by']} (this print is not signed: --json or --html is)", begin="signed by  ")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="report as --json or --html printed it")],
    pin: Annotated[str, typer.Option("--pin", metavar="KEY", help="SHA-256 of the aggregator's key, 64 hex digits")],
    json: Json = False,
) -> None:
    """Check that a privacy report is what the aggregator with this key signed."""
    from thinwire.reports.privacy_report import LARGEST, verify_report

    found = verify_report(read_file(file, LARGEST, "another FILE"), pin)
    said = {"run": found["run"]["id"], "made_at": found["made_at"], "signed_by": found["signed_by"]}
    if json:
        console.document(said)
    else:
        console.line(f"valid: the report on {said['run']} of {said['made_at']}, signed by {said['signed_by']}")
