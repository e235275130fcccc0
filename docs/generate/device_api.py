"""docs/reference/device-api.md: what the device API takes, and what it answers to whom. The tables of answers are
measured ones: tests/transport/test_every_route.py calls every route as everybody, and holds what it is told against
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import thinwire
from docs.generate.table import table
from thinwire.transport.protocol.http import ROUTES, Route
from thinwire.transport.server import auth, connections

OURS = Path(thinwire.__file__).parent

CALLERS: Mapping[str, str] = {
    "nothing": "a request without a signature",
    "a self-made key": "a signed request of a key that nobody approved",
    "pending": "of a device that waits for approval",
    "revoked": "of a device that was revoked",
    "approved": "of a device, about what is its own",
    "another's": "of an approved device, about what is another's: its process, its assignment, its answer, its "
    "upload. A 200 "
    "is about the signer: who calls is told by the key alone, whatever the body says",
    "another's key": "with an approved device's key, signed by somebody who does not hold it",
}

TLS: Mapping[str, tuple[str, ...]] = {
    "ca": ("200", "200", "200", "200", "200", "200", "200"),
    "join": ("401 signature", "403 invitation", "403 invitation", "403 invitation", "403 invitation", "403 invitation",
             "401 signature"),
    "hello": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "200", "401 signature"),
    "pull": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "401 hello", "401 signature"),
    "push": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "403 device", "401 signature"),
    "bundle": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "404 assignment", "401 signature"),
    "offset": ("401", "401", "403", "403", "200", "404", "401"),
    "part": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "404 offer", "401 signature"),
    "leave": ("401 signature", "401 unknown", "403 pending", "403 revoked", "200", "200", "401 signature"),
}  # fmt: skip

PLAIN: Mapping[str, tuple[str, ...]] = {
    "ca": ("404", "404", "404", "404", "404", "404", "404"),
    "join": ("404", "404", "404", "404", "404", "404", "404"),
    "hello": ("401 signature", "200", "403 pending", "403 revoked", "200", "200", "401 signature"),
    "pull": ("401 signature", "401 hello", "403 pending", "403 revoked", "200", "401 hello", "401 signature"),
    "push": ("401 signature", "401 hello", "403 pending", "403 revoked", "200", "403 device", "401 signature"),
    "bundle": ("401 signature", "401 hello", "403 pending", "403 revoked", "200", "404 assignment", "401 signature"),
    "offset": ("401", "401", "403", "403", "200", "404", "401"),
    "part": ("401 signature", "401 hello", "403 pending", "403 revoked", "200", "404 offer", "401 signature"),
    "leave": ("401 signature", "401 hello", "403 pending", "403 revoked", "200", "200", "401 signature"),
}

KINDS: Mapping[str, str] = {
    "401 signature": "it is not signed, or not for what was sent, or not by a P-256 or P-384 key",
    "401 clock": "what is signed as the time is not now, or before the aggregator started; `now` is the time there",
    "401 replay": "this very request was accepted before",
    "401 hello": "the process has not said hello since the aggregator started, or since its CA changed",
    "401 unknown": "nobody let this key in",
    "412 unknown": "a stock Flower node whose key nobody approved",
    "403 pending": "a person has to approve this device first",
    "403 revoked": "this device was revoked",
    "403 invitation": "unknown, used, expired or withdrawn: from outside they look alike",
    "403 browser": (
        "a page in a browser called what is for programs on this machine: a plain device API, or Flower's "
        "control address"
    ),
    "403 device": "a reply in another device's name",
    "403 protocol": "no version of the protocol is spoken by both; the text has both ranges",
    "404": "no such path; the answer has no body",
    "404 assignment": "this assignment is answered, withdrawn, or not this device's",
    "404 offer": "the header of this reply was not pushed by this device",
    "409 name": "the name is another key's, or no name",
    "409 process": "another process of this device is connected",
    "409 offset": "an upload goes on elsewhere: header `upload-offset`",
    "409 writer": "another connection is writing this reply",
    "409 damaged": "bytes that do not fit their digest",
    "409 protocol": "a body that is not readable",
    "409 run": "the reply is to another run of this id, whose identity differs",
    "409 ledger": "the device reports more of its privacy ledger than is stored",
    "409 state-lost": "this number was used for another reply before",
    "413 too-large": "longer than is taken here, or of unknown length",
    "429 joins": "too many joins failed from this address",
    "429 signatures": "too many requests with a wrong signature came from this address, for this device's key",
    "503 busy": (
        "more requests, more hellos, or more replies that nobody has aggregated, than are taken "
        "from one device"
    ),
    "503 closing": "the aggregator is closing",
    "503 disk": "the aggregator cannot read or write its state",
    "503 internal": "a defect; it is in the aggregator's log",
}  # fmt: skip

WHO: Mapping[str, str] = {
    "anyone": "anyone", "stranger": "any key that signed",
    "newcomer": "a device; on a plain device API any key that signed",
    "device": "a device",
}  # fmt: skip


def device_api_page() -> str:
    if strange := _answered() ^ set(KINDS):
        raise ValueError(
            f"docs/generate/device_api.py: answers that differ between the code and here: {sorted(strange)}"
        )
    said = (
        "The one address that devices reach. Everything that is not in the first table is answered 404, above all the "
        "routes of Flower's SuperLink, which listens nowhere. What is signed and how is in "
        "[the wire](../explain/the-wire.md)."
    )
    measured = (
        "Measured by `tests/transport/test_every_route.py`, which also calls each route that the SuperLink's OpenAPI "
        "names, as everybody: 404, without a body. A `HEAD` has no body that could say the word behind its status. "
        "`join` shows a secret that was never given out."
    )
    refused = (
        'A refusal\'s body is JSON, `{"error": the word, "why": text, "now": the time at the aggregator}`; 429 and 503 '
        "have `Retry-After`. There is no other status; what is no HTTP gets no answer at all."
    )
    return "\n\n".join([
        "# The device API", said,
        "## Routes", table(("name", "request", "who may", "body at most"), map(_route, ROUTES)),
        "## Who is answered what", measured,
        table(("caller", "makes"), CALLERS.items()),
        "### With TLS", _answers(TLS),
        "### Without TLS, on loopback", _answers(PLAIN),
        "## Refusals", refused,
        table(("answer", "meaning"), [(f"`{kind}`", meaning) for kind, meaning in KINDS.items()]),
        "## Limits", "Before a request is signed for, of every body, and of one device.",
        table(("what", "how much"), _limits()),
    ])  # fmt: skip


def _route(route: Route) -> tuple[str, ...]:
    path = re.sub(r"\(\?P<(\w+)>(?:[^()\[]|\[[^]]*\])*\)", lambda found: found[1].upper(), route.path)
    query = "?offset=N" if route.name == "part" else ""
    most = f"{route.most_bytes:,} bytes" if route.most_bytes else "none"
    if route.name == "part":
        most = "what its header said"
    return f"`{route.name}`", f"`{route.method} {path}{query}`", WHO[route.who], most


def _answers(found: Mapping[str, tuple[str, ...]]) -> str:
    return table(("route", *CALLERS), [(f"`{name}`", *said) for name, said in found.items()])


def _answered() -> set[str]:
    """Every status and kind that the code refuses with."""
    made = re.compile(r'ApiError\(\s*(\d{3}),\s*"([a-z-]*)"')
    texts = [path.read_text() for path in chain(OURS.glob("transport/**/*.py"), OURS.glob("flower/*.py"))]
    found = {f"{status} {kind}".strip() for text in texts for status, kind in made.findall(text)}
    return found | {"503 disk"}  # its word is chosen where it is made


def _limits() -> list[tuple[str, str]]:
    slowest = round(connections.BODY_BYTES_A_SECOND * connections.BODY_WINDOW_S)
    known_days = connections.FORGET_KNOWN_AFTER_S / 86_400
    return [
        (
            "connections that nobody signed on, from one address (of IPv6: one /64)",
            str(connections.MAX_UNSIGNED_OF_ADDRESS),
        ),
        ("and from all together, of which the oldest makes room", str(connections.MAX_UNSIGNED)),
        (
            f"of these kept for addresses where a device has signed in {known_days:g} days",
            str(connections.RESERVED_FOR_KNOWN),
        ),
        ("a connection without a signed request", f"{connections.UNSIGNED_S:g} s"),
        ("a TLS handshake", f"{connections.HANDSHAKE_S:g} s"),
        ("a request's line and headers", f"{connections.HEADER_BYTES // 1024} KiB, in {connections.HEADER_S:g} s"),
        ("a body, of any length", f"{connections.BODY_WINDOW_S:g} s for each {slowest // 1024} KiB"),
        (
            "failed joins and refused signatures from one address; those for a known device's key count by themselves",
            f"{auth.FAILED_JOINS} in {auth.FAILED_WITHIN_S:g} s",
        ),
        ("refused signatures on one connection", str(connections.MAX_REFUSED_OF_CONNECTION)),
        ("requests that are sent before the answer to the one before", "0"),
        ("connections of one device, of which the oldest makes room", str(connections.CONNECTIONS_OF_ONE)),
        ("and of one stock Flower node", str(connections.CONNECTIONS_OF_A_GUEST)),
    ]  # fmt: skip
