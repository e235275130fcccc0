"""`thinwire client runs` and `thinwire client model`: what a device keeps of runs, with their personal layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.local_state import client_here, command_line
from thinwire.cli.params import ClientName, Home, Json, require_new_file

if TYPE_CHECKING:
    from thinwire.client.personal_files import KeptRun

RunHere: TypeAlias = Annotated[
    str, typer.Argument(metavar="RUN", help="id of a run that this device keeps, or its unique beginning")
]

app = typer.Typer(name="runs", help="Runs of which this device keeps something.", no_args_is_help=True)


@app.command("list")
def list_runs(name: ClientName = None, json: Json = False, home: Home = None) -> None:
    """List the runs of which this device keeps state, personal layers or shared layers."""
    from thinwire.client.personal_files import kept_runs
    from thinwire.core.formatting import size
    from thinwire.core.statedir import find_home

    called, folder = client_here(name, find_home(home))
    found = kept_runs(folder)
    if json:
        console.document([asdict(one) for one in found])
    elif found:
        header = ("run", "state", "personal tensors", "shared layers", "bytes", "written")
        console.table(header, [
            (one.run, "open" if one.is_open else "over", one.personal or None,
             f"version {one.version}" if one.version else None, size(one.size_bytes), console.ago(one.at))
            for one in found
        ], right=("personal tensors", "bytes"))  # fmt: skip
    else:
        console.note(f"{called} keeps nothing of any run")


@app.command()
def delete(
    run_id: RunHere,
    yes: Annotated[bool, typer.Option("--yes", help="confirm the deletion")] = False,
    name: ClientName = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Delete what this device keeps of a run: its personal layers, shared layers and state.

    The number of updates that it made stays, so that none is counted twice. A run that is not over here can be deleted
    while its client is stopped. If the run goes on, the device begins again, and its next update reports that.
    """
    from thinwire.client.personal_files import delete_run
    from thinwire.core.errors import UsageError
    from thinwire.core.statedir import find_home

    called, folder = client_here(name, find_home(home))
    one = _kept(folder, called, run_id, home)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"{one.run} is not deleted without --yes", why="nothing brings its personal layers back",
                hint=command_line(f"client runs delete {one.run} --yes", home),
            )  # fmt: skip
        if not typer.confirm(f"Delete what {called} keeps of {one.run}; nothing brings it back?"):
            console.line(f"{one.run} stays")
            raise typer.Exit(1)
    with _alone(folder, called, one):
        delete_run(folder, one.run)
    if json:
        console.document({"run": one.run, "deleted": True})
    else:
        console.line(f"{one.run} is deleted on {called}")


def model(
    run_id: RunHere,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help=".safetensors file to write")],
    name: ClientName = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Write the whole model of a run as .safetensors: the shared layers that came last, and the personal ones.

    The file derives from the local data: protect it as you protect them.
    """
    from thinwire.client.personal_files import whole_model
    from thinwire.core.statedir import find_home

    require_new_file(out)
    called, folder = client_here(name, find_home(home))
    found = whole_model(folder, _kept(folder, called, run_id, home).run)
    found.export(out)
    if json:
        console.document({
            "run": found.run, "version": int(found.version), "file": str(out), "tensors": sorted(found.tensors),
            "personal": found.personal, "missing": found.missing,
        })  # fmt: skip
        return
    console.line(
        f"{out}: {found.run}, shared layers of model version {found.version}, {len(found.personal)} personal tensors"
    )
    if found.missing:
        console.line(f"not in it: {len(found.missing)} tensors that are those of the task's model()")


def _kept(folder: Path, called: str, run_id: str, home: Path | None) -> KeptRun:
    """Return the run of this id, or of which it is the unique beginning; `NotFound` without one."""
    from thinwire.client.personal_files import kept_runs
    from thinwire.core.errors import NotFound
    from thinwire.core.formatting import counted

    there = {one.run: one for one in kept_runs(folder)}
    found = [there[run_id]] if run_id in there else [one for run, one in there.items() if run.startswith(run_id)]
    if len(found) == 1:
        return found[0]
    several = ", ".join(sorted(one.run for one in found)[:5])
    raise NotFound(
        f"{called} keeps no run {run_id!r}" if not found else f"several runs begin with {run_id!r}",
        why=several or f"it keeps {counted(len(there), 'run')}, and none has this id",
        hint=command_line(f"client runs list --name {called}", home),
    )


@contextmanager
def _alone(folder: Path, called: str, one: KeptRun) -> Iterator[None]:
    """Keep a client from starting meanwhile; raise `Refused` if it runs and may have the run in memory."""
    from thinwire.core.errors import Refused
    from thinwire.core.statedir import Held, hold

    if not one.is_open:
        yield
        return
    try:
        with hold(folder / "lock", {"deleting": one.run}):
            yield
    except Held as error:
        raise Refused(
            f"{one.run} is not over on {called}", why=f"process {error.holder.get('pid', '?')} trains in it",
            hint="when the run is over, or stop the client first",
        ) from error  # fmt: skip
