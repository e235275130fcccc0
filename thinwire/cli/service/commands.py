"""`thinwire aggregator service` and `thinwire client service`: keep a start running with systemd.

A service starts again after a restart of its machine. It runs the same words in the same folder as the last start, or
the words given to `service install`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.local_state import Typed
from thinwire.cli.params import ClientName, Home, Print, System

if TYPE_CHECKING:
    from thinwire.cli.service.systemd import Systemd, Unit

aggregator_app = typer.Typer(name="service", help="Keep the aggregator going with systemd.", no_args_is_help=True)

NAME = "thinwire-aggregator"
TAKES_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
AggregatorOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[START OPTIONS]", help="as for `aggregator start`; default: those of the last one"),
]


@aggregator_app.command("install", context_settings=TAKES_REST)
def install_aggregator(
    options: AggregatorOptions = None, printed: Print = False, system: System = False, home: Home = None
) -> None:
    """Keep `aggregator start` going with the words that it was last started with, or those given here."""
    from thinwire.cli.local_state import understood
    from thinwire.cli.params import Address
    from thinwire.cli.service.systemd import Systemd
    from thinwire.core.errors import UsageError

    at, manager = home_of(home, system), Systemd(system)
    state = at / "aggregator"
    typed = words_of(options or (), state)
    meant = understood("aggregator", "start", typed.words)
    if meant["background"]:
        raise UsageError("a service runs in the foreground of its unit", hint="drop --background")
    if not meant["no_page"]:
        Address.parse(meant["page"], "--page").require_loopback("--page")
    low = 0 < Address.parse(meant["listen"], "--listen").port < 1024
    unit = unit_of(NAME, "Thinwire aggregator", "aggregator", typed, state, at, manager, low_port=low)
    install_unit(unit, manager, state / "lock", printed)


@aggregator_app.command("uninstall")
def uninstall_aggregator(system: System = False) -> None:
    """Stop the service and take its unit away; runs, devices and keys stay."""
    from thinwire.cli.service.systemd import Systemd

    remove_unit(NAME, Systemd(system))


def comes_back() -> str:
    """Return the sentence for a stopped aggregator that systemd starts again; "" without a service."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{NAME}.service")]
    return (
        f"it is a service, which systemd starts again; to keep it down: {found[0].command} stop {NAME}" if found else ""
    )


client_app = typer.Typer(name="service", help="Keep a client going with systemd.", no_args_is_help=True)

CLIENT_TAKES_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
ClientOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[START OPTIONS]", help="as for `client start`; default: those of the last one"),
]


@client_app.command("install", context_settings=CLIENT_TAKES_REST)
def install_client(
    options: ClientOptions = None,
    name: ClientName = None,
    printed: Print = False,
    system: System = False,
    home: Home = None,
) -> None:
    """Keep `client start` going with the words that it was last started with, or those given here."""
    from thinwire.cli.client.start import chosen, trusted
    from thinwire.cli.local_state import understood
    from thinwire.cli.service.systemd import Systemd
    from thinwire.core.errors import UsageError

    at = home_of(home, system)
    called = chosen(name, at)
    state = at / "clients" / called
    typed = words_of(options or (), state)
    meant = understood("client", "start", typed.words)
    if meant["once"]:
        raise UsageError(
            "a service goes on", why="--once ends it, and systemd would start it again", hint="drop --once"
        )
    trusted(meant["aggregator"], state)
    if meant["name"] != called:
        typed = typed.with_option("--name", called)
    unit = unit_of(_unit(called), f"Thinwire client {called}", "client", typed, state, at, Systemd(system))
    install_unit(unit, Systemd(system), state / "lock", printed)


@client_app.command("uninstall")
def uninstall_client(name: ClientName = None, system: System = False, home: Home = None) -> None:
    """Stop the service and take its unit away; key, residuals and outbox stay."""
    from thinwire.cli.client.start import chosen
    from thinwire.cli.service.systemd import Systemd

    remove_unit(_unit(chosen(name, home_of(home, system))), Systemd(system))


def journal(name: str) -> str:
    """Return the command that shows the journal of a client's service; "" without a service."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{_unit(name)}.service")]
    return f"{found[0].journal} -u {_unit(name)} -f" if found else ""


def service(name: str) -> str:
    """Return the command that removes a client's service; "" without a service."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{_unit(name)}.service")]
    return f"thinwire client service uninstall --name {name}{' --system' * found[0].system}" if found else ""


def _unit(name: str) -> str:
    """Return the name of a client's unit."""
    return f"thinwire-client-{name}"


KEPT = ("PYTHONPATH", "THINWIRE_LISTEN", "THINWIRE_PAGE", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")


def install_unit(unit: Unit, manager: Systemd, lock: Path, printed: bool) -> None:
    """Print the unit if `printed`, else install and start it; refuse while a start by hand holds `lock`."""
    from thinwire.core.errors import ThinwireError
    from thinwire.core.statedir import holder, private_folder

    if printed:
        console.line(unit.text().rstrip())
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
    console.line(f"stopped and taken away: {path}; the state folder stays as it is")


def unit_of(
    name: str, says: str, noun: str, typed: Typed, state: Path, home: Path, manager: Systemd, **more: Any
) -> Unit:
    """Return the unit that runs `thinwire NOUN start` with the words of `typed`."""
    from thinwire.cli.service.systemd import Unit

    return Unit(
        name, says, (*_program(), noun, "start", *typed.words), typed.folder, state,
        {"THINWIRE_HOME": str(home), **_environment(os.environ)}, _owner(home) if manager.system else "", **more,
    )  # fmt: skip


def words_of(given: Sequence[str], place: Path) -> Typed:
    """Return the words given to `service install`, else those of the last start in `place`."""
    return Typed(tuple(given), Path.cwd()) if given else Typed.remembered(place) or Typed((), Path.cwd())


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
