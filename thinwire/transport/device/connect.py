"""TLS connections from a device to the aggregator: the address, a proxy, TCP, TLS, and the detection of dead peers."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from thinwire.core.errors import Unreachable, UsageError
from thinwire.core.formatting import plain
from thinwire.core.net import host_port, is_loopback, tune
from thinwire.transport.device.identity import Trust

DIAL_S = 20.0  # for each of: TCP, the proxy's answer, the handshake
MAX_ANSWER_BYTES = 16_384  # of a proxy's response


@dataclass(frozen=True)
class TlsConnection:
    """A connected socket.

    `rtt_s` is one round trip to the aggregator. `dates` are the leaf's validity in seconds since 1970, None without
    TLS.
    """

    sock: socket.socket
    rtt_s: float
    dates: tuple[float, float] | None = None

    def hang_up(self) -> None:
        """Shut the socket down, from any thread: a reading thread finds the end of the stream.

        ssl's own shutdown would take the TLS state away from that thread.
        """
        with contextlib.suppress(OSError):  # the socket may be closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def dial(address: Address, trust: Trust | None) -> TlsConnection:
    """Connect to the aggregator, over TLS if `trust` is given.

    Raises OSError if nobody answers, and `ssl.SSLCertVerificationError` if the peer is not trusted.
    """
    names: tuple[str | None, ...] = trust.names(address.host) if trust is not None else (None,)
    for name in names[:-1]:
        with contextlib.suppress(ssl.SSLCertVerificationError):  # during a rotation the peer may present another chain
            return _dial(address, trust, name)
    return _dial(address, trust, names[-1])


def connect_unverified(address: Address) -> TlsConnection:
    """Connect over TLS without verification, to read and compare public data. No secret may be sent over it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sock, rtt_s = reach(address)
    return TlsConnection(_secure_socket(context, sock, address.host), rtt_s)


def has_new_address(sock: socket.socket) -> bool:
    """Return True if this machine would now use another address, so that nothing arrives on this connection any more.

    It looks up the present route: connecting a UDP socket sends nothing. No route at all does not count as a change.
    """
    try:
        here, peer = sock.getsockname(), sock.getpeername()
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return bool(probe.getsockname()[0] != here[0])
    except OSError:
        return False


def _dial(address: Address, trust: Trust | None, name: str | None) -> TlsConnection:
    sock, rtt_s = reach(address)
    if trust is None or name is None:
        return TlsConnection(sock, rtt_s)
    tls = _secure_socket(trust.context(), sock, name)
    leaf = tls.getpeercert() or {}
    begins, ends = (ssl.cert_time_to_seconds(str(leaf[key])) for key in ("notBefore", "notAfter"))
    return TlsConnection(tls, rtt_s, (begins, ends))


def reach(address: Address) -> tuple[socket.socket, float]:
    """Return a TCP connection to the aggregator, possibly through a proxy, and the seconds of one round trip."""
    proxy = Proxy.towards(address)
    host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
    first: OSError | None = None  # of the address that this machine prefers
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # this machine has no IPv6
            first = first or error
            continue
        try:
            sock.settimeout(DIAL_S)
            began = time.monotonic()
            sock.connect(where)
            if proxy is not None:
                began = time.monotonic()
                _tunnel(sock, proxy, address)
            rtt_s = time.monotonic() - began
            tune(sock)
            return sock, rtt_s
        except OSError as error:
            sock.close()
            first = first or error
        except BaseException:
            sock.close()
            raise
    raise first or OSError(f"no address of {host}")


def _secure_socket(context: ssl.SSLContext, sock: socket.socket, name: str) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(sock, server_hostname=name)
    except BaseException:
        sock.close()
        raise


def _tunnel(sock: socket.socket, proxy: Proxy, address: Address) -> None:
    """Open a tunnel with CONNECT (RFC 9110, 9.3.6).

    The response is read byte by byte, because the bytes after it belong to the aggregator.
    """
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    response = b""
    while not response.endswith(b"\r\n\r\n"):
        if len(response) > MAX_ANSWER_BYTES or not (more := sock.recv(1)):
            raise ConnectionError(f"the proxy at {proxy.host}:{proxy.port} broke off")
        response += more
    status = response.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ", 1)[-1]
    if not status.startswith("2"):
        raise Unreachable(
            f"the proxy at {proxy.host}:{proxy.port} opens no way to {address}",
            why=f"it answers {plain(status[:80])}",
            hint="its operator must let CONNECT pass to that port; or NO_PROXY for a direct way",
        )


PORT = 9090
EXAMPLE = "https://agg.example:9090; on the aggregator's own machine http://127.0.0.1:9090"


@dataclass(frozen=True)
class Address:
    """The address of an aggregator. Plain HTTP is for loopback alone; every other address uses TLS.

    >>> Address.parse("https://agg.example")
    Address(tls=True, host='agg.example', port=9090)
    """

    tls: bool
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a URL; raise `UsageError` if it is no address of an aggregator."""
        parts, port = _split(url, url)
        if parts.scheme not in ("http", "https") or not _is_host(parts.hostname) or parts.path not in ("", "/"):
            raise UsageError(f"{url!r} is no address of an aggregator", why="https://HOST:PORT is", hint=EXAMPLE)
        address = cls(parts.scheme == "https", parts.hostname or "", port or PORT)
        if not address.tls and not address.is_loopback:
            raise UsageError(
                f"{url} would be talked to in the clear",
                why="plain HTTP is for this machine alone",
                hint=f"https://{parts.netloc}, after thinwire client join",
            )
        return address

    @property
    def is_loopback(self) -> bool:
        """Return True for `localhost` and addresses of the loopback network."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return host_port(self.host, self.port)


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy that forwards TLS to the aggregator by CONNECT. It sees only the address."""

    host: str
    port: int
    authorization: str = ""

    @classmethod
    def towards(cls, address: Address) -> Proxy | None:
        """Return the proxy for an address, or None.

        HTTPS_PROXY names it and NO_PROXY excludes addresses. Loopback is never reached through a proxy.
        """
        proxy_url = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or ""
        if not proxy_url or not address.tls or address.is_loopback or _is_exempt(address):
            return None
        parts, port = _split(proxy_url, "HTTPS_PROXY")
        if parts.scheme != "http" or not _is_host(parts.hostname):
            raise UsageError("HTTPS_PROXY is not usable", why="it reads http://HOST:PORT", hint="or unset it")
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
        authorization = f"Basic {base64.b64encode(user.encode()).decode()}" if user else ""
        return cls(parts.hostname or "", port or 3128, authorization)


def _is_host(name: str | None) -> bool:
    """Return True if a host can have this name: no lookup takes an empty or a long label."""
    try:
        return bool(name and name.encode("idna"))
    except UnicodeError:
        return False


def _is_exempt(address: Address) -> bool:
    from urllib import request

    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    bypass = request.proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it
    return bool(bypass(str(address), {"no": exempt}))


def _split(text: str, what: str) -> tuple[SplitResult, int | None]:
    try:
        parts = urlsplit(text if "//" in text else f"//{text}", scheme="http")
        return parts, parts.port
    except ValueError as error:
        raise UsageError(f"{what!r} is no address", why=str(error), hint=EXAMPLE) from error
