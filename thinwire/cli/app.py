"""`thinwire`: all nouns together."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def top() -> None:
    """Federated learning over thin wires."""


def run() -> int:
    app()
    return 0
