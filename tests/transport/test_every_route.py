"""Every route that the SuperLink's OpenAPI and ours name, called from outside by everybody:
docs/reference/device-api.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from docs.generate.device_api import CALLERS, PLAIN, TLS
from tests.support.callers import Caller
from tests.support.fleet_words import answer, envelope, hello, polled
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import ClientConnected, DeviceState
from thinwire.core.serialization import reply_to_bytes
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import CA, HELLO, JOIN, LEAVE, PULL, PUSH, ROUTES, pack
from thinwire.transport.protocol.signing import KEY_HEADER, PUBLIC_KEY_HEADER, public_der

MODEL = bytes(400_000)  # more than goes inline
ORDER = sorted((route.name for route in ROUTES), key=lambda name: name == "leave")
BODIES = {"POST", "PUT"}


@dataclass
class World:
    """A device API, and a device `pi-1` that has an assignment and an upload of its own."""

    here: Place
    device: Caller
    callers: dict[str, Caller] = field(default_factory=dict)

    def request(self, route: str, caller: Caller) -> tuple[str, str, bytes | None]:
        """Method, target and body of a sound request of `caller`'s, or of another's about what is `pi-1`'s."""
        about = self.device if caller in (self.callers["another's"], self.callers["another's key"]) else caller
        part = "/tw/v1/parts/digits-1/7/0"
        said = {"secret": "0" * 32, "name": caller.name, "versions": {}}
        found: Mapping[str, tuple[str, str, bytes | None]] = {
            "ca": ("GET", CA, None),
            "join": ("POST", JOIN, pack(json.dumps(said).encode())),
            "hello": ("POST", HELLO, pack(registration.to_bytes(hello(about.name, caller.process)))),
            "pull": ("POST", PULL, about.wanted()),
            "push": ("POST", PUSH, pack(reply_to_bytes(answer(about.name, "assignment-0", 3, b"x"))) + b"x"),
            "leave": ("POST", LEAVE, b""),
            "bundle": ("GET", "/tw/v1/assignments/assignment-1/bundle", None),
            "offset": ("HEAD", part, None),
            "part": ("PUT", part + "?offset=0", MODEL),
        }
        return found[route]

    def headers(self, who: str, method: str, path: str, body: bytes) -> dict[str, str]:
        if who == "nothing":
            return {}
        caller = self.callers[who]
        signed = caller.signed(method, path, body)
        if who == "another's key":
            its = self.device.signed(method, path, body)
            signed |= {name: its[name] for name in (KEY_HEADER, PUBLIC_KEY_HEADER) if name in its}
        return signed

    def told(self, who: str, route: str) -> str:
        method, path, body = self.request(route, self.callers[who])
        said = self.callers[who].call(method, path, body, self.headers(who, method, path, body or b""))
        return f"{said.status} {said.kind}".strip()


def row_of(here: Place, name: str, state: DeviceState = "approved") -> Caller:
    """A device in this state, on either kind of device API."""
    caller = Caller(here, name)
    der = public_der(caller.key.public_key())
    here.roster.enrol(name, caller.signer.fingerprint, der, "invitation" if here.authority else "loopback")
    here.roster.put(name, state)
    return caller


@contextlib.contextmanager
def world(folder: Path, tls: bool) -> Iterator[World]:
    with place(folder, tls=tls) as here:
        made = World(here, row_of(here, "pi-1"))
        other = row_of(here, "pi-2")
        made.callers = {
            "nothing": Caller(here, "pi-9"), "a self-made key": Caller(here, "pi-9"),
            "pending": row_of(here, "pi-3", "pending"), "revoked": row_of(here, "pi-4", "revoked"),
            "approved": made.device, "another's": other, "another's key": Caller(here, "pi-1"),
        }  # fmt: skip
        assert list(made.callers) == list(CALLERS)
        for caller in (made.device, other):
            assert caller.hello().status == 200
            assert polled(here.fleet, ClientConnected).device == caller.name
        here.fleet.send([envelope("pi-1", "assignment-1", folder, MODEL)])
        header = pack(reply_to_bytes(answer("pi-1", "assignment-1", 7, MODEL)))
        assert made.device.call("POST", PUSH, header).told == {"offsets": [0]}
        yield made


@pytest.mark.parametrize(("tls", "page"), [(True, TLS), (False, PLAIN)], ids=["tls", "plain"])
def test_the_device_api_answers_each_caller_as_its_page_says(
    tmp_path: Path, tls: bool, page: Mapping[str, tuple[str, ...]]
) -> None:
    with world(tmp_path, tls) as there:
        measured: dict[str, list[str]] = {route: [] for route in ORDER}
        for who in CALLERS:
            for route in ORDER:
                if (
                    who == "a self-made key"
                ):  # each time another one: on a plain device API its first hello makes it known
                    there.callers[who] = Caller(there.here, f"made-for-{route}")
                measured[route].append(told := there.told(who, route))
                if who == "approved" and route == "leave":
                    there.here.roster.put("pi-1", "approved")
                assert told.partition(" ")[0] in {"200", "401", "403", "404"}, (who, route)
    assert {route: list(said) for route, said in page.items()} == measured


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_every_route_of_the_superlink_and_all_that_is_like_ours_is_unknown_to_everybody(
    tmp_path: Path, tls: bool
) -> None:
    with world(tmp_path, tls) as there:
        app = there.here.fleet._superlink.app
        unknown = {(method.upper(), path) for path, each in app.openapi()["paths"].items() for method in each}
        assert len(unknown) > 20
        unknown |= {
            ("GET", path) for path in ("/", "/docs", "/redoc", "/openapi.json", "/healthz", "/tw/v1", "/tw/v1/")
        }
        unknown |= {("POST", path) for path in (HELLO + "/", "/" + HELLO, "/tw/v1/../v1/hello", "/TW/v1/hello", "*",
                                               "/tw%2fv1/hello", HELLO + "?x", HELLO + "%00", "/tw/v2/hello",
                                               "http://127.0.0.1" + HELLO)}  # fmt: skip
        unknown |= {(method, HELLO) for method in ("GET", "PUT", "OPTIONS", "DELETE", "HEAD", "PATCH", "TRACE")}
        unknown |= {
            ("GET", "/tw/v1/assignments/a/b/bundle"),
            ("HEAD", "/tw/v1/parts/../1/0"),
            ("PUT", "/tw/v1/parts/r/-1/0"),
        }
        for who, caller in there.callers.items():
            connection = caller.connection()
            for method, path in sorted(unknown):
                path = path.replace("{", "").replace("}", "")
                body = b"" if method in BODIES else None
                said = caller.call(method, path, body, there.headers(who, method, path, b""), connection)
                assert (who, method, path, said.status, said.body) == (who, method, path, 404, b"")
                assert set(said.headers) == {"content-length"}
            connection.close()
