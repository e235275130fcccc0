"""`thinwire aggregator ca`: show the CA that devices pin, and replace it without a visit to any device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json

if TYPE_CHECKING:
    from thinwire.transport.protocol.certificates import Chain

app = typer.Typer(name="ca", help="The CA that devices pin.", no_args_is_help=True)


@app.command()
def show(json: Json = False, home: Home = None) -> None:
    """Show the pin, the names and the dates of the certificates; two CAs while one replaces the other."""
    rows = _rows(_folder(home), home)
    if json:
        console.document([_document(row) for row in rows])
        return
    for row, standing in zip(rows, ("newest", *["until every device holds the newest"] * len(rows)), strict=False):
        console.line(f"pin      {row.pin}" + (f"  ({standing})" if len(rows) > 1 else ""))
        console.line(f"ca       until {row.ca_ends:%Y-%m-%d}")
        console.line(f"leaf     until {row.leaf.ends:%Y-%m-%d}, made anew from {row.leaf.renewed_at:%Y-%m-%d} on")
        console.line(f"names    {', '.join(row.leaf.names)}")


@app.command()
def rotate(
    san: Annotated[
        list[str] | None, typer.Option("--san", metavar="NAME", help="a name or address more for the certificate")
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Make a new CA beside the present one; both are served until every device holds the new one.

    Devices take it over by themselves, over a connection that the present one vouches for.

    Open invitations that name the present one go on working meanwhile.
    """
    from thinwire.cli.aggregator.tls import repin
    from thinwire.cli.local_state import again, alive
    from thinwire.transport.server.tls import InternalCA

    folder = _folder(home)
    _rows(folder, home)
    pin = InternalCA(folder).rotate(san or ())
    repin(folder, pin)
    if json:
        console.document([_document(row) for row in _rows(folder, home)])
        return
    console.line(f"pin      {pin}")
    console.line(
        "new invitations name it; " + ("it is shown within a minute" if alive(home) else "nobody serves it now")
    )
    console.line(f"look     {again('aggregator ca show', home)}: one CA is left when every device holds this one")


def _folder(home: Path | None) -> Path:
    """Return the folder of the certificates."""
    from thinwire.core.statedir import find_home

    return find_home(home) / "aggregator" / "tls"


def _rows(folder: Path, home: Path | None) -> list[Chain]:
    """Return the served chains, newest CA first; `NotFound` if the aggregator has no CA of its own."""
    from thinwire.cli.local_state import again
    from thinwire.core.errors import NotFound
    from thinwire.transport.protocol.certificates import chains

    if rows := list(chains(folder)):
        return rows
    raise NotFound(
        "this aggregator has no CA of its own",
        why="its door has been on this machine only, or shows a certificate that you brought",
        hint=again("aggregator start --listen 0.0.0.0:9090", home),
    )


def _document(row: Chain) -> dict[str, Any]:
    """Return one chain for `--json`."""
    return {
        "pin": row.pin,
        "names": list(row.leaf.names),
        "ca_until": row.ca_ends.isoformat(),
        "leaf_until": row.leaf.ends.isoformat(),
        "renewed_at": row.leaf.renewed_at.isoformat(),
    }
