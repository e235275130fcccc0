"""Addresses and sockets: which addresses are this machine's own, which count as one, and when a peer is gone."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import resource
import socket

from thinwire.core.errors import Unreachable

# The system probes a connection that is silent for 60 s, and ends one whose peer acknowledges nothing for 60 s.
KEEPALIVE = (
    ("TCP_KEEPIDLE", 60),  # seconds
    ("TCP_KEEPINTVL", 15),  # seconds
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 60_000),  # milliseconds
)

UNSENT_BYTES = 128 * 2**10  # at most, in the kernel: a transfer that is cut or cancelled ends soon
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # linux/tcp.h; Python names it from 3.12 on

MAX_PORT = 65535


def allow_open_files(count: int) -> None:
    """Let this process open so many files and connections, or as many as its hard limit allows; never fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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

    Text that is no IP address is returned as it is.

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


def is_same_address(one: str, other: str) -> bool:
    """Return True if two texts are the same IP address; a socket for IPv6 too writes IPv4 addresses as mapped ones.

    >>> is_same_address("::ffff:192.0.2.1", "192.0.2.1"), is_same_address("192.0.2.2", "192.0.2.1")
    (True, False)
    """
    try:
        found = [ipaddress.ip_address(address) for address in (one, other)]
    except ValueError:
        return one == other
    first, second = (getattr(address, "ipv4_mapped", None) or address for address in found)
    return first == second


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a socket bound to this address of the machine; port 0 takes a free port.

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
            hint=_bind_hint(host, port, option, code),
        ) from error
    return made


def _bind_hint(host: str, port: int, option: str, code: int | None) -> str:
    """Return the hint for an address that failed with errno `code`."""
    if code == errno.EADDRINUSE:
        other = host_port(host, port + 1 if port < MAX_PORT else 0)
        return f"{option} {other}, or stop the other process (ss -ltnp shows it)"
    if code == errno.EACCES:
        return "a port from 1024 on, or a service of the machine: thinwire aggregator service install --system"
    everywhere = f", or {option} 0.0.0.0:{port} for all of them" if option == "--listen" else ""
    return f"an address of this machine{everywhere}"


def tune(sock: socket.socket) -> None:
    """Have the system end a connection whose peer does not respond, send what is written at once, and buffer little."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE:
        if hasattr(socket, option):  # macOS names some of them differently, and has no user time-out
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):  # without this option a cut or a cancellation only costs more bytes
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_BYTES)
