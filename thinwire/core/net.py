"""Addresses and sockets: which addresses are this machine's own, which count as one, and when a peer is gone; and the
invitation as text, which carries an aggregator's addresses and pin to a device.

The device API writes its addresses and its pin to `tls/invite.json` when it starts. Command line and dashboard make the
text of an invitation and the command to type from them, and from a secret that `store/one_time_secrets.py` made.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.core.errors import NotFound, UsageError

from thinwire.core.errors import Unreachable

# The system probes a connection that is silent for 60 s, and ends one whose peer acknowledges nothing for 60 s.
DEAD = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000))  # s, s, -, ms

MOST_PORT = 65535


def host_port(host: str, port: int) -> str:
    """Return an address as HOST:PORT, with [] around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip_address(host: str) -> bool:
    """Return True if the host is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and addresses of the loopback network."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def neighbourhood(address: str) -> str:
    """Return the prefix that counts as one address: an IPv4 address, or the /64 that a single IPv6 machine gets.

    >>> neighbourhood("2001:db8::1"), neighbourhood("::ffff:192.0.2.1"), neighbourhood("192.0.2.1")
    ('2001:db8::/64', '192.0.2.1', '192.0.2.1')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a socket bound to an address of this machine, with port 0 to a free one.

    Raise `Unreachable` if that fails; `option` is the one that names the address.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        code = getattr(error, "errno", None)
        raise Unreachable(
            f"cannot listen on {host_port(host, port)}",
            why="the port is taken by another process"
            if code == errno.EADDRINUSE
            else getattr(error, "strerror", None) or str(error),
            hint=_instead(host, port, option, code),
        ) from error
    return made


def _instead(host: str, port: int, option: str, code: int | None) -> str:
    """Return the hint for an address that failed with errno `code`."""
    if code == errno.EADDRINUSE:
        other = host_port(host, port + 1 if port < MOST_PORT else 0)
        return f"{option} {other}, or stop the other process (thinwire aggregator status)"
    if code == errno.EACCES:
        return "a port from 1024 on, or a service of the machine: thinwire aggregator service install --system"
    everywhere = f", or {option} 0.0.0.0:{port} for all of them" if option == "--listen" else ""
    return f"an address of this machine{everywhere}"


def keep_alive(sock: socket.socket) -> None:
    """Have the system end a connection whose peer has vanished, and send what is written at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in DEAD:
        if hasattr(socket, option):  # macOS names some of them differently, and has no user time-out
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


SYSTEM = "system"  # in the pin's place: machines trust the aggregator's certificate already
_TEXT = re.compile(r"tw1\.([0-9a-f]{64}|system)\.([0-9a-f]{32})")


@dataclass(frozen=True)
class Invitation:
    """An invitation as text, `tw1.PIN.SECRET`: it identifies the aggregator, and its secret enrolls one device.

    `pin` is the SHA-256 (hex) of the CA's SubjectPublicKeyInfo, or `system`. `secret` is 128 bits in hex.

    Invariant: Invitation.parse(i.text()) == i.
    """

    pin: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation in either case; raise `UsageError`, which does not repeat the text, if it is invalid."""
        found = _TEXT.fullmatch(text.strip().lower())
        if found is None:
            raise UsageError(
                "this is no invitation",
                why=f"one reads tw1.PIN.SECRET, of 101 letters (43 with the pin system), not {len(text.strip())}",
                hint="paste the whole line that thinwire devices invite printed",
            )
        return cls(found[1], found[2])

    def text(self) -> str:
        """Return the invitation's text."""
        return f"tw1.{self.pin}.{self.secret}"


COLUMNS: Final = ("id", "name", "url", "invitation", "command", "expires_at")
INVITE: Final = "invite.json"  # in the folder tls of the aggregator's
_PIN = re.compile(r"[0-9a-f]{64}|system")


@dataclass(frozen=True)
class InviteAddress:
    """The URLs and the pin of the device API, as the aggregator's last start wrote them."""

    pin: str
    urls: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> InviteAddress:
        """Read them in the aggregator's folder.

        Raise `NotFound` if the device API has never listened on an address for other machines.
        """
        try:
            said = json.loads((folder / "tls" / INVITE).read_bytes())
            place = cls(str(said["pin"]), tuple(str(url) for url in said["urls"]))
        except (OSError, ValueError, KeyError, TypeError):
            place = cls("", ())
        if not _PIN.fullmatch(place.pin) or not place.urls:
            raise NotFound(
                "there is no device API to invite to yet",
                why="an invitation names its address and certificate, and it has listened on this machine only",
                hint="thinwire aggregator start --listen 0.0.0.0:9090",
            )
        return place

    def row(self, number: int, name: str, secret: str, expires_at: float) -> dict[str, Any]:
        """Return an invitation by the names of `COLUMNS`.

        The device reads the secret from standard input, so that no list of processes shows it.
        """
        command = f"thinwire client join {self.urls[0]} -" + (f" --name {name}" if name else "")
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
        values = (number, name, self.urls[0], Invitation(self.pin, secret).text(), command, moment)
        return dict(zip(COLUMNS, values, strict=True))
