"""`thinwire aggregator ca`: what devices pin, and how it is replaced without anybody going to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import say
from thinwire.cli.options import Home, Json

if TYPE_CHECKING:
    from thinwire.flower.door.chains import Chain

app = typer.Typer(name="ca", help="The CA that devices pin.", no_args_is_help=True)


@app.command()
def show(json: Json = False, home: Home = None) -> None:
    """Show the pin, the names and the dates of the certificates; two CAs while one replaces the other."""
    rows = _rows(_folder(home), home)
    if json:
        say.document([_document(row) for row in rows])
        return
    for row, standing in zip(rows, ("newest", *["until every device holds the newest"] * len(rows)), strict=False):
        say.line(f"pin      {row.pin}" + (f"  ({standing})" if len(rows) > 1 else ""))
        say.line(f"ca       until {row.ca_ends:%Y-%m-%d}")
        say.line(f"leaf     until {row.leaf.ends:%Y-%m-%d}, made anew from {row.leaf.renewed_at:%Y-%m-%d} on")
        say.line(f"names    {', '.join(row.leaf.names)}")


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
    from thinwire.cli.aggregator.authority import repin
    from thinwire.cli.places import again, alive
    from thinwire.flower.door.authority import PrivateAuthority

    folder = _folder(home)
    _rows(folder, home)
    pin = PrivateAuthority(folder).rotate(san or ())
    repin(folder, pin)
    if json:
        say.document([_document(row) for row in _rows(folder, home)])
        return
    say.line(f"pin      {pin}")
    say.line("new invitations name it; " + ("it is shown within a minute" if alive(home) else "nobody serves it now"))
    say.line(f"look     {again('aggregator ca show', home)}: one CA is left when every device holds this one")


def _folder(home: Path | None) -> Path:
    from thinwire.core.home import find_home

    return find_home(home) / "aggregator" / "tls"


def _rows(folder: Path, home: Path | None) -> list[Chain]:
    from thinwire.cli.places import again
    from thinwire.core.errors import NotFound
    from thinwire.flower.door.chains import chains

    if rows := list(chains(folder)):
        return rows
    raise NotFound(
        "this aggregator has no CA of its own",
        why="its door has been on this machine only, or shows a certificate that you brought",
        hint=again("aggregator start --listen 0.0.0.0:9090", home),
    )


def _document(row: Chain) -> dict[str, Any]:
    return {
        "pin": row.pin,
        "names": list(row.leaf.names),
        "ca_until": row.ca_ends.isoformat(),
        "leaf_until": row.leaf.ends.isoformat(),
        "renewed_at": row.leaf.renewed_at.isoformat(),
    }
