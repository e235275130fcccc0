"""`thinwire client service`: a client that is there after a restart of its device."""

from __future__ import annotations

from typing import Annotated

import typer

from thinwire.cli.options import ClientName, Home, Print, System

app = typer.Typer(name="service", help="Keep a client going with systemd.", no_args_is_help=True)

TAKES_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
Rest = Annotated[
    list[str] | None,
    typer.Argument(metavar="[START OPTIONS]", help="as for `client start`; default: those of the last one"),
]


@app.command("install", context_settings=TAKES_REST)
def install(
    options: Rest = None, name: ClientName = None, printed: Print = False, system: System = False, home: Home = None
) -> None:
    """Keep `client start` going with the words that it was last started with, or those given here."""
    from thinwire.cli.client.joined import chosen, trusted
    from thinwire.cli.service import installing
    from thinwire.cli.service.systemd import Systemd
    from thinwire.cli.service.typed import understood
    from thinwire.core.errors import UsageError

    at = installing.home_of(home, system)
    called = chosen(name, at)
    state = at / "clients" / called
    typed = installing.words_of(options or (), state)
    meant = understood("client", "start", typed.words)
    if meant["once"]:
        raise UsageError(
            "a service goes on", why="--once ends it, and systemd would start it again", hint="drop --once"
        )
    trusted(meant["aggregator"], state)
    if meant["name"] != called:
        typed = typed.with_option("--name", called)
    unit = installing.unit_of(_unit(called), f"Thinwire client {called}", "client", typed, state, at, Systemd(system))
    installing.install(unit, Systemd(system), state / "lock", printed)


@app.command("uninstall")
def uninstall(name: ClientName = None, system: System = False, home: Home = None) -> None:
    """Stop the service and take its unit away; key, residuals and outbox stay."""
    from thinwire.cli.client.joined import chosen
    from thinwire.cli.service import installing
    from thinwire.cli.service.systemd import Systemd

    installing.uninstall(_unit(chosen(name, installing.home_of(home, system))), Systemd(system))


def journal(name: str) -> str:
    """The line that shows a client's journal, where a service was installed for it; else ""."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{_unit(name)}.service")]
    return f"{found[0].journal} -u {_unit(name)} -f" if found else ""


def service(name: str) -> str:
    """The line that takes a client's service away, where one was installed; else ""."""
    from thinwire.cli.service.systemd import Systemd

    found = [one for one in (Systemd(), Systemd(system=True)) if one.has(f"{_unit(name)}.service")]
    return f"thinwire client service uninstall --name {name}{' --system' * found[0].system}" if found else ""


def _unit(name: str) -> str:
    return f"thinwire-client-{name}"
