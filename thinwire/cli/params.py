"""Options that several commands share, and the parsers of addresses and durations.

Every shared option has one meaning, default and help text. Addresses are typed as HOST:PORT for a listener and as a URL
for an aggregator; durations as 90s, 15m, 24h or 7d.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from thinwire.core.net import MAX_PORT, bind, host_port, is_loopback

if TYPE_CHECKING:
    from thinwire.core import RunPlan


def _noted(data: Path | None) -> Path | None:
    """Return the path of `--data`, with a note if it is not there: a task may make it, or train on other data."""
    if data is not None and not data.exists():
        from thinwire.cli import console

        console.note(f"there is no {data} (--data); the task gets this path all the same")
    return data


Home: TypeAlias = Annotated[
    Path | None, typer.Option("--home", help="state directory; default: THINWIRE_HOME, else the XDG one")
]
ClientName: TypeAlias = Annotated[
    str | None, typer.Option("--name", help="device's name; default: the only one here, else the host name")
]
NewName: TypeAlias = Annotated[str | None, typer.Option("--name", help="name of this device; default: the host name")]
OneName: TypeAlias = Annotated[str | None, typer.Option("--name", help="client's name; default: all clients")]
Print: TypeAlias = Annotated[bool, typer.Option("--print", help="print the unit, change nothing")]
System: TypeAlias = Annotated[bool, typer.Option("--system", help="service of the machine, as root")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Follow: TypeAlias = Annotated[bool, typer.Option("--follow", "-f", help="follow new lines until Ctrl-C")]
Lines: TypeAlias = Annotated[int, typer.Option("--lines", "-n", min=0, help="number of lines to show")]
Task: TypeAlias = Annotated[
    str | None, typer.Option("--task", metavar="NAME=MODULE", help="a task's code: a dotted name or a .py file")
]
Sets: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="change one key of the plan; repeatable")
]
Data: TypeAlias = Annotated[
    Path | None, typer.Option("--data", help="path of the data; the task gets it as client.data", callback=_noted)
]
PlanFile: TypeAlias = Annotated[Path, typer.Argument(metavar="PLAN", help="plan in TOML; thinwire init writes one")]
Tags: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="+TAG | -TAG", help="tags to add (+) and to remove (-)")
]
TAG_SETTINGS = {"ignore_unknown_options": True}  # `-old` is a tag to remove, and no option
Anyway: TypeAlias = Annotated[
    bool, typer.Option("--yes", help="submit it with fewer known devices than it wants, or none with its task")
]
RunId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help='id of a run, its unique beginning, or "latest"')]


def overrides(sets: list[str] | None) -> dict[str, str]:
    """Parse the `--set SECTION.KEY=VALUE` options into plan overrides by key; a word without "=" is a usage error."""
    found = {}
    for one in sets or []:
        place, equals, value = one.partition("=")
        if not equals:
            raise typer.BadParameter(f"{one!r} has no value: --set section.key=value, as in --set local.lr=0.1")
        found[place.strip()] = value.strip()
    return found


def tag_changes(tags: list[str] | None, command: str) -> tuple[list[str], list[str]]:
    """Return the tags to add and to remove; `UsageError` for a word without a sign, in which `command` changes tags."""
    from thinwire.core.errors import UsageError

    add, remove = list[str](), list[str]()
    for word in tags or []:
        if not word.startswith(("+", "-")):
            why, hint = "a tag is added with + and removed with -", f"{command} +{word}"
            raise UsageError(f"{word!r} says neither to add nor to remove", why=why, hint=hint)
        (add if word.startswith("+") else remove).append(word[1:])
    return add, remove


def read_file(path: Path, most: int, hint: str) -> bytes:
    """Return the first `most` bytes of a file that an option names, and one more if it is larger.

    `UsageError` with this hint if it is not readable.
    """
    from thinwire.core.errors import UsageError

    try:
        with open(path, "rb") as file:
            return file.read(most + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}", why=error.strerror or str(error), hint=hint) from error


def require_new_file(out: Path) -> None:
    """Raise `UsageError` unless the file of `--out` does not exist and its folder does."""
    from thinwire.core.errors import UsageError

    if not out.absolute().parent.is_dir():
        raise UsageError(
            f"there is no folder {out.parent}", why=f"{out} goes into it", hint="--out in one that is there"
        )
    if out.exists():
        raise UsageError(
            f"{out} is there already", why="nothing is overwritten", hint="another name, or remove it first"
        )


def checked_plan(file: Path, sets: list[str] | None) -> RunPlan:
    """Load a plan with the `--set` options; raise all its refusals as one error if it cannot run."""
    from thinwire.aggregation import codecs
    from thinwire.core import RunPlan
    from thinwire.core.plan_rules import as_error

    plan = RunPlan.load(file, overrides(sets), codecs=codecs)
    if refused := plan.check(codecs):
        raise as_error(refused, str(file))
    return plan


PORTS = f"a port is 1 to {MAX_PORT}; 0 takes one that is free"


@dataclass(frozen=True)
class Address:
    """The address of a listener; with port 0 the system chooses a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, option: str) -> Address:
        """Parse HOST:PORT, with [] around an IPv6 host; `UsageError` names `option`."""
        from thinwire.core.errors import UsageError

        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.lstrip("-").isdecimal():
            why = "an address of this machine and a port, with : between them"
            raise UsageError(f"{option} {text!r} is not HOST:PORT", why=why, hint=f"{option} 127.0.0.1:9090")
        if port.startswith("-") or int(port) > MAX_PORT:
            raise UsageError(
                f"{option} {text!r} has no port of that number", why=PORTS, hint=f"{option} {host}:9090, for instance"
            )
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    @property
    def url(self) -> str:
        """Return the address as an http URL."""
        return f"http://{self}"

    @property
    def is_loopback(self) -> bool:
        """Return True if only this machine can reach the host."""
        return is_loopback(self.host)

    def require_loopback(self, option: str) -> None:
        """Raise `UsageError` unless the address is loopback: only an aggregator issues the dashboard a certificate."""
        from thinwire.core.errors import UsageError

        if not self.is_loopback:
            raise UsageError(
                f"{option} {self} would be open to other machines",
                why="it needs TLS there, and only the aggregator that starts it issues its certificate",
                hint=f"{option} 127.0.0.1:{self.port}, and elsewhere: ssh -L {self.port}:127.0.0.1:{self.port} HOST",
            )

    def overlaps(self, other: Address) -> bool:
        """Return True if two listeners cannot use both addresses at once."""
        anywhere = {self.host, other.host} & {"0.0.0.0", "::"}
        return self.port == other.port != 0 and bool(anywhere or self.host == other.host)

    def require_free(self, option: str) -> Address:
        """Return this address with a port that is free now; `Unreachable` if binding fails."""
        with bind(self.host, self.port, option) as tried:
            return Address(self.host, tried.getsockname()[1])


def aggregator_url(text: str) -> str:
    """Parse `--aggregator` into a URL with its scheme; HOST:PORT alone means http."""
    from thinwire.core.errors import UsageError

    url = text.rstrip("/") if "://" in text else f"http://{text.rstrip('/')}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or rest.startswith(":"):
        why = "https://HOST:PORT is one, and on its own machine http://127.0.0.1:PORT"
        raise UsageError(f"--aggregator {text!r} is not an address", why=why, hint="--aggregator http://127.0.0.1:9090")
    return url


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 24 * 3600.0}
_TEXT = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


def parse_duration(text: str, option: str) -> float:
    """Parse a duration such as 90s, 15m, 24h or 7d into seconds; `UsageError` names `option`.

    >>> parse_duration("24h", "--expires"), parse_duration("1.5m", "--expires")
    (86400.0, 90.0)
    """
    from thinwire.core.errors import UsageError

    if (found := _TEXT.fullmatch(text.strip().lower())) is None:
        why = "it reads a number and s, m, h or d"
        raise UsageError(f"{option} {text!r} is not a duration", why=why, hint=f"{option} 24h, or 90s, 15m, 7d")
    return float(found[1]) * UNITS[found[2]]
