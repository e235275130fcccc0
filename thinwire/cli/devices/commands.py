"""The commands of `thinwire devices`: list, show, invite, approve, revoke and rename.

The device API refuses a revoked device from the next request on. The running aggregator then clears what is open:
waiting requests, uploads, assignments, and updates that are not aggregated yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.local_state import alive
from thinwire.cli.params import Home, Json
from thinwire.cli.signals import until

if TYPE_CHECKING:
    from thinwire.cli.devices import render
    from thinwire.store import Invited, Store


app = typer.Typer(name="devices", help="Devices: who may take part, who is there.", no_args_is_help=True)

Device: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="a device: thinwire devices list")]


@app.command(name="list")
def list_(
    log: Annotated[bool, typer.Option("--log", help="who did what to which device, and what the door refused")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """List the devices that this aggregator knows."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import absent, aggregator_home, has_database, opened, way_back

    if not has_database(aggregator_home(home)):
        render.nothing(json)
        return
    with opened(home) as store:
        if log:
            render.log(store.device_actions(), store.door_notes(), json)
        else:
            found, known = list(store.devices()), _aggregator(home)
            render.devices(found, known, json)
            if found and not (known.alive or json):
                console.note(f"{absent(home)}: nobody can tell who is online; {way_back(home)}")


@app.command()
def show(name: Device, json: Json = False, home: Home = None) -> None:
    """Show what is known of one device: what it has, what it runs, what it did."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import known
    from thinwire.core.errors import NotFound

    with known(home, read_only=True) as store:
        rows, links = list(store.devices()), store.measures(*render.LINK)
    found = next((info for info in rows if info.row.name == name), None)
    if found is None:
        called = ", ".join(info.row.name for info in rows)
        raise NotFound(f"no device {name!r}", why=f"known: {called or 'none'}", hint="thinwire devices list")
    render.one(found, [one for one in links if one.device == name], _aggregator(home), json)


def _aggregator(home: Path | None) -> render.Known:
    """Return the state of the aggregator on this machine, as the tables need it."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import aggregator_home, alive
    from thinwire.core.clock import gone_since, heard_by

    about, lock = alive(home), aggregator_home(home).lock
    return render.Known(about is not None, gone_since(lock), bool((about or {}).get("pin")), heard_by(lock))


@app.command()
def invite(
    count: Annotated[int | None, typer.Option("--count", help="how many; default 1")] = None,
    names: Annotated[
        Path | None, typer.Option("--names", metavar="FILE", help="one for each name in it, good for that name only")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="write them there, not here")] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="good for so long: 90s, 15m, 24h, 7d")
    ] = "24h",
    by_hand: Annotated[
        bool, typer.Option("--approve-manually", help="who comes with it waits for thinwire devices approve")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="show those that were made, without their secrets")] = False,
    withdraw: Annotated[int | None, typer.Option("--withdraw", metavar="ID", help="make one worthless")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Make invitations: each lets one device in, once."""
    from thinwire.cli.devices import render
    from thinwire.cli.devices.invitations import DoorPlace, new_table, read_names, write_table
    from thinwire.cli.local_state import known, operator
    from thinwire.cli.params import parse_duration
    from thinwire.core.errors import UsageError

    if listed or withdraw is not None:
        if (listed and withdraw is not None) or count is not None or names or out or by_hand:
            raise UsageError("--list and --withdraw stand alone", hint="thinwire devices invite --list")
        with known(home, read_only=listed) as store:
            if withdraw is not None:
                store.invitations.withdraw(withdraw, operator())
            render.invitations(store.invitations.all(), withdraw, json)
        return
    wanted = read_names(names) if names else []
    if wanted and count not in (None, len(wanted)):
        raise UsageError(f"--count {count} does not go with {len(wanted)} names", hint="leave --count away")
    door, expires_s = DoorPlace.of(home), parse_duration(expires, "--expires")
    with known(home, read_only=False) as store:

        def made() -> list[Invited]:
            return store.invitations.invite(1 if count is None else count, wanted, expires_s, by_hand, operator())

        if out is None:
            render.invited(door, made(), by_hand, json)
            return
        with new_table(out) as file:
            invited = made()
            try:
                write_table(file, [door.row(one) for one in invited])
            except OSError:
                for one in invited:  # their secrets were not written, so nobody can use them
                    store.invitations.withdraw(one.id, operator())
                raise
        render.written(out, invited, by_hand, json)


@app.command()
def approve(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="a device that has come")] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE.pub", help="let a stock Flower node in by its public key")
    ] = None,
    as_name: Annotated[str | None, typer.Option("--name", help="what the device of that key is called")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Let a device in that waits or was shut out, or one whose public key you have."""
    from thinwire.cli.devices import render
    from thinwire.cli.devices.invitations import read_public_key
    from thinwire.cli.local_state import known, operator
    from thinwire.core.errors import UsageError

    if (name is None) == (key is None) or (key is None) != (as_name is None):
        raise UsageError(
            "say which device", hint="thinwire devices approve NAME, or approve --key FILE.pub --name NAME"
        )
    der = read_public_key(key) if key else b""
    with known(home, read_only=False) as store:
        if name is not None:
            store.roster.approve(name, operator())
        else:
            assert as_name is not None
            store.roster.add(as_name, der, "stock", operator())
        info = next(one for one in store.devices() if one.row.name == (name or as_name))
    if json:
        console.document(render.document(info, _aggregator(home)))
        return
    console.line(f"{info.row.name} is approved ({info.row.how}); the fingerprint of its key:")
    console.line(f"  {console.grouped(info.row.fingerprint)}")


@app.command()
def revoke(name: Device, json: Json = False, home: Home = None) -> None:
    """Shut a device out, at once; what is folded of it stays in the model."""
    from thinwire.cli.local_state import known, operator
    from thinwire.web.device_queries import stays

    with known(home, read_only=False) as store:
        confirmed, rounds = shut_out(store, home, name, operator())
    if json:
        console.document({"name": name, "state": "revoked", "confirmed": confirmed, "rounds": rounds})
    else:
        console.line(f"{name} is shut out")
        console.line(f"what was folded stays in: {stays(rounds)}")
    if confirmed is None:
        console.note("no aggregator is running: the next one applies it before its door opens")
    elif not confirmed:
        console.note(
            f"the door refuses it from now on, but the aggregator has not confirmed it within {CONFIRMED_S:g} s"
        )
        raise typer.Exit(124)


@app.command()
def rename(
    old: Device, new: Annotated[str, typer.Argument(metavar="NEW", help="a-z, 0-9 and -")], json: Json = False,
    home: Home = None,
) -> None:  # fmt: skip
    """Give a device another name; its key and its past stay with it."""
    from thinwire.cli.local_state import known, operator

    with known(home, read_only=False) as store:
        store.roster.rename(old, new, operator())
    if json:
        console.document({"name": new, "was": old})
    else:
        console.line(f"{old} is now {new}; the device learns it at once if it is connected, else when it comes")


CONFIRMED_S = 5.0


def shut_out(store: Store, home: Path | None, name: str, who: str) -> tuple[bool | None, dict[str, list[int]]]:
    """Revoke a device and return (confirmed, aggregated rounds by run).

    `confirmed` is None if no aggregator is running, else True if the running one has carried the revocation out: it
    answered the device's waiting requests, deleted its uploads, refused its open assignments, and dropped updates that
    were not aggregated. Without an aggregator the next one does so before its device API listens.
    """
    store.roster.revoke(name, who)
    if alive(home) is None:
        return None, dict(store.folded_rounds(name))
    order = store.order("revoke", args={"device": name}, who=who)
    answered = until(lambda: store.result(order) is not None, CONFIRMED_S)
    result: dict[str, Any] = store.result(order) or {}
    rounds = result.get("rounds")
    return answered and bool(result.get("done")), dict(store.folded_rounds(name) if rounds is None else rounds)
