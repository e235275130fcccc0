"""Requests that somebody made strange: sound ones of every route, mutated as bytes or headers, or signed as strange."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.callers import Caller
from tests.support.fleet_words import answer, hello
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import Failure
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import CA, HELLO, JOIN, LEAVE, PULL, PUSH, ROUTES, block, pack

WORDS = [
    b"", b"0", b"-1", b"\0", b"\xff" * 8, b"9" * 400, b"..", b"%00", b"\r\n", b"\r\n\r\n", b"chunked", b"null", b"NaN",
    b"[" * 500, b"{}", b'{"secret":1}', b"1e999", b"\xed\xa0\x80", b"HTTP/1.1", b"transfer-encoding: chunked\r\n",
    b"content-length: 7\r\n", b"expect: 100-continue\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n",
]  # fmt: skip
BOMB = pack(bytes(5 * 2**20))  # more than is inflated
ODD: list[Any] = [
    None,
    True,
    -1,
    2**63,
    10**400,
    1e308,
    "",
    "x" * 5000,
    "\ud800",
    "\0",
    [],
    {},
    [[]] * 50,
    "..",
    "pi-1",
]


@dataclass(frozen=True)
class Sound:
    """A request as it should be. `json` is the first block of its body, `rest` what follows that."""

    method: str
    target: str
    json: bytes | None = None
    rest: bytes = b""

    @property
    def body(self) -> bytes:
        return (pack(self.json) if self.json is not None else b"") + self.rest


def sound(route: str, caller: Caller, draw: random.Random) -> Sound:
    """A request of this route, of any kind of body that it may have."""
    part, number = "/tw/v1/parts/digits-1/7/0", draw.randrange(1, 2**40)
    match route:
        case "ca":
            return Sound("GET", CA)
        case "join":
            said = {"secret": "0" * 32, "name": "pi-9", "versions": {"python": "3"}}
            return Sound("POST", JOIN, json.dumps(said).encode())
        case "hello":
            return Sound("POST", HELLO, registration.to_bytes(hello(caller.name, caller.process)))
        case "pull":
            wanted = {"process": caller.process, "wait_s": 0.0, "in_flight": ["assignment-1"]}
            return Sound("POST", PULL, json.dumps(wanted).encode())
        case "push":
            small = answer(caller.name, "assignment-0", number, b"x" * 50)
            large = answer(caller.name, "assignment-0", number, bytes(300_000))
            reply, parts = draw.choice(
                ((small, b"x" * 50), (large, b""), (Failure("task-error", "x", "assignment-0"), b""))
            )
            return Sound("POST", PUSH, reply_to_bytes(reply), parts)
        case "bundle":
            return Sound("GET", "/tw/v1/assignments/assignment-1/bundle")
        case "offset":
            return Sound("HEAD", part)
        case "part":
            return Sound("PUT", part + "?offset=0", None, b"x" * 1000)
        case "leave":
            return Sound("POST", LEAVE)
    raise KeyError(route)


class Fuzz:
    """`request()` gives the next one as bytes. The same seed, the same requests (but for signatures and nonces).

    `callers` sign; who leaves is the last of them, and so it may well be revoked.
    """

    def __init__(self, callers: Sequence[Caller], seed: int) -> None:
        self.callers, self.draw = callers, random.Random(seed)
        self.ways: list[Callable[[Caller, Sound], bytes]] = [
            self.as_it_is, self.bytes_changed, self.headers_changed, self.json_changed, self.body_changed,
            self.target_changed, self.noise,
        ]  # fmt: skip

    def request(self) -> bytes:
        route = self.draw.choice(ROUTES).name
        caller = self.callers[-1] if route == "leave" else self.draw.choice(self.callers)
        return self.draw.choice(self.ways)(caller, sound(route, caller, self.draw))

    def as_it_is(self, caller: Caller, given: Sound) -> bytes:
        return self.written(given, self.signed(caller, given), given.body)

    def bytes_changed(self, caller: Caller, given: Sound) -> bytes:
        data = bytearray(self.as_it_is(caller, given))
        for _ in range(self.draw.choice((1, 1, 2, 5, 40))):
            at = self.draw.randrange(len(data) + 1)
            match self.draw.randrange(5):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.draw.randrange(8)
                case 1:
                    del data[at : at + self.draw.choice((1, 4, 60))]
                case 2:
                    data[at:at] = self.draw.choice(WORDS)
                case 3:
                    data[at:at] = data[at : at + self.draw.choice((1, 30, 300))]
                case _:
                    data[at : at + 4] = self.draw.randbytes(4)
        return bytes(data)

    def headers_changed(self, caller: Caller, given: Sound) -> bytes:
        lines = self.signed(caller, given)
        nth = self.draw.randrange(len(lines))
        name, value = lines[nth]
        match self.draw.randrange(5):
            case 0:
                del lines[nth]
            case 1:
                lines.append(lines[nth])
            case 2:
                lines[nth] = name, self.draw.choice(WORDS).replace(b"\r\n", b"")
            case 3:
                lines[nth] = (
                    name,
                    base64.b64encode(self.draw.randbytes(self.draw.choice((0, 15, 16, 32, 48, 120, 400)))),
                )
            case _:
                lines.append((self.draw.choice(lines)[0], value))
        return self.written(given, lines, given.body)

    def json_changed(self, caller: Caller, given: Sound) -> bytes:
        """Rightly signed, and another value somewhere in it."""
        if given.json is None:
            return self.body_changed(caller, given)
        found = json.loads(given.json)
        place: Any = found
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            keys = (
                list(place) if isinstance(place, dict) else list(range(len(place))) if isinstance(place, list) else []
            )
            if not keys:
                break
            key = self.draw.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and self.draw.random() < 0.7:
                place = place[key]
                continue
            if isinstance(place, dict) and self.draw.random() < 0.2:
                del place[key]
            else:
                place[key] = self.draw.choice(ODD)
            break
        changed = Sound(given.method, given.target, json.dumps(found).encode(), given.rest)
        return self.as_it_is(caller, changed)

    def body_changed(self, caller: Caller, given: Sound) -> bytes:
        """Rightly signed, and no blocks that fit."""
        data = bytearray(given.body)
        body = self.draw.choice((
            self.draw.randbytes(self.draw.randrange(200)), bytes(data[: self.draw.randrange(len(data) + 1)]),
            bytes(data) + self.draw.randbytes(9), block(self.draw.randbytes(60)), pack(self.draw.choice(WORDS)),
            BOMB, b"\xff\xff\xff\xff" + bytes(data[4:]),
        ))  # fmt: skip
        return self.as_it_is(caller, Sound(given.method, given.target, None, body))

    def target_changed(self, caller: Caller, given: Sound) -> bytes:
        """Rightly signed, for another path or by another method."""
        pieces = given.target.split("/")
        at = self.draw.randrange(1, len(pieces))
        pieces[at] = self.draw.choice(
            ["", "..", "0", "-1", "9" * 18, "9" * 40, "a%2fb", "%00", "x" * 300, "?", "#", "digits-1"]
        )
        target = self.draw.choice(
            ("/".join(pieces), given.target + "?offset=" + "9" * 30, given.target + "?&&=;offset=1&offset=2")
        )
        method = self.draw.choice((given.method, "GET", "POST", "PUT", "HEAD", "DELETE"))
        return self.as_it_is(caller, Sound(method, target, given.json, given.rest))

    def noise(self, _caller: Caller, _given: Sound) -> bytes:
        return self.draw.choice((b"", b"GET ", b"\x16\x03\x01", b"POST / HTTP/1.1\r\n")) + self.draw.randbytes(
            self.draw.choice((1, 100, 3000))
        )

    def signed(self, caller: Caller, given: Sound) -> list[tuple[bytes, bytes]]:
        body = given.body
        digest = hashlib.sha256(body).digest()
        headers = caller.signer.headers(
            given.method, given.target, digest, len(body), whole_key=given.target in (HELLO, JOIN)
        )
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def written(self, given: Sound, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
        lines = [f"{given.method} {given.target} HTTP/1.1".encode("utf-8", "replace"), b"host: localhost"]
        lines += [name + b": " + value for name, value in headers]
        if body or given.method in ("POST", "PUT"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join([*lines, b"", body])
