"""`thinwire init DIR`: a task and a plan of one's own, that run as they are."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import say


def init(directory: Annotated[Path, typer.Argument(metavar="DIR", help="a new or empty folder")]) -> None:
    """Write task.py (your model and data go there) and plan.toml (two lines) into a folder."""
    from thinwire.core.errors import UsageError
    from thinwire.core.home import disk_error, write_atomically

    name = re.sub(r"[^A-Za-z0-9_-]+", "-", directory.absolute().name).strip("-_")[:63] or "mine"
    templates = files("thinwire.cli") / "templates"
    written = {
        "task.py": (templates / "task.py.txt").read_text(),
        "plan.toml": f'[run]\ntask = "{name}"\n\n[local]\nlr = 0.5\n',
    }
    if there := [one for one in written if (directory / one).exists()]:
        raise UsageError(
            f"{directory / there[0]} exists", why="nothing is overwritten", hint="thinwire init ANOTHER-FOLDER"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, directory) from error
    for one, text in written.items():
        write_atomically(directory / one, text.encode(), mode=0o644)
        say.line(str(directory / one))
    say.note("next, with the same two files:")
    say.note(f"  thinwire task check {directory}/task.py --plan {directory}/plan.toml")
    say.note(f"  thinwire sim {directory}/plan.toml --clients 4")
    say.note("  thinwire aggregator start        (then, for each device:)")
    say.note(
        f"  thinwire client start --aggregator http://127.0.0.1:9090 --task {name}={directory}/task.py --name NAME"
    )
    say.note(f"  thinwire run {directory}/plan.toml")
