"""The commands of `thinwire aggregator`: start, status, stop, doctor, backup, restore, with groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from thinwire.cli import console
from thinwire.cli import service as aggregator_service
from thinwire.cli.aggregator import tls, users
from thinwire.cli.aggregator.evaluate import evaluate
from thinwire.cli.params import Follow, Home, Json, Lines
from thinwire.core import formatting

app = typer.Typer(name="aggregator", help="The aggregator: the service that devices reach.", no_args_is_help=True)
app.add_typer(aggregator_service.aggregator_app)
app.command()(evaluate)
app.add_typer(tls.app)
app.add_typer(users.users)
app.add_typer(users.tokens)

END_S = 30.0
ConfigAction = Annotated[
    Literal["show"] | None, typer.Argument(metavar="[show]", show_default=False, help="what is done, also if left out")
]


@app.command()
def start(
    listen: Annotated[
        str, typer.Option(envvar="THINWIRE_LISTEN", metavar="HOST:PORT", help="address of the device API")
    ] = "127.0.0.1:9090",
    dashboard: Annotated[
        str, typer.Option(envvar="THINWIRE_DASHBOARD", metavar="HOST:PORT", help="address of the dashboard")
    ] = "127.0.0.1:8080",
    dashboard_name: Annotated[
        list[str] | None,
        typer.Option(
            "--dashboard-name", metavar="NAME", help="further name of the dashboard, also for its certificate"
        ),
    ] = None,
    proxy: Annotated[
        str, typer.Option("--proxy", metavar="ADDR", help="proxy whose forwarded headers the dashboard believes")
    ] = "",
    san: Annotated[
        list[str] | None,
        typer.Option("--san", metavar="NAME", help="further name or address for the device API's certificate"),
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="your own certificate (PEM)")] = None,
    key: Annotated[Path | None, typer.Option(help="the certificate's key (PEM)")] = None,
    ca: Annotated[Path | None, typer.Option(help="the certificate's CA (PEM); default: the system's CAs")] = None,
    allow_stock_nodes: Annotated[
        bool,
        typer.Option("--allow-stock-nodes", help="allow stock Flower nodes, in a SuperLink of their own"),
    ] = False,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="do not start the dashboard")] = False,
    background: Annotated[bool, typer.Option("--background", help="return once the aggregator serves")] = False,
    home: Home = None,
) -> None:
    """Serve devices and runs until told to stop; a run that was in progress goes on."""
    from thinwire.cli.aggregator.serve import Wanted, serve_here, serve_in_background
    from thinwire.cli.aggregator.tls import Certificates
    from thinwire.cli.params import Address
    from thinwire.core.errors import UsageError

    wanted = Wanted(
        Address.parse(listen, "--listen"),
        None if no_dashboard else Address.parse(dashboard, "--dashboard"),
        Certificates(tuple(san or ()), cert, key, ca),
        allow_stock_nodes,
        tuple(dashboard_name or ()),
        proxy,
    )
    if wanted.dashboard:
        wanted.exposure.require_possible()
        if wanted.dashboard.overlaps(wanted.listen):
            raise UsageError(
                f"--dashboard and --listen both say port {wanted.dashboard.port}",
                why="the device API and the dashboard are two listeners",
                hint=f"--dashboard 127.0.0.1:{8080 if wanted.listen.port != 8080 else 8081}",
            )  # fmt: skip
    raise typer.Exit(serve_in_background(home) if background else serve_here(wanted, home))


@app.command()
def status(
    login: Annotated[bool, typer.Option("--login", help="print a new one-time login address of the dashboard")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Show the aggregator's addresses, its devices and its current runs."""
    from thinwire.cli.aggregator.serve import login_url
    from thinwire.cli.devices.render import AggregatorState
    from thinwire.cli.local_state import (
        absence_text,
        aggregator_home,
        alive,
        command_line,
        dashboard_of,
        end_abandoned,
        open_store,
        require_alive,
        start_hint,
    )
    from thinwire.cli.runs.render import standing
    from thinwire.core.disk_reserve import disk_full_text
    from thinwire.core.statedir import AggregatorHome, find_home
    from thinwire.reports.privacy import last_contacts
    from thinwire.reports.reason_text import behind

    page = dashboard_of(AggregatorHome(find_home(home) / "aggregator"))  # a folder that is not there is not made
    if login and page and not alive(home):
        with open_store(home, read_only=False) as store:
            url = login_url(page["url"], store.logins.new_code())
        console.document({"dashboard": page["dashboard"], "login": url}) if json else console.line(f"web      {url}")
        console.note(f"{absence_text(home)}; the dashboard shows what was: {start_hint(home)}")
        return
    about = require_alive(home)
    end_abandoned(home)
    with open_store(home, read_only=not login) as store:
        devices = list(store.devices())
        runs = store.runs(with_deleted=True)
        going = [row for row in runs if row.status in ("running", "waiting", "paused")]
        line = store.run_queue()
        code = login_url(about["dashboard_url"], store.logins.new_code()) if login and about.get("dashboard") else None
    queued, full = [row for row in line if row.status == "queued"], disk_full_text(aggregator_home(home).root)
    state = AggregatorState(last_contacts=last_contacts(runs, aggregator_home(home).lock))
    heard = {info.row.name: info for info in devices if info.online}
    online = list(heard)
    standings = {info.row.name: info.row.standing(bool(about.get("pin"))) for info in devices}
    waiting = [name for name, standing in standings.items() if standing == "pending"]
    approved = [name for name, standing in standings.items() if standing == "approved"]
    if json:
        keys = ("listen", "urls", "pin", "dashboard", "control_address", "pid", "version", "home")
        found: dict[str, Any] = {key: about.get(key) for key in keys}
        found |= {"devices": len(online), "online": online, "waiting": waiting}
        found |= {"last_seen_at": {name: state.last_seen_at(info) for name, info in heard.items()}}
        found |= {"running": next((row.run_id for row in going if row.status != "paused"), None)}
        found |= {"runs": {row.run_id: row.status for row in going}, "queued": [row.run_id for row in queued]}
        found |= {"disk_full": full or None}
        console.document(found | ({"login": code} if login else {}))
        return
    console.line(f"thinwire {about.get('version')}, process {about['pid']}, in {about.get('home')}")
    urls = f"TLS; {', '.join(about.get('urls') or ())}" if about.get("pin") else "this machine only"
    console.line(f"api      {about['listen']} ({urls})")
    console.line(f"web      {code or about.get('dashboard_url') or 'none (--no-dashboard)'}")
    if about.get("control_address"):
        console.line(f"flower   {about['control_address']} for flwr run")
    named = ", ".join(f"{name} (last seen {state.last_seen(info)})" for name, info in heard.items())
    console.line(f"devices  {len(online)} of {len(approved)} online{': ' + named if online else ''}")
    if waiting:
        console.line(
            f"         waiting to be approved: {', '.join(waiting)}; look at {command_line('devices list', home)}"
        )
    if full:
        console.line(f"disk     {full}")
    for row in (*going, *queued):
        console.line(f"run      {row.run_id} {behind(row, line) or standing(row)}")


@app.command()
def dashboard(
    listen: Annotated[
        str, typer.Option(envvar="THINWIRE_DASHBOARD", metavar="HOST:PORT", help="address of the dashboard")
    ] = "127.0.0.1:8080",
    home: Home = None,
) -> None:
    """Serve the dashboard as a process of its own, with or without an aggregator, until told to stop.

    An aggregator that runs in the same state directory uses it, and does not end it.
    """
    from thinwire.cli.aggregator.dashboard import serve_standalone
    from thinwire.cli.params import Address

    address = Address.parse(listen, "--listen")
    address.require_loopback("--listen")
    raise typer.Exit(serve_standalone(address, home))


@app.command()
def logs(follow: Follow = False, count: Lines = 50, home: Home = None) -> None:
    """Show the aggregator's log: devices, runs and failures as they happened, also while it is down."""
    from thinwire.cli.aggregator.serve import AGGREGATOR_LOG
    from thinwire.cli.local_state import aggregator_home, require_home
    from thinwire.core.log_file import last_lines, new_lines

    require_home(home)
    folder = aggregator_home(home).root
    for line in last_lines(folder, count, AGGREGATOR_LOG):
        console.line(line)
    console.note(f"from {folder / AGGREGATOR_LOG}")
    for line in new_lines(folder, file_name=AGGREGATOR_LOG) if follow else ():
        console.line(line)


@app.command()
def config(what: ConfigAction = None, json: Json = False, home: Home = None) -> None:
    """Show the aggregator's settings, and where each value came from: aggregator.toml, or the default."""
    from thinwire.cli.local_state import aggregator_home, require_home
    from thinwire.core.owner_file import AGGREGATOR_FILE, aggregator_file, settings_of

    require_home(home)
    place = aggregator_home(home).root.parent
    found = aggregator_file(place)
    rows = [
        {"key": key, "value": value, "from": AGGREGATOR_FILE if is_given else "default"}
        for key, value, is_given in settings_of(found)
    ]
    if json:
        console.document({"file": str(place / AGGREGATOR_FILE), "settings": rows})
        return
    console.line(f"{place / AGGREGATOR_FILE}{'' if (place / AGGREGATOR_FILE).exists() else ' (there is none)'}")
    console.table(("key", "value", "from"), [(row["key"], _setting(row["value"]), row["from"]) for row in rows])
    console.note("read at the start of the aggregator; allow, max_upload_mb and alerts whenever they are used")


def _setting(value: Any) -> str:
    """Return a setting as the file has it; one without a value is "not set".

    >>> _setting(4), _setting(()), _setting("none"), _setting(""), _setting(None)
    ('4', '[]', '"none"', '""', 'not set')
    """
    from json import dumps

    return "not set" if value is None else dumps(value)


@app.command()
def stop(home: Home = None) -> None:
    """End the service; runs in progress go on when it is started again."""
    from thinwire.cli.local_state import alive, open_store, operator, require_alive
    from thinwire.core.errors import ThinwireError
    from thinwire.core.signals import until

    about = require_alive(home)

    def gone() -> bool:
        now = alive(home)
        return now is None or now.get("pid") != about["pid"]

    with open_store(home, read_only=False) as store:
        store.commands.add("stop-service", who=operator())
    if not until(gone, END_S):
        raise ThinwireError(
            f"the aggregator (process {about['pid']}) has not ended within {END_S:g} s", hint=f"kill {about['pid']}"
        )
    console.line("stopped")
    if note := aggregator_service.comes_back():
        console.note(note)


@app.command()
def doctor(json: Json = False, home: Home = None) -> None:
    """Check state directory, disk, store, clock, devices, device API, certificate and dashboard; print what to do
    where one is wrong.
    """
    from thinwire.cli.doctor.aggregator import examine
    from thinwire.cli.doctor.checks import tell
    from thinwire.cli.local_state import alive
    from thinwire.core.statedir import find_home

    raise typer.Exit(tell(examine(find_home(home), alive(home), home), json))


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="backup file to write (tar)")],
    json: Json = False,
    home: Home = None,
) -> None:
    """Write database, models, pending replies, and the CA and keys of the device API into one file; also while it
    serves.
    """
    from thinwire import __version__
    from thinwire.cli.aggregator.tls import own_files
    from thinwire.core.statedir import AggregatorHome, find_home
    from thinwire.store.backup import back_up

    place = AggregatorHome(find_home(home) / "aggregator")
    manifest = back_up(place, file.absolute(), __version__)
    written, elsewhere = file.stat().st_size, [str(path) for path in own_files(place.root)]
    if json:
        found = {
            "file": str(file),
            "bytes": written,
            "files": len(manifest.files),
            "backed_up_at": manifest.backed_up_at,
        }
        console.document(found | {"not_in_it": elsewhere})
        return
    console.line(f"{file}: {len(manifest.files)} files, {formatting.size(written)}")
    console.note(
        "it holds the device API's keys: whoever has it can act as this aggregator. Keep it as safe as the original"
    )
    if elsewhere:
        console.note(
            f"not in it, since they are yours (--cert, --key, --ca): {', '.join(elsewhere)}; back them up there"
        )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="backup file to read")],
    force: Annotated[bool, typer.Option("--force", help="move the present state aside")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Replace an aggregator's state by a backup, after checking every byte of it."""
    from thinwire.cli.local_state import command_line
    from thinwire.core.start_options import start_command
    from thinwire.core.statedir import AggregatorHome, find_home
    from thinwire.server.run_end import end_restored
    from thinwire.store.backup import restore as put_back

    place = AggregatorHome(find_home(home) / "aggregator")
    restored = put_back(file.absolute(), place, force, end_restored)
    backed_up_at, replaced = restored.manifest.backed_up_at, restored.replaced
    if json:
        moved = str(replaced) if replaced else None
        console.document(
            {
                "home": str(place.root.parent),
                "backed_up_at": backed_up_at,
                "replaced": moved,
                "privacy": restored.reservations,
            }
        )
        return
    joined = not replaced and any((place.root / "tls").glob("*.ca.pem"))  # a backup has the CA and not the options
    start = command_line(start_command(replaced or place.root, reachable=joined), home)
    console.line(f"{place.root} is as it was {console.ago(backed_up_at)}; go on: {start}")
    if replaced:
        console.line(f"what was there is now {replaced}")
    if restored.reservations or restored.private_runs:
        ledger = command_line("privacy ledger", home)
        console.note(f"private rounds wait until a person has settled what was spent since: {ledger}")
    console.note(
        f"devices that were approved or revoked since then are as they were, too: {command_line('devices list', home)}"
    )
    console.note(
        "users, tokens and passwords are those of the backup, also what was disabled, revoked or changed since then, "
        f"and everybody has to log in again: {command_line('aggregator users list', home)}"
    )
