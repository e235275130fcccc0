"""A socket to the door: dialled, through a proxy where there is one, verified, and noticed when it is dead."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from dataclasses import dataclass

from thinwire.core.errors import Unreachable
from thinwire.core.texts import plain
from thinwire.flower.device.address import Address, Proxy
from thinwire.flower.device.trust import Trust

DIAL_S = 20.0  # for each of: TCP, the proxy's answer, the handshake
MAX_ANSWER_BYTES = 16_384  # of a proxy
UNSENT_BYTES = 128 * 2**10  # what waits in this machine is not on the wire: a cut loses little of what was "sent"
DEAD = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000))  # s, s, -, ms
_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # linux/tcp.h; Python names it from 3.12 on


@dataclass(frozen=True)
class Line:
    """`rtt_s`: one round trip to the door. `dates`: of the leaf, seconds since 1970; None without TLS."""

    sock: socket.socket
    rtt_s: float
    dates: tuple[float, float] | None = None

    def hang_up(self) -> None:
        """From any thread: whoever reads finds the end. (ssl's own shutdown would take its state from under them.)"""
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def dial(address: Address, trust: Trust | None) -> Line:
    """OSError where nobody answers, `ssl.SSLCertVerificationError` where it is not who is trusted."""
    names: tuple[str | None, ...] = trust.names(address.host) if trust is not None else (None,)
    for name in names[:-1]:
        with contextlib.suppress(ssl.SSLCertVerificationError):  # CAs are being rotated: it may show another chain
            return _dial(address, trust, name)
    return _dial(address, trust, names[-1])


def unverified(address: Address) -> Line:
    """To read what is public, and to compare it. Nothing that is a secret goes over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sock, rtt_s = reach(address)
    return Line(_secured(context, sock, address.host), rtt_s)


def moved(sock: socket.socket) -> bool:
    """Whether this machine would now come from another address: then nothing arrives on this line any more.

    By the routes of this moment: connecting a UDP socket sends nothing. No route at all is no other address.
    """
    try:
        here, peer = sock.getsockname(), sock.getpeername()
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return bool(probe.getsockname()[0] != here[0])
    except OSError:
        return False


def _dial(address: Address, trust: Trust | None, name: str | None) -> Line:
    sock, rtt_s = reach(address)
    if trust is None or name is None:
        return Line(sock, rtt_s)
    tls = _secured(trust.context(), sock, name)
    leaf = tls.getpeercert() or {}
    begins, ends = (ssl.cert_time_to_seconds(str(leaf[key])) for key in ("notBefore", "notAfter"))
    return Line(tls, rtt_s, (begins, ends))


def reach(address: Address) -> tuple[socket.socket, float]:
    """A TCP connection to the door or to the proxy that opened one, and how long its answer took."""
    proxy = Proxy.towards(address)
    host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
    last: OSError | None = None
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(DIAL_S)
            began = time.monotonic()
            sock.connect(where)
            if proxy is not None:
                began = time.monotonic()
                _tunnel(sock, proxy, address)
            rtt_s = time.monotonic() - began
            _notice_death(sock)
            return sock, rtt_s
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last or OSError(f"no address of {host}")


def _notice_death(sock: socket.socket) -> None:
    """Probe a silent line, give up unanswered bytes, send at once, and keep little that is not on the wire yet."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in DEAD:
        if hasattr(socket, option):  # macOS names some of them otherwise, and has no user time-out
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):  # a system without it only sends more twice
        sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_BYTES)


def _secured(context: ssl.SSLContext, sock: socket.socket, name: str) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=name)
    except BaseException:
        sock.close()
        raise


def _tunnel(sock: socket.socket, proxy: Proxy, address: Address) -> None:
    """CONNECT (RFC 9110, 9.3.6): byte by byte, for what follows the proxy's answer is the door's."""
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        if len(answer) > MAX_ANSWER_BYTES or not (more := sock.recv(1)):
            raise ConnectionError(f"the proxy at {proxy.host}:{proxy.port} broke off")
        answer += more
    status = answer.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ", 1)[-1]
    if not status.startswith("2"):
        raise Unreachable(
            f"the proxy at {proxy.host}:{proxy.port} opens no way to {address}",
            why=f"it answers {plain(status[:80])}",
            hint="ask who runs it to let CONNECT pass to that port; or NO_PROXY for a direct way",
        )
