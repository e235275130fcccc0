"""The dashboard's settings: its address, the database that it shows, its names, and the state of the aggregator."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinwire.core.clock import is_starting
from thinwire.core.errors import PlanError, Unreachable, UsageError
from thinwire.core.net import host_port, is_loopback
from thinwire.core.owner_file import AggregatorFile, aggregator_file
from thinwire.core.start_options import reachable_command, start_command
from thinwire.core.statedir import AggregatorHome, default_home, living_holder

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Settings:
    """Holds the settings of one dashboard process.

    `names` are further names that it may be called. Forwarded headers count from the address `proxy` only.
    """

    database: str
    host: str = "127.0.0.1"
    port: int = 0
    lock: Path | None = None
    names: tuple[str, ...] = ()
    tls: bool = False
    proxy: str = ""

    @property
    def host_names(self) -> frozenset[str]:
        """Return the names that a Host header may have; any other one may be rebound to this address and is refused."""
        return LOOPBACK_NAMES | {self.host} | {name.lower() for name in self.names}

    @property
    def cookie(self) -> str:
        """Return the name of the session cookie. Cookies ignore ports, so two dashboards on one host need two names."""
        return f"__Host-thinwire-{self.port}" if self.tls else f"thinwire-{self.port}"

    @property
    def url(self) -> str:
        """Return the address to type into a browser: with TLS by the first name."""
        host = self.names[0] if self.tls and self.names else self.host
        return f"{'https' if self.tls else 'http'}://{host_port(host, self.port)}"

    @property
    def home_option(self) -> str:
        """Return the `--home` option for shown commands; "" if they find the state directory without it."""
        return home_option(self.lock)

    @property
    def start_command(self) -> str:
        """Return the command that starts the aggregator as it was started last, with the same addresses."""
        return f"thinwire {start_command(self.lock and self.lock.parent)}{self.home_option}"

    @property
    def reachable_command(self) -> str:
        """Return the command that starts it where other machines reach its device API."""
        return reachable_command(self.lock and self.lock.parent, self.home_option)


def home_option(lock: Path | None) -> str:
    """Return the `--home` option of the state directory with this lock; "" if commands find it without the option."""
    if lock is None or (home := lock.absolute().parent.parent) == default_home():
        return ""
    return f" --home {shlex.quote(str(home))}"


def listen_address(text: str, tls: bool = False, lock: Path | None = None) -> tuple[str, int]:
    """Parse HOST:PORT; an address beyond this machine's loopback is refused without TLS.

    The refusal names the command that starts the aggregator with this `lock` and such a dashboard.

    >>> listen_address("127.0.0.1:8080"), listen_address("[::1]:0")
    (('127.0.0.1', 8080), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        why = "it reads HOST:PORT; a port is 1 to 65535, and 0 takes one that is free"
        raise UsageError(f"{text!r} is no address to listen on", why=why, hint="127.0.0.1:8080, for instance")
    if not tls and not is_loopback(host):
        start = f"thinwire {start_command(lock and lock.parent, dashboard=text)}{home_option(lock)}"
        raise UsageError(
            f"the dashboard does not listen on {host}",
            why="it has no certificate, and whoever reads along could take over the session",
            hint=f"{start}, which issues one; or ssh -L 8080:127.0.0.1:8080 HOST",
        )
    return host, int(port)


def reach_options(names: Sequence[str], proxy: str, certificate: Path | None) -> list[str]:
    """Return the options by which a running dashboard stays if it was started with the same; it notes them in its lock.

    >>> reach_options(["agg"], "", Path("leaf.pem"))
    ['agg', '', 'leaf.pem']
    """
    return [*names, proxy, str(certificate or "")]


State = Literal["running", "gone", "unknown"]


def lock_beside(url: str) -> Path | None:
    """Return the lock of the state directory that holds this database; None for a database server or without a lock."""
    home = AggregatorHome(Path(url.removeprefix("sqlite:///")).parent)
    return home.lock if url == f"sqlite:///{home.database}" and home.lock.exists() else None


def may_serve(lock: Path | None) -> bool:
    """Return True unless no aggregator holds the lock; one that is starting may listen already."""
    return lock is None or living_holder(lock) is not None


def aggregator(lock: Path | None) -> tuple[State, dict[str, Any]]:
    """Return the aggregator's state and its description of itself (pid, addresses).

    The state is "unknown" without a lock to look at. An aggregator that is starting counts as "gone".
    """
    if lock is None:
        return "unknown", {}
    found = living_holder(lock)
    return ("gone", {}) if found is None or is_starting(found) else ("running", found)


def owner_file(home: Path) -> AggregatorFile:
    """Return what `aggregator.toml` says; raise `Unreachable` if it is not valid, without what the file has."""
    try:
        return aggregator_file(home)
    except PlanError as error:
        why = "someone may be editing it; on its machine the command shows what is wrong"
        raise Unreachable("aggregator.toml is not valid now", why, "thinwire aggregator config") from error
