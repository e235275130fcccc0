"""The way from a device to its aggregator, step by step: name, TCP, certificate, clock, row."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli import say
from thinwire.cli.doctor.findings import Finding, found, unseen

if TYPE_CHECKING:
    from thinwire.flower.device.address import Address
    from thinwire.flower.device.trust import Trust

SKEW_S = 5.0  # what is shown of a clock: less is no cause of anything
STEPS = ("name", "tcp", "pin", "clock", "row")


def walk(url: str, trust: Trust | None, folder: Path) -> list[Finding]:
    """Each step; those behind the first that fails could not be looked at."""
    from thinwire.flower.device.address import Address

    address = Address.parse(url)
    findings: list[Finding] = []
    for what, look in (
        ("name", lambda: _name(address)),
        ("tcp", lambda: _tcp(address)),
        ("pin", lambda: _pin(address, url, trust)),
    ):
        findings.append(found(what, look))
        if findings[-1].ok is False:
            break
    else:
        findings += _standing(url, trust, folder)
    return [*findings, *(unseen(what, f"{findings[-1].what} failed") for what in STEPS[len(findings) :])]


def _name(address: Address) -> Finding | str:
    from thinwire.flower.device.address import Proxy

    proxy = Proxy.towards(address)
    host, port = (proxy.host, proxy.port) if proxy else (address.host, address.port)
    try:
        places = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        hint = "HTTPS_PROXY names it; NO_PROXY is for a direct way" if proxy else "is it right? Does DNS work here?"
        return Finding("name", False, f"{host} is not known here: {error}", hint)
    said = host if host in places else f"{host} is {', '.join(sorted(places))}"
    return f"{said}, the proxy of HTTPS_PROXY; it looks {address.host} up" if proxy else said


def _tcp(address: Address) -> Finding | str:
    from thinwire.flower.device.address import Proxy
    from thinwire.flower.device.line import reach

    by = f" by the proxy {proxy.host}:{proxy.port}" if (proxy := Proxy.towards(address)) else ""
    try:
        sock, rtt_s = reach(address)
    except OSError as error:
        hint = "is it started (thinwire aggregator start), is the port right, does a firewall let it pass?"
        return Finding("tcp", False, f"{address} does not answer{by}: {error.strerror or error}", hint)
    sock.close()
    return f"{address} answers{by} in {say.seconds(rtt_s)}"


def _pin(address: Address, url: str, trust: Trust | None) -> Finding | str:
    from thinwire.flower.device.line import dial
    from thinwire.flower.device.meaning import silence

    if trust is None:
        return "a plain door, for this machine only"
    try:
        line = dial(address, trust)
    except (OSError, http.client.HTTPException) as error:
        raise silence(error, url, tls=True) from error
    line.sock.close()
    by = "a CA of this system" if trust.system else f"the CA that was joined (pin {trust.pins[0][:16]}..)"
    ends = datetime.fromtimestamp(line.dates[1], UTC) if line.dates else None
    assert isinstance(line.sock, ssl.SSLSocket)
    return f"{by} vouches for it, {line.sock.version() or 'TLS'}" + (f", until {ends:%Y-%m-%d}" if ends else "")


def _standing(url: str, trust: Trust | None, folder: Path) -> Sequence[Finding]:
    from thinwire.core.errors import ThinwireError
    from thinwire.flower import device_key
    from thinwire.flower.device.asking import ask
    from thinwire.flower.device.keys import KEY_FILE

    if not (folder / KEY_FILE).exists():
        return unseen("clock", "this client has no key yet"), Finding(
            "row", None, "this client has no key yet: its first start makes one"
        )
    try:
        stood = ask(url, trust, device_key(folder))
    except ThinwireError as error:
        return unseen("clock", "nobody answered"), Finding("row", False, str(error), error.hint)
    key = f"key {say.grouped(stood.fingerprint)}"
    if stood.error is not None:
        row = Finding("row", False, f"{stood.error}\n{key}", stood.error.hint)
    elif stood.kind == "hello":
        row = Finding("row", True, f"not known yet: the first start makes it so\n{key}")
    else:
        row = Finding("row", True, f"approved\n{key}")
    return _clock(stood.skew_s, trust), row


def _clock(skew_s: float | None, trust: Trust | None) -> Finding:
    if skew_s is None:
        return unseen("clock", "the aggregator did not say its time")
    if abs(skew_s) < SKEW_S:
        return Finding("clock", True, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, as at the aggregator")
    said = f"{say.seconds(abs(skew_s))} {'behind' if skew_s > 0 else 'ahead of'} the aggregator's"
    if trust is not None and trust.system:
        return Finding("clock", False, said, "timedatectl set-ntp true: certificates of the system's CAs have dates")
    return Finding("clock", True, f"{said}: requests are signed by that one", "timedatectl set-ntp true")
