"""`thinwire demo`: everything at once on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.options import Json


def demo(
    clients: Annotated[int, typer.Option("--clients", min=0, help="client processes; 0: as many as memory takes")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="rounds to make")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of data, model and rounds")] = 1,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="do not open the page")] = False,
    exit_: Annotated[bool, typer.Option("--exit", help="end after the table")] = False,
    json: Json = False,
) -> None:
    """A live federated run of eight processes: a slow client, one that dies and comes back, and what it all cost."""
    from thinwire.cli.live.show import show

    raise typer.Exit(show(clients, rounds, seed, browse=not (no_browser or json), stay=not (exit_ or json), json=json))
