"""Who calls at a TLS device API, by hand: any key, any headers, any bytes, from any address of 127.0.0.0/8."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import ssl
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place
from thinwire.core.serialization import MAX_HEADER_BYTES, reply_to_bytes
from thinwire.core.types import Reply
from thinwire.store import FileSpool, Store
from thinwire.transport.device.identity import Trust
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, JOIN, PULL, PUSH, WORDS, block, inflate, pack, unblock
from thinwire.transport.protocol.signing import Signer
from thinwire.transport.server.tls import InternalCA

PATIENCE_S = 60.0


class Door(Protocol):
    """Where a caller calls: a place of this process, or a device API in another one."""

    @property
    def url(self) -> str: ...
    @property
    def authority(self) -> InternalCA | None: ...


def address_of(api: Door) -> tuple[str, int]:
    parts = urlsplit(api.url)
    return str(parts.hostname), int(parts.port or 0)


class TlsPlace(Place):
    """A TLS device API on a real store: invitations, rows and notes are those of an aggregator."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = Store.open(folder / "store.sqlite3", clock=options.get("clock"))
        super().__init__(folder, self.store.roster, lambda: FileSpool(folder / "spool"), tls=True, **options)
        self.new_secret = self.invited

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self)

    def invited(self, **wanted: Any) -> str:
        """The secret of a new invitation."""
        return self.store.invitations.invite(**wanted)[0].secret

    def context(self) -> ssl.SSLContext:
        """What a device that joined holds."""
        assert self.authority is not None
        return Trust("", self.authority.cas()).context()

    def close(self) -> None:
        super().close()
        self.store.close()


@contextlib.contextmanager
def tls_place(folder: Path, **options: Any) -> Iterator[TlsPlace]:
    made = TlsPlace(folder, **options)
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Said:
    """An answer of the device API; `kind` and `why` are those of a refusal, else empty."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def told(self) -> dict[str, Any]:
        """Its JSON, as far as it is some."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def kind(self) -> str:
        return str(self.told.get("error", ""))

    @property
    def short(self) -> tuple[int, str]:
        return self.status, self.kind

    @property
    def looks(self) -> tuple[int, Mapping[str, str], Any]:
        """All of it that someone outside can see, but for the time of day and its digits."""
        headers = {name: value for name, value in self.headers.items() if name != "content-length"}
        return self.status, headers, {**self.told, "now": 0} if self.told else self.body


class Caller:
    """One key at the device API, by default a self-made one. Each call is a connection of its own.

    `now` is the caller's clock, `source` its address, `server_name` what it selects TLS for.
    """

    def __init__(
        self,
        place: Door,
        name: str = "pi-1",
        key: ec.EllipticCurvePrivateKey | None = None,
        *,
        source: str = "127.0.0.1",
        now: Callable[[], float] | None = None,
    ) -> None:
        self.place, self.name, self.source = place, name, source
        self.key = key or ec.generate_private_key(ec.SECP384R1())
        self.signer = Signer(self.key) if now is None else Signer(self.key, lambda: datetime.fromtimestamp(now(), UTC))
        self.process = ""

    def connection(self) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection(*address_of(self.place), timeout=PATIENCE_S, source_address=(self.source, 0))
        made.connect()
        if self.place.authority is not None:
            context = Trust("", self.place.authority.cas()).context()
            made.sock = context.wrap_socket(made.sock, server_hostname=self.place.authority.server_name())
        return made

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        on: http.client.HTTPConnection | None = None,
    ) -> Said:
        """With these headers, or signed for what is sent; `on` a connection that stays, or on one of its own."""
        connection = on or self.connection()
        try:
            given = self.signed(method, path, body or b"") if headers is None else headers
            connection.request(method, path, body, dict(given))
            got = connection.getresponse()
            return Said(got.status, got.read(), {name.lower(): value for name, value in got.getheaders()})
        finally:
            if on is None:
                connection.close()

    def signed(self, method: str, path: str, body: bytes = b"", *, whole_key: bool | None = None) -> dict[str, str]:
        whole = path in (HELLO, JOIN) if whole_key is None else whole_key
        return self.signer.headers(method, path, hashlib.sha256(body).digest(), len(body), whole_key=whole)

    def join(self, secret: str, name: str = "") -> Said:
        said = {"secret": secret, "name": name or self.name, "versions": {}}
        return self.call("POST", JOIN, pack(json.dumps(said).encode()))

    def hello(self) -> Said:
        said = hello(self.name)
        self.process = said.process
        return self.call("POST", HELLO, pack(registration.to_bytes(said)))

    def pull(self, wait_s: float = 0.0) -> Said:
        return self.call("POST", PULL, self.wanted(wait_s))

    def push(self, reply: Reply, parts: bytes = b"") -> Said:
        return self.call("POST", PUSH, pack(reply_to_bytes(reply)) + parts)

    def wanted(self, wait_s: float = 0.0) -> bytes:
        """The body of a pull."""
        return pack(json.dumps({"process": self.process, "wait_s": wait_s, "in_flight": []}).encode())


def joined(place: TlsPlace, name: str = "pi-1", **how: Any) -> Caller:
    """A caller whom an invitation approved; it has not said hello yet."""
    caller = Caller(place, name, **how)
    assert caller.join(place.new_secret()).status == 200
    return caller


def pending(place: TlsPlace, name: str) -> Caller:
    """One that waits for a person."""
    caller = Caller(place, name)
    assert caller.join(place.invited(approve_manually=True)).told["state"] == "pending"
    return caller


def revoked(place: TlsPlace, name: str) -> Caller:
    caller = joined(place, name)
    place.store.roster.revoke(name)
    return caller


def assigned(said: Said) -> dict[str, Any]:
    """The assignment in a pull's answer; {} where there is none."""
    _, rest = unblock(said.body)
    assignment, _ = unblock(bytes(rest))
    return dict(json.loads(inflate(assignment, MAX_HEADER_BYTES))) if assignment else {}


def bomb(count: int) -> bytes:
    """4 KB that are `count` empty lists of JSON."""
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return block(deflate.compress(b"[" + b"[]," * count + b"[]]") + deflate.flush())
