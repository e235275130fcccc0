"""The commands of `thinwire client`: start, join, leave, status, privacy, logs, reload, doctor, the group service, and
what the device keeps of runs (kept_runs.py).

`status` reads the locks, status files and outboxes of all clients of this machine.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli import service as client_service
from thinwire.cli.client import kept_runs
from thinwire.cli.local_state import (
    choose_client,
    client_here,
    client_names,
    device_name,
    is_joined,
    joined_url,
)
from thinwire.cli.params import ClientName, Data, Follow, Home, Json, Lines, NewName, OneName
from thinwire.core import formatting
from thinwire.core.start_options import StartOptions

app = typer.Typer(name="client", help="The client: the program on a device.", no_args_is_help=True)
app.add_typer(client_service.client_app)
app.add_typer(kept_runs.app)
app.command()(kept_runs.model)


@app.command()
def start(
    aggregator: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the aggregator; default: the joined one")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME=MODULE", help="task to train; repeatable; default: all installed tasks"),
    ] = None,
    data: Data = None,
    dataset: Annotated[
        str,
        typer.Option("--dataset", metavar="NAME", help="name of the data, for its privacy ledger; default: its path"),
    ] = "",
    name: ClientName = None,
    partition: Annotated[str | None, typer.Option(metavar="I/N", help="part I of N of the data, from 0")] = None,
    split: Annotated[
        str, typer.Option(metavar="SPEC", help='how data is split: iid, "dirichlet(0.3)", "by(KEY)", "shards(N)"')
    ] = "iid",
    seed: Annotated[int, typer.Option(help="seed of the split")] = 0,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda:0|mps", help="torch device: cpu, cuda:0, mps, auto")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="number of torch threads; 0: chosen by torch")] = 0,
    once: Annotated[bool, typer.Option("--once", help="end after one run, or without an aggregator (4)")] = False,
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Python of the worker: 3.8 or later, with torch")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the owner's policy; default: client.toml of the client"),
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(metavar="SIGNED.json", help="signed devices to trust in secure rounds")
    ] = None,
    roster_key: Annotated[
        Path | None, typer.Option(metavar="KEY.pem.pub", help="public key that signed the roster")
    ] = None,
    home: Home = None,
) -> None:
    """Train for an aggregator on this machine's data until told to stop."""
    from thinwire.cli.client.start import ClientOptions, begin
    from thinwire.core.statedir import find_home

    wanted = ClientOptions(
        aggregator,
        tuple(task or ()),
        data,
        choose_client(name, find_home(home)) if is_joined(aggregator) else device_name(name),
        partition,
        split,
        seed,
        device,
        threads,
        once,
        home,
        policy,
        python,
        roster,
        roster_key,
        dataset,
    )
    raise typer.Exit(begin(wanted))


@app.command()
def join(
    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the aggregator: https://HOST:PORT")],
    invite: Annotated[
        str | None,
        typer.Argument(metavar="[INVITE|-]", help="-: read from THINWIRE_INVITE or stdin; or the invitation itself"),
    ] = None,
    name: NewName = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Join an aggregator with an invitation: make this device's key, and keep the aggregator's pin."""
    from thinwire.cli.client import enrol

    enrol.join(url, invite, device_name(name), home).tell(home, json)


@app.command()
def leave(
    name: ClientName = None,
    force: Annotated[bool, typer.Option("--force", help="delete even if the aggregator does not answer")] = False,
    home: Home = None,
) -> None:
    """Revoke this device at its aggregator, then delete its key and what it learned from local data.

    Updates, residuals, models, plans and logs in its state directory go. The privacy ledger stays: what was spent of
    the local data stays spent, and the next client of this state directory goes on with it. The data themselves are
    never touched.
    """
    from thinwire.cli.client import enrol
    from thinwire.core.statedir import find_home

    enrol.leave(choose_client(name, find_home(home)), home, force)


@app.command()
def status(name: OneName = None, json: Json = False, home: Home = None) -> None:
    """Show what the clients of this machine are doing."""
    from thinwire.core.statedir import find_home

    at = find_home(home)
    clients = at / "clients"
    there = client_names(at)
    names = [client_here(name, at)[0]] if name else there
    rows = [look(at, one) for one in names]
    if json:
        console.document(rows)
    elif rows:
        show(rows)
    else:
        console.note(f"no client was ever started in {clients}")


@app.command()
def privacy(name: ClientName = None, json: Json = False, home: Home = None) -> None:
    """Show this device's own privacy ledger: the noised releases in which its data took part, and what they cost."""
    from thinwire.cli.privacy_ledger import own_document, show_own
    from thinwire.client.policy import FILE, load_policy
    from thinwire.client.privacy_ledger import DeviceLedger
    from thinwire.core.statedir import find_home

    called, folder = client_here(name, find_home(home))
    options = StartOptions.load(folder)
    rules = options.path("policy") if options else None
    ledger, delta = DeviceLedger(folder), load_policy(rules or folder / FILE).max_delta
    if json:
        console.document(own_document(ledger, called, delta))
    else:
        show_own(ledger, called, delta)


@app.command()
def logs(
    name: ClientName = None,
    follow: Follow = False,
    count: Lines = 50,
    last_error: Annotated[bool, typer.Option("--last-error", help="show the last error's traceback")] = False,
    worker: Annotated[bool, typer.Option("--worker", help="show what the task printed")] = False,
    home: Home = None,
) -> None:
    """Show a client's log, what its task printed, or the last error of the task's code."""
    from thinwire.cli.service import journal
    from thinwire.client.worker_process import LOG
    from thinwire.core.errors import NotFound
    from thinwire.core.log_file import LOG_FILE, last_lines, new_lines
    from thinwire.core.statedir import find_home

    called, folder = client_here(name, find_home(home))
    if last_error:
        found = folder / "last-error.txt"
        if not found.is_file():
            raise NotFound(f"{called} has had no error", why=f"{found} is not there")
        console.line(found.read_text(errors="replace").rstrip())
        return
    file, command = (LOG, "") if worker else (LOG_FILE, journal(called))
    for line in last_lines(folder, count, file):
        console.line(line)
    console.note(f"from {folder / file}" + (f"; all of it: {command}" if command else ""))
    for line in new_lines(folder, file_name=file) if follow else ():
        console.line(line)


@app.command()
def reload(name: ClientName = None, home: Home = None) -> None:
    """Make a running client read its tasks' code and its policy again between two assignments, and report it to its
    aggregator.
    """
    import os
    import signal

    from thinwire.core.errors import NotFound, UsageError
    from thinwire.core.statedir import find_home, holder

    called, folder = client_here(name, find_home(home))
    about = holder(folder / "lock")
    not_running = NotFound(
        f"the client {called} is not running",
        why="its next start reads code and policy as they are then",
        hint="thinwire client status",
    )
    if about is None or "tasks" not in about:  # another command may hold the lock, and a signal would end it
        raise not_running
    try:
        os.kill(int(about["pid"]), signal.SIGUSR1)
    except ProcessLookupError:
        raise not_running from None
    except PermissionError as error:
        raise UsageError(
            f"the client {called} runs as another user", why="only that one may tell it", hint="the same with sudo"
        ) from error
    console.note(
        f"{called} reads code and policy again before its next assignment; "
        f"what it found: thinwire client logs --name {called}"
    )


@app.command()
def doctor(
    aggregator: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the aggregator; default: the joined one")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME=MODULE", help="task; default: that of the last start"),
    ] = None,
    name: ClientName = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Check name, TCP, pin, clock, row, task and disk, and print how to fix each failure; changes nothing."""
    from thinwire.cli.doctor.checks import tell
    from thinwire.cli.doctor.client import examine
    from thinwire.core.statedir import find_home

    at = find_home(home)
    raise typer.Exit(tell(examine(at / "clients" / choose_client(name, at), aggregator, task or ()), json))


SHOWN_SKEW_S = 1.0  # a smaller clock skew causes no failure and is not shown


def look(home: Path, name: str) -> dict[str, Any]:
    """Return one client as `--json` prints it; `state` is "stopped" if no process holds its lock."""
    from thinwire.client.calls import ClientStatus
    from thinwire.core.statedir import holder

    folder = home / "clients" / name
    about = holder(folder / "lock")
    standing = asdict(ClientStatus.load(folder) or ClientStatus())
    if about is None:
        standing |= {"state": "stopped", "connected_at": None}
    found = {"name": name, "running": about is not None, **standing, "pending": pending(folder)}
    return found | {"aggregator": joined_url(folder)} | demands(folder) | (about or {})


SECURE_KEYS = ("secure", "adversary", "max_corrupt_assumed", "min_cohort", "min_survivors")
PRIVATE_KEYS = ("privacy", "max_epsilon", "max_delta", "max_participations", "min_noise")
DEMANDS = {
    "secure": "its owner demands of secure rounds",
    "private": "its owner demands of private rounds",
    "work": "its owner limits its work",
}  # in words, by the key of `demands`


def demands(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the owner's policy says that a missing one does not: of secure rounds, of private ones, of its work.

    `secure` has the number of devices of a pinned roster too. The policy and the roster are those of the last start.
    `policy` or `roster` holds the error if one is not valid.
    """
    from thinwire.cli.client.start import pinned_roster
    from thinwire.client.policy import FILE, Policy, load_policy
    from thinwire.core.errors import ThinwireError

    options, found = StartOptions.load(folder) or StartOptions(), {name: dict[str, Any]() for name in DEMANDS}
    place = dict.fromkeys(SECURE_KEYS, "secure") | dict.fromkeys(PRIVATE_KEYS, "private")
    try:
        given, usual = load_policy(options.path("policy") or folder / FILE), Policy()
        for key in Policy.model_fields:
            if (value := getattr(given, key)) != getattr(usual, key):
                found[place.get(key, "work")][key] = value
    except ThinwireError as error:
        found["secure"]["policy"] = str(error)
    try:
        pinned = pinned_roster(options.path("roster"), options.path("roster_key"))
        found["secure"] |= {} if pinned is None else {"pinned": len(pinned)}
    except ThinwireError as error:
        found["secure"]["roster"] = str(error)
    return found


def demanded(found: dict[str, Any]) -> str:
    """Return in words what `demands` found of one kind.

    >>> demanded({"secure": "required", "min_cohort": 10, "pinned": 12})
    'secure = required, min_cohort = 10, a pinned roster of 12 devices'
    >>> demanded({"privacy": ["central", "local"], "max_epsilon": 4.0, "hours_end_work": False})
    'privacy = central or local, max_epsilon = 4, hours_end_work = false'
    """
    errors = ("policy", "roster")
    words = [f"{key} = {_value(value)}" for key, value in found.items() if key not in (*errors, "pinned")]
    words += [f"{key} not valid: {found[key]}" for key in errors if key in found]
    words += [f"a pinned roster of {formatting.counted(found['pinned'], 'device')}"] if "pinned" in found else []
    return ", ".join(words)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " or ".join(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def pending(folder: Path) -> int:
    """Return the number of replies that are kept until the aggregator has sent their outcome."""
    count = 0
    for path in folder.glob("runs/*/state.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            count += len(json.loads(path.read_bytes())["outbox"])
    return count


def show(rows: list[dict[str, Any]]) -> None:
    """Print one row for each client, then its last error and its clock skew."""
    header = ("client", "state", "connected", "process", "run", "round", "pending", "aggregator")
    cells = [
        (
            row["name"],
            row["state"],
            console.ago(row["connected_at"]).removesuffix(" ago"),
            row.get("pid"),
            row["run"],
            row["round"] or None,
            row["pending"],
            row["aggregator"],
        )
        for row in rows
    ]
    console.table(header, cells, right=("process", "round", "pending"))
    for row in rows:
        for key, text in DEMANDS.items():
            if row[key]:
                console.line(f"{row['name']}: {text}: {demanded(row[key])}")
        if row["last_error"] and row["connected_at"] is None:  # since then every call succeeded
            console.line(f"{row['name']}: {console.ago(row['last_error_at'])}: {row['last_error']}")
        if abs(row["skew_s"] or 0.0) >= SHOWN_SKEW_S:
            way = "behind" if row["skew_s"] > 0 else "ahead of"
            console.line(
                f"{row['name']}: its clock is {formatting.duration(abs(row['skew_s']))} {way} the aggregator's"
            )
