"""`thinwire task check`: is this module a task, and what will it cost?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import say
from thinwire.cli.options import Data, Json

app = typer.Typer(name="task", help="Tasks: the model and the data of a run.", no_args_is_help=True)


@app.callback()
def top() -> None:
    """A task is a module with model(), data(site) and loss(model, batch)."""


@app.command()
def check(
    module: Annotated[str, typer.Argument(metavar="MODULE", help="a dotted name or a .py file")],
    data: Data = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="its codec, batch and lr")] = None,
    json: Json = False,
) -> None:
    """Do one local step, one encode and one fold in this process, and print what they show."""
    from thinwire.cli.checked import checked, lines

    found = checked(module, data, plan)
    if json:
        say.document(found)
        return
    for line in lines(found):
        say.line(line)
    where = plan or "PLAN"
    say.note(f"next: thinwire sim {where} --clients 4 --task {found['task']}={module}")
