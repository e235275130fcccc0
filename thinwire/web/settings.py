"""The dashboard's settings: its address, the database that it shows, its names, and the state of the aggregator."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from thinwire.core.clock import is_starting
from thinwire.core.errors import UsageError
from thinwire.core.statedir import AggregatorHome, default_home, holder

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Settings:
    """The settings of one dashboard process.

    `root_path` is the path under which a proxy serves it ("" or "/thinwire"). `origins` are further addresses by which
    browsers reach it. `token` is for HTTP without a browser (Authorization: Bearer).
    """

    database: str
    host: str = "127.0.0.1"
    port: int = 0
    root_path: str = ""
    origins: frozenset[str] = frozenset()
    lock: Path | None = None
    token: str = field(default="", repr=False)

    @property
    def host_names(self) -> frozenset[str]:
        """Return the names that a Host header may have; any other one may be rebound to this address and is refused."""
        return LOOPBACK_NAMES | {self.host} | {urlsplit(origin).hostname or "" for origin in self.origins}

    @property
    def cookie(self) -> str:
        """Return the name of the session cookie. Cookies ignore ports, so two dashboards on one host need two names."""
        return f"thinwire-{self.port}"

    @property
    def home_option(self) -> str:
        """Return the `--home` option for shown commands; "" if they find the state directory without it."""
        if self.lock is None or (home := self.lock.absolute().parent.parent) == default_home():
            return ""
        return f" --home {shlex.quote(str(home))}"

    @property
    def secure(self) -> bool:
        """Return True if all browsers reach the dashboard over https."""
        return bool(self.origins) and all(origin.startswith("https://") for origin in self.origins)


def listen_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT of this machine's loopback; any other address is refused, because the dashboard has no TLS.

    >>> listen_address("127.0.0.1:8080"), listen_address("[::1]:0")
    (('127.0.0.1', 8080), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        why = "it reads HOST:PORT; a port is 1 to 65535, and 0 takes one that is free"
        raise UsageError(f"{text!r} is no address to listen on", why=why, hint="127.0.0.1:8080, for instance")
    if host != "localhost" and not _is_loopback(host):
        raise UsageError(
            f"the page does not listen on {host}",
            why="it speaks no TLS, and whoever reads along could take over the session",
            hint="listen on 127.0.0.1 behind a proxy with TLS (--origin https://NAME), or ssh -L 8080:127.0.0.1:8080",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    """Return True if the host is a loopback IP address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def root_path(text: str) -> str:
    """Return the path under which a proxy serves the dashboard, without a trailing slash; `UsageError` if invalid."""
    path = text.rstrip("/")
    if path and (not path.startswith("/") or any(c in path for c in '?#"<>;,\\ ')):
        raise UsageError(f"--root-path {text!r} is no path", hint="as in /thinwire")
    return path


def origin(text: str) -> str:
    """Return an origin as browsers write it: `https://name[:port]`."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise UsageError(f"--origin {text!r} is no origin", hint="as in https://training.example.org")
    return f"{parts.scheme}://{parts.netloc}".lower()


def read_token(path: Path) -> str:
    """Read the token from a file that no other user can read; `UsageError` otherwise or if it is too short."""
    try:
        mode, text = os.stat(path).st_mode, path.read_text().strip()
    except OSError as error:
        raise UsageError(f"cannot read the token {path}", why=error.strerror or str(error)) from error
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"others can read the token {path}", hint=f"chmod 600 {path}")
    if len(text) < 32:
        raise UsageError(f"the token in {path} is too short", why="32 characters at least")
    return text


State = Literal["running", "gone", "unknown"]


def lock_beside(url: str) -> Path | None:
    """Return the lock of the state directory that holds this database; None for a database server or without a lock."""
    home = AggregatorHome(Path(url.removeprefix("sqlite:///")).parent)
    return home.lock if url == f"sqlite:///{home.database}" and home.lock.exists() else None


def aggregator(lock: Path | None) -> tuple[State, dict[str, Any]]:
    """Return the aggregator's state and its description of itself (pid, addresses).

    The state is "unknown" without a lock to look at. An aggregator that is starting counts as "gone".

    Testing the lock holds it for a moment, which would refuse an aggregator that is starting. Therefore it is tested
    only while the process that wrote it lives.
    """
    if lock is None:
        return "unknown", {}
    try:
        about = json.loads(lock.read_bytes() or b"{}")
        os.kill(int(about["pid"]), 0)
    except PermissionError:
        return ("gone", {}) if is_starting(about) else ("running", about)
    except (OSError, ValueError, KeyError, TypeError):
        return "gone", {}
    found = holder(lock)
    return ("gone", {}) if found is None or is_starting(found) else ("running", found)
