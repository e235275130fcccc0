"""The commands of `thinwire devices`: list, show, invite, approve, revoke, rename, tag, remove and forget.

`roster` has a file of its own.

The running aggregator reads the command to revoke a device, refuses the device from then on, and clears what is open:
waiting requests, uploads, assignments, and updates that are not aggregated yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.devices import roster
from thinwire.cli.local_state import alive, starting
from thinwire.cli.params import TAG_SETTINGS, Home, Json, Tags, tag_changes
from thinwire.core import formatting
from thinwire.core.signals import until

if TYPE_CHECKING:
    from thinwire.cli.devices import render
    from thinwire.store import Invited, Store


app = typer.Typer(name="devices", help="Devices: invite, approve, revoke, list.", no_args_is_help=True)
app.add_typer(roster.app)

Device: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="name of a device (thinwire devices list)")]


@app.command(name="list")
def list_(
    log: Annotated[bool, typer.Option("--log", help="show actions on devices, and refusals of the device API")] = False,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="only devices with this tag; repeatable")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """List the devices that this aggregator knows."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import (
        absence_text,
        aggregator_home,
        has_database,
        open_store,
        require_home,
        start_hint,
    )

    require_home(home)
    if not has_database(aggregator_home(home)):
        render.print_no_devices(json)
        return
    with open_store(home) as store:
        if log:
            render.print_audit_log(store.audit.actions(), store.audit.notes(), json)
        else:
            found = [one for one in store.devices() if {*(tag or ())} <= {*one.tags}]
            aggregator = _aggregator_state(home, store)
            if tag and not (found or json):
                console.note(f"no device has the tag {' and '.join(tag)}: thinwire devices list")
                return
            render.print_devices(found, aggregator, json)
            if found and not (aggregator.alive or json):
                console.note(f"{absence_text(home)}: nobody can tell who is online; {start_hint(home)}")


@app.command()
def show(name: Device, json: Json = False, home: Home = None) -> None:
    """Show one device: its equipment, its versions and its history."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import open_store
    from thinwire.core.errors import NotFound
    from thinwire.store import LINK_KINDS

    with open_store(home, read_only=True) as store:
        rows, links, aggregator = list(store.devices()), store.measures(*LINK_KINDS), _aggregator_state(home, store)
    found = next((info for info in rows if info.row.name == name), None)
    if found is None:
        called = ", ".join(info.row.name for info in rows)
        raise NotFound(f"no device {name!r}", why=f"known: {called or 'none'}", hint="thinwire devices list")
    render.print_device(found, [one for one in links if one.device == name], aggregator, json)


def _aggregator_state(home: Path | None, store: Store) -> render.AggregatorState:
    """Return the state of the aggregator on this machine, as the tables need it."""
    from thinwire.cli.devices import render
    from thinwire.cli.local_state import adds_device, aggregator_home, alive
    from thinwire.core.clock import down_since_of
    from thinwire.reports.privacy import last_contacts

    about, lock = alive(home), aggregator_home(home).lock
    contacts = last_contacts(store.runs(with_deleted=True), lock)
    add = adds_device(about, home) if about and "listen" in about else ""
    return render.AggregatorState(about is not None, down_since_of(lock), bool((about or {}).get("pin")), contacts, add)


@app.command()
def invite(
    count: Annotated[int | None, typer.Option("--count", help="number of invitations; default: 1")] = None,
    names: Annotated[
        Path | None,
        typer.Option("--names", metavar="FILE", help="file of names, each of which gets an invitation"),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.csv", help="CSV file to write")] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="time until they expire: 90s, 15m, 24h, 7d")
    ] = "24h",
    by_hand: Annotated[
        bool, typer.Option("--approve-manually", help="devices wait for thinwire devices approve after joining")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="list invitations, without secrets")] = False,
    withdraw: Annotated[int | None, typer.Option("--withdraw", metavar="ID", help="withdraw an invitation")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Make invitations; each enrolls one device, once."""
    from thinwire.cli.devices import render
    from thinwire.cli.devices.files import new_table, read_names, write_table
    from thinwire.cli.local_state import aggregator_home, open_store, operator, require_home
    from thinwire.cli.params import parse_duration
    from thinwire.core.errors import UsageError
    from thinwire.core.invitation import InviteAddress

    if listed or withdraw is not None:
        if (listed and withdraw is not None) or count is not None or names or out or by_hand:
            raise UsageError("--list and --withdraw stand alone", hint="thinwire devices invite --list")
        with open_store(home, read_only=listed) as store:
            if withdraw is not None:
                store.invitations.withdraw(withdraw, operator())
            render.print_invitations(store.invitations.all(), withdraw, json)
        return
    wanted = read_names(names) if names else []
    if wanted and count not in (None, len(wanted)):
        raise UsageError(f"--count {count} does not go with {len(wanted)} names", hint="leave --count away")
    expires_s = parse_duration(expires, "--expires")
    require_home(home)
    if process := starting(home):  # it writes the address of its device API once it listens
        console.note(f"an aggregator is starting (process {process}) ...")
        until(lambda: not starting(home), START_S)
    address = InviteAddress.read(aggregator_home(home).root)
    with open_store(home, read_only=False) as store:

        def made() -> list[Invited]:
            return store.invitations.invite(1 if count is None else count, wanted, expires_s, by_hand, operator())

        if out is None:
            render.print_new_invitations(address, made(), by_hand, json)
            return
        with new_table(out) as file:
            invited = made()
            try:
                write_table(file, render.invitation_rows(address, invited))
            except OSError:
                for one in invited:  # their secrets were not written, so nobody can use them
                    store.invitations.withdraw(one.id, operator())
                raise
        render.print_invitation_file(out, invited, by_hand, json)


@app.command()
def approve(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="name of the device")] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE.pub", help="public key of a stock Flower node to approve"),
    ] = None,
    as_name: Annotated[str | None, typer.Option("--name", help="name for the node with that key")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Approve a device that is pending or revoked, or one whose public key you have."""
    from thinwire.cli.devices import render
    from thinwire.cli.devices.files import read_public_key
    from thinwire.cli.local_state import open_store, operator
    from thinwire.core.errors import UsageError

    if (name is None) == (key is None) or (key is None) != (as_name is None):
        raise UsageError(
            "say which device", hint="thinwire devices approve NAME, or approve --key FILE.pub --name NAME"
        )
    der = read_public_key(key) if key else b""
    with open_store(home, read_only=False) as store:
        if name is not None:
            store.roster.approve(name, operator())
        else:
            assert as_name is not None
            store.roster.add(as_name, der, "stock", operator())
        info = next(one for one in store.devices() if one.row.name == (name or as_name))
        aggregator = _aggregator_state(home, store)
    if json:
        console.document(render.device_document(info, aggregator))
        return
    console.line(f"{info.row.name} is approved ({info.row.how}); the fingerprint of its key:")
    console.line(f"  {formatting.grouped(info.row.fingerprint)}")


@app.command()
def revoke(name: Device, json: Json = False, home: Home = None) -> None:
    """Revoke a device at once; its aggregated updates stay in the model."""
    from thinwire.cli.local_state import open_store, operator
    from thinwire.web.device_queries import stays

    with open_store(home, read_only=False) as store:
        confirmed, rounds = revoke_access(store, home, name, operator())
    if json:
        console.document({"name": name, "state": "revoked", "confirmed": confirmed, "rounds": rounds})
    else:
        console.line(f"{name} is revoked")
        kept = f"its aggregated updates stay in: {stays(rounds)}"
        console.line(kept if rounds else "no update of it is in a model that is shown here")
    if confirmed is None:
        console.note("no aggregator is running: the next one applies it before its device API opens")
    elif not confirmed:
        console.note(
            f"the device API refuses it from now on, but the aggregator has not confirmed it within {CONFIRMED_S:g} s"
        )
        raise typer.Exit(124)


@app.command()
def rename(
    old: Device, new: Annotated[str, typer.Argument(metavar="NEW", help="new name: a-z, 0-9, -")], json: Json = False,
    home: Home = None,
) -> None:  # fmt: skip
    """Rename a device; its key and its history stay."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.roster.rename(old, new, operator())
    if json:
        console.document({"name": new, "was": old})
    else:
        console.line(f"{old} is now {new}; the device learns it at once if it is connected, else when it comes")


@app.command(context_settings=TAG_SETTINGS)
def tag(name: Device, tags: Tags = None, json: Json = False, home: Home = None) -> None:
    """Add tags to a device and remove them; without tags, show those that it has."""
    from thinwire.cli.local_state import open_store, operator

    add, take = tag_changes(tags, f"thinwire devices tag {name}")
    with open_store(home, read_only=False) as store:
        found = store.roster.tag(name, add, take, operator())
    if json:
        console.document({"name": name, "tags": found})
    else:
        console.line(f"{name}  {' '.join(found) or 'no tags'}")


@app.command()
def remove(name: Device, json: Json = False, home: Home = None) -> None:
    """Remove a device that never got an assignment; its name is free again."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.remove_device(name, operator())
    if json:
        console.document({"device": name, "removed": True})
    else:
        console.line(f"{name} is removed; it may join again like a new device")


@app.command()
def forget(
    name: Device,
    yes: Annotated[bool, typer.Option("--yes", help="forget the devices whose keys it reported, too")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Put a random pseudonym in the place of a revoked device, in the journal, the tables and the privacy ledger.

    Not reached: backups, logs, exported files and models (docs/how/personal-data.md).
    """
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        found = store.forget_device(name, operator(), with_others=yes)
    if json:
        of = {"pseudonym": "pseudonym", "kept": "kept_names", "others": "others"}
        console.document({"device": name} | {key: found and getattr(found, field) for key, field in of.items()})
        return
    if found is None:
        console.line(f"nothing in the database names {name}")
        return
    console.line(f"{name} is now {found.pseudonym} in {formatting.counted(found.rows, 'row')} and events")
    for other in found.others:
        console.note(f"{other} is forgotten with it: {name} had reported its key")
    for kept in found.kept_names:
        console.note(f"its earlier name {kept} stays in old events: another device has that name now")
    if _is_on_roster(home, name):
        console.note(f"the installed roster still names {name}: thinwire devices roster install, with one without it")
    console.note("backups, logs, exported files and models still have what they had: delete what you may not keep")


def _is_on_roster(home: Path | None, name: str) -> bool:
    """Return True if the installed roster has this device, or is not readable."""
    from thinwire.cli.local_state import aggregator_home
    from thinwire.core.errors import DataLost
    from thinwire.privacy.pinned_roster import read_roster

    try:
        return name in read_roster(aggregator_home(home).roster.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, DataLost):
        return True


START_S = 60.0  # of an aggregator
CONFIRMED_S = 5.0


def revoke_access(store: Store, home: Path | None, name: str, who: str) -> tuple[bool | None, dict[str, list[int]]]:
    """Revoke a device and return (confirmed, aggregated rounds by run).

    `confirmed` is None if no aggregator is running or starting, else True if it has carried the revocation out: it
    answered the device's waiting requests, deleted its uploads, refused its open assignments, and dropped updates that
    were not aggregated. Without an aggregator the next one does so before its device API listens.
    """
    command = store.revoke_device(name, who, "", lambda: bool(alive(home) or starting(home)))
    if command is None:
        return None, dict(store.aggregated_rounds(name))
    answered = until(lambda: store.commands.result(command) is not None, CONFIRMED_S)
    result: dict[str, Any] = store.commands.result(command) or {}
    rounds = result.get("rounds")
    return answered and bool(result.get("done")), dict(store.aggregated_rounds(name) if rounds is None else rounds)
