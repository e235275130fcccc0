"""`thinwire aggregator service` and `thinwire client service`: keep a start running with systemd.

A service starts again after a restart of its machine. It has the same options and the same folder as the last
start, or those given to `service install`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.local_state import choose_client, parsed_options, trusted
from thinwire.cli.params import ClientName, Home, Print, System
from thinwire.core.start_options import StartOptions

if TYPE_CHECKING:
    from thinwire.cli.systemd import Systemd, Unit

aggregator_app = typer.Typer(name="service", help="The aggregator as a systemd service.", no_args_is_help=True)

NAME, DASHBOARD = "thinwire-aggregator", "thinwire-dashboard"
TAKES_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
GivenOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[START OPTIONS]", help="options of the start command; default: those of its last start"),
]


@aggregator_app.command("install", context_settings=TAKES_REST)
def install_aggregator(
    options: GivenOptions = None, printed: Print = False, system: System = False, home: Home = None
) -> None:
    """Install `aggregator start` as a systemd service, with these options or those of its last start.

    The dashboard gets a service of its own, so that it goes on while the aggregator is down; none with --no-dashboard.
    Beyond loopback, or with names or a proxy, the aggregator's service starts it, because it issues its certificate.
    """
    from thinwire.cli.params import Address
    from thinwire.cli.systemd import Systemd
    from thinwire.core.errors import UsageError

    at, manager = home_of(home, system), Systemd(system)
    state = at / "aggregator"
    start = options_of("aggregator", options or (), state)
    if "background" in start.options:
        raise UsageError("a service runs in the foreground of its unit", hint="drop --background")
    at_dashboard = Address.parse(start.options.get("dashboard", "127.0.0.1:8080"), "--dashboard")
    by_aggregator = not at_dashboard.is_loopback or {"dashboard_name", "proxy"} & start.options.keys()
    shown = "no_dashboard" not in start.options and not by_aggregator
    low = "listen" in start.options and 0 < Address.parse(start.options["listen"], "--listen").port < 1024
    unit = unit_of(NAME, "Thinwire aggregator", "aggregator start", start, state, at, manager, low_port=low)
    install_unit(unit, manager, state / "lock", printed)
    if shown:
        page = replace(start, options={"listen": start.options["dashboard"]} if "dashboard" in start.options else {})
        own = unit_of(DASHBOARD, "Thinwire dashboard", "aggregator dashboard", page, state, at, manager)
        install_unit(own, manager, state / "dashboard.lock", printed)


@aggregator_app.command("uninstall")
def uninstall_aggregator(system: System = False) -> None:
    """Stop the services of aggregator and dashboard and remove their units; runs, devices and keys stay."""
    from thinwire.cli.systemd import Systemd

    manager = Systemd(system)
    remove_unit(NAME, manager)
    if manager.has(f"{DASHBOARD}.service"):
        remove_unit(DASHBOARD, manager)


def comes_back() -> str:
    """Return the sentence for a stopped aggregator that systemd starts again; "" without a service."""
    manager = _manager_of(NAME)
    return (
        f"it is a service, which systemd starts again; to keep it down: {manager.command} stop {NAME}"
        if manager
        else ""
    )


client_app = typer.Typer(name="service", help="A client as a systemd service.", no_args_is_help=True)


@client_app.command("install", context_settings=TAKES_REST)
def install_client(
    options: GivenOptions = None,
    name: ClientName = None,
    printed: Print = False,
    system: System = False,
    home: Home = None,
) -> None:
    """Install `client start` as a systemd service, with these options or those of its last start."""
    from thinwire.cli.systemd import Systemd
    from thinwire.core.errors import UsageError

    at = home_of(home, system)
    called = choose_client(name, at)
    state = at / "clients" / called
    start = options_of("client", options or (), state)
    if "once" in start.options:
        raise UsageError(
            "a service goes on", why="--once ends it, and systemd would start it again", hint="drop --once"
        )
    trusted(start.options.get("aggregator"), state)
    start = replace(start, options={**start.options, "name": called})
    unit = unit_of(_unit(called), f"Thinwire client {called}", "client start", start, state, at, Systemd(system))
    install_unit(unit, Systemd(system), state / "lock", printed)


@client_app.command("uninstall")
def uninstall_client(name: ClientName = None, system: System = False, home: Home = None) -> None:
    """Stop the service and remove its unit; key, residuals and outbox stay."""
    from thinwire.cli.systemd import Systemd

    remove_unit(_unit(choose_client(name, home_of(home, system))), Systemd(system))


def journal(name: str) -> str:
    """Return the command that shows the journal of a client's service; "" without a service."""
    manager = _manager_of(_unit(name))
    return f"{manager.journal} -u {_unit(name)} -f" if manager else ""


def service(name: str) -> str:
    """Return the command that removes a client's service; "" without a service."""
    manager = _manager_of(_unit(name))
    return f"thinwire client service uninstall --name {name}{' --system' * manager.system}" if manager else ""


def _manager_of(unit: str) -> Systemd | None:
    """Return the service manager that has this unit: the user's before the machine's; None without one."""
    from thinwire.cli.systemd import Systemd

    return next((manager for manager in (Systemd(), Systemd(system=True)) if manager.has(f"{unit}.service")), None)


def _unit(name: str) -> str:
    """Return the name of a client's unit."""
    return f"thinwire-client-{name}"


KEPT = ("PYTHONPATH", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")


def install_unit(unit: Unit, manager: Systemd, lock: Path, printed: bool) -> None:
    """Print the unit if `printed`, else install and start it; refuse while a start by hand holds `lock`."""
    from thinwire.core.errors import ThinwireError
    from thinwire.core.statedir import holder, private_folder

    if printed:
        console.line(f"# {unit.file}\n{unit.text().rstrip()}")
        return
    running = holder(lock)
    if running and not manager.has(unit.file):
        raise ThinwireError(
            f"{unit.says} is running already, as process {running.get('pid')}",
            why="the service would find its folder held",
            hint=f"end it first: kill {running.get('pid')}",
        )
    manager.require()
    private_folder(unit.state)
    path = manager.install(unit.file, unit.text())
    console.line(f"service  {unit.name}, started; it is started again whenever it ends, but not after 2, 3, 5 or 8")
    console.line(f"unit     {path}")
    console.line(f"command  {' '.join(unit.command)}")
    console.line(f"look     {manager.command} status {unit.name}; {manager.journal} -u {unit.name} -f")
    if not manager.system:
        console.line("boot     a user's services start at login; to have it at boot: loginctl enable-linger")


def remove_unit(name: str, manager: Systemd) -> None:
    """Stop and remove the unit `name`."""
    path = manager.uninstall(f"{name}.service")
    console.line(f"stopped and taken away: {path}; the state directory stays as it is")


def unit_of(
    name: str, says: str, command: str, start: StartOptions, state: Path, home: Path, manager: Systemd, **more: Any
) -> Unit:
    """Return the unit that runs `thinwire COMMAND` with the options of `start`, in its folder."""
    from thinwire.cli.systemd import Unit

    return Unit(
        name, says, (*_program(), *command.split(), *start.words()), start.folder, state,
        {"THINWIRE_HOME": str(home), **_environment(os.environ)}, _owner(home) if manager.system else "", **more,
    )  # fmt: skip


def options_of(noun: str, words: Sequence[str], place: Path) -> StartOptions:
    """Return the options given to `service install` as words, else those of the last start in `place`."""
    return (StartOptions.load(place) if not words else None) or parsed_options(noun, words)


def home_of(home: Path | None, system: bool) -> Path:
    """Return the state directory; with `system` under sudo it is that of the user who typed the command."""
    from thinwire.core.statedir import find_home

    user = os.environ.get("SUDO_USER")
    if system and user and not home and not os.environ.get("THINWIRE_HOME"):
        return Path(pwd.getpwnam(user).pw_dir) / ".local" / "state" / "thinwire"
    return find_home(home)


def _program() -> tuple[str, ...]:
    """Return the command that runs thinwire in this environment."""
    beside = shutil.which("thinwire", path=os.path.dirname(sys.executable))
    return (beside,) if beside else (sys.executable, "-m", "thinwire.cli")


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `KEPT` on which the words of a start depend.

    A value with @ may be an address with a password and is left out, because every user may read a unit.
    """
    return {name: environ[name] for name in KEPT if environ.get(name) and "@" not in environ[name]}


def _owner(home: Path) -> str:
    """Return the owner of the state directory, or of its nearest parent that exists."""
    there = next(path for path in (home, *home.parents) if path.exists())
    return pwd.getpwuid(there.stat().st_uid).pw_name
