"""`thinwire codecs`: what can stand in a plan's codec."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from thinwire.cli import say
from thinwire.cli.options import Json

app = typer.Typer(name="codecs", help="Codecs: how an update is made small.", invoke_without_command=True)


@app.callback()
def listed(context: typer.Context, json: Json = False) -> None:
    """List the codecs and coders that a chain is made of: topk(0.01) > int8 > zstd."""
    if context.invoked_subcommand is None:
        _list(json)


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List the codecs and coders that a chain is made of."""
    _list(json)


def _list(json: bool) -> None:
    from thinwire.aggregation import codecs

    rows = [{"name": name, "what": _first_sentence(codecs[name])} for name in sorted(codecs)]
    if json:
        say.document(rows)
    else:
        say.table(("name", "what"), [(row["name"], row["what"]) for row in rows])


def _first_sentence(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]
