"""Options that several commands share, each with one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Home: TypeAlias = Annotated[
    Path | None, typer.Option("--home", help="state folder; default THINWIRE_HOME, else the XDG state folder")
]
ClientName: TypeAlias = Annotated[
    str | None, typer.Option("--name", help="this device's name; default: the one that has joined, else the machine's")
]
NewName: TypeAlias = Annotated[
    str | None, typer.Option("--name", help="what this device is to be called; default: the machine's name")
]
OneName: TypeAlias = Annotated[str | None, typer.Option("--name", help="of one client; default: all of this machine")]
Print: TypeAlias = Annotated[bool, typer.Option("--print", help="show the unit and touch nothing")]
System: TypeAlias = Annotated[bool, typer.Option("--system", help="for the whole machine (root); default: this user")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Task: TypeAlias = Annotated[
    str | None, typer.Option("--task", metavar="NAME=MODULE", help="a task's code: a dotted name or a .py file")
]
Sets: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change one key of the plan; repeatable")
]
Data: TypeAlias = Annotated[
    Path | None, typer.Option("--data", help="the data's place, handed to the task as site.data")
]
PlanFile: TypeAlias = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan in TOML: thinwire init writes one")]
RunId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help='a run, a unique beginning of one, or "latest"')]


def overrides(sets: list[str] | None) -> dict[str, str]:
    """`--set` as the plan takes it; a word without "=" is a usage error."""
    found = {}
    for one in sets or []:
        place, equals, value = one.partition("=")
        if not equals:
            raise typer.BadParameter(f"{one!r} has no value: --set section.key=value, as in --set local.lr=0.1")
        found[place.strip()] = value.strip()
    return found
