"""The commands of `thinwire aggregator`: start, status, stop, doctor, backup, restore, and the groups ca, service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.aggregator import ca
from thinwire.cli.params import Home, Json
from thinwire.cli.service import commands as aggregator_service

app = typer.Typer(name="aggregator", help="The aggregator: the service that devices reach.", no_args_is_help=True)
app.add_typer(aggregator_service.aggregator_app)
app.add_typer(ca.app)

END_S = 30.0


@app.command()
def start(
    listen: Annotated[
        str, typer.Option(envvar="THINWIRE_LISTEN", metavar="HOST:PORT", help="the door: where devices come")
    ] = "127.0.0.1:9090",
    page: Annotated[
        str, typer.Option(envvar="THINWIRE_PAGE", metavar="HOST:PORT", help="the page: where people look")
    ] = "127.0.0.1:8080",
    san: Annotated[
        list[str] | None, typer.Option("--san", metavar="NAME", help="a name or address for the door's certificate")
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="your own certificate instead of ours (PEM)")] = None,
    key: Annotated[Path | None, typer.Option(help="its key (PEM)")] = None,
    ca: Annotated[Path | None, typer.Option(help="its CA, for devices to pin; default: the system's CAs")] = None,
    allow_stock_nodes: Annotated[
        bool,
        typer.Option("--allow-stock-nodes", help="stock Flower nodes, in a SuperLink of their own"),
    ] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="without the page")] = False,
    background: Annotated[bool, typer.Option("--background", help="come back once it serves")] = False,
    home: Home = None,
) -> None:
    """Serve devices and runs until told to stop; a run that was in progress goes on."""
    from thinwire.cli.aggregator.serve import Wanted, serve_here, serve_in_background
    from thinwire.cli.aggregator.tls import Certificates
    from thinwire.cli.params import Address
    from thinwire.core.errors import UsageError

    wanted = Wanted(
        Address.parse(listen, "--listen"),
        None if no_page else Address.parse(page, "--page"),
        Certificates(tuple(san or ()), cert, key, ca),
        allow_stock_nodes,
    )
    if wanted.page:
        wanted.page.require_loopback("--page")
        if wanted.page.overlaps(wanted.listen):
            raise UsageError(
                f"--page and --listen both say port {wanted.page.port}", why="door and page are two listeners",
                hint=f"--page 127.0.0.1:{8080 if wanted.listen.port != 8080 else 8081}",
            )  # fmt: skip
    raise typer.Exit((serve_in_background if background else serve_here)(wanted, home))


@app.command()
def status(
    login: Annotated[bool, typer.Option("--login", help="a fresh one-time address of the page")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Say where the aggregator is, who is there and what is going on."""
    from thinwire.cli.aggregator.serve import login_url
    from thinwire.cli.devices.render import Known, counts_as
    from thinwire.cli.local_state import again, aggregator_home, end_abandoned, opened, require_alive
    from thinwire.cli.runs.commands import standing
    from thinwire.core.clock import heard_by
    from thinwire.store.queries import behind

    about = require_alive(home)
    end_abandoned(home)
    with opened(home, read_only=not login) as store:
        devices = list(store.devices())
        going = [row for row in store.runs() if row.status in ("running", "waiting")]
        line = store.line()
        code = login_url(about["page"], store.new_login_code()) if login and about.get("page") else None
    queued = [row for row in line if row.status == "queued"]
    known = Known(heard_by=heard_by(aggregator_home(home).lock))
    heard = {info.row.name: info for info in devices if info.online}
    online = list(heard)
    waiting = [info.row.name for info in devices if counts_as(info.row, bool(about.get("pin"))) == "pending"]
    if json:
        keys = ("listen", "urls", "pin", "page", "control_address", "pid", "version", "home")
        found: dict[str, Any] = {key: about.get(key) for key in keys}
        found |= {"devices": len(online), "online": online, "waiting": waiting}
        found |= {"heard_at": {name: known.heard_at(info) for name, info in heard.items()}}
        found |= {"running": going[0].run_id if going else None, "queued": [row.run_id for row in queued]}
        console.document(found | ({"login": code} if login else {}))
        return
    console.line(f"thinwire {about.get('version')}, process {about['pid']}, in {about.get('home')}")
    urls = f"TLS; {', '.join(about.get('urls') or ())}" if about.get("pin") else "this machine only"
    console.line(f"door     {about['listen']} ({urls})")
    console.line(f"page     {code or about.get('page') or 'none (--no-page)'}")
    if about.get("control_address"):
        console.line(f"flower   {about['control_address']} for flwr run")
    named = ", ".join(f"{name} (heard {known.heard(info)})" for name, info in heard.items())
    console.line(f"devices  {len(online)} of {len(devices)} online{': ' + named if online else ''}")
    if waiting:
        console.line(f"         waiting to be approved: {', '.join(waiting)}; look at {again('devices list', home)}")
    for row in (*going, *queued):
        console.line(f"run      {row.run_id} {behind(row, line) or standing(row)}")


@app.command()
def stop(home: Home = None) -> None:
    """End the service; a run in progress goes on when it is started again."""
    from thinwire.cli.local_state import alive, opened, require_alive
    from thinwire.cli.signals import until
    from thinwire.core.errors import ThinwireError

    about = require_alive(home)

    def gone() -> bool:
        now = alive(home)
        return now is None or now.get("pid") != about["pid"]

    with opened(home, read_only=False) as store:
        store.order("stop-service")
    if not until(gone, END_S):
        raise ThinwireError(
            f"the aggregator (process {about['pid']}) has not ended within {END_S:g} s", hint=f"kill {about['pid']}"
        )
    console.line("stopped")
    if note := aggregator_service.comes_back():
        console.note(note)


@app.command()
def doctor(json: Json = False, home: Home = None) -> None:
    """Look at folder, disk, store, clock, devices, door, certificate and page; say what to do where one is wrong."""
    from thinwire.cli.doctor.aggregator import examine
    from thinwire.cli.doctor.checks import tell
    from thinwire.cli.local_state import alive
    from thinwire.core.statedir import find_home

    raise typer.Exit(tell(examine(find_home(home), alive(home), home), json))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the backup to make, one tar")],
    json: Json = False,
    home: Home = None,
) -> None:
    """Write database, models, unfolded answers, and the door's CA and keys into one file; also while it serves."""
    from thinwire import __version__
    from thinwire.cli.aggregator.tls import own_files
    from thinwire.core.statedir import AggregatorHome, find_home
    from thinwire.store.backup import back_up

    place = AggregatorHome(find_home(home) / "aggregator")
    manifest = back_up(place, file.absolute(), __version__)
    written, elsewhere = file.stat().st_size, [str(path) for path in own_files(place.root)]
    if json:
        found = {"file": str(file), "bytes": written, "files": len(manifest.files), "taken_at": manifest.taken_at}
        console.document(found | {"not_in_it": elsewhere})
        return
    console.line(f"{file}: {len(manifest.files)} files, {console.size(written)}")
    console.note(
        "it holds the door's keys: whoever has it can stand in for this aggregator. Keep it as safe as the original"
    )
    if elsewhere:
        console.note(
            f"not in it, since they are yours (--cert, --key, --ca): {', '.join(elsewhere)}; back them up there"
        )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a backup")],
    force: Annotated[bool, typer.Option("--force", help="move what is there aside")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Put a backup in the place of an aggregator's state; checked byte by byte before anything changes."""
    from thinwire.cli.local_state import again
    from thinwire.core.statedir import AggregatorHome, find_home
    from thinwire.store.restore import restore as put_back

    place = AggregatorHome(find_home(home) / "aggregator")
    restored = put_back(file.absolute(), place, force)
    taken_at, replaced = restored.manifest.taken_at, restored.replaced
    if json:
        moved = str(replaced) if replaced else None
        console.document({"home": str(place.root.parent), "taken_at": taken_at, "replaced": moved})
        return
    console.line(f"{place.root} is as it was {console.ago(taken_at)}; go on: {again('aggregator start', home)}")
    if replaced:
        console.line(f"what was there is now {replaced}")
    console.note(f"who was let in or shut out since then is as it was too: {again('devices list', home)}")
