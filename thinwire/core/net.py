"""Addresses and sockets: which addresses are this machine's own, which count as one, and when a peer is gone."""

from __future__ import annotations

import ipaddress
import socket

# The system probes a connection that is silent for 60 s, and ends one whose peer acknowledges nothing for 60 s.
DEAD = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000))  # s, s, -, ms


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


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address of this machine, with port 0 to a free one; raise `OSError` if it fails."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def keep_alive(sock: socket.socket) -> None:
    """Have the system end a connection whose peer has vanished, and send what is written at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in DEAD:
        if hasattr(socket, option):  # macOS names some of them differently, and has no user time-out
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
