"""`thinwire aggregator service`: an aggregator that is there after a restart of its host."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.options import Home, Print, System

app = typer.Typer(name="service", help="Keep the aggregator going with systemd.", no_args_is_help=True)

NAME = "thinwire-aggregator"
TAKES_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
Rest = Annotated[
    list[str] | None,
    typer.Argument(metavar="[START OPTIONS]", help="as for `aggregator start`; default: those of the last one"),
]


@app.command("install", context_settings=TAKES_REST)
def install(options: Rest = None, printed: Print = False, system: System = False, home: Home = None) -> None:
    """Keep `aggregator start` going with the words that it was last started with, or those given here."""
    from thinwire.cli.addresses import Address
    from thinwire.cli.service import installing
    from thinwire.cli.service.systemd import Systemd
    from thinwire.cli.service.typed import understood
    from thinwire.core.errors import UsageError

    at, manager = installing.home_of(home, system), Systemd(system)
    state = at / "aggregator"
    typed = installing.words_of(options or (), state)
    meant = understood("aggregator", "start", typed.words)
    if meant["background"]:
        raise UsageError("a service runs in the foreground of its unit", hint="drop --background")
    if not meant["no_page"]:
        Address.parse(meant["page"], "--page").require_loopback("--page")
    low = 0 < Address.parse(meant["listen"], "--listen").port < 1024
    unit = installing.unit_of(NAME, "Thinwire aggregator", "aggregator", typed, state, at, manager, low_port=low)
    installing.install(unit, manager, state / "lock", printed)


@app.command("uninstall")
def uninstall(system: System = False) -> None:
    """Stop the service and take its unit away; runs, devices and keys stay."""
    from thinwire.cli.service import installing
    from thinwire.cli.service.systemd import Systemd

    installing.uninstall(NAME, Systemd(system))


def comes_back() -> str:
    """What to say after a stop, where systemd starts it again; else ""."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{NAME}.service")]
    return (
        f"it is a service, which systemd starts again; to keep it down: {found[0].command} stop {NAME}" if found else ""
    )
