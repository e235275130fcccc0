"""A device that speaks to the device API by hand."""

from __future__ import annotations

import hashlib
import http.client
import json

from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.fleet_words import hello
from tests.support.transport_doubles import Place
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import Reply
from thinwire.transport.device.identity import device_key
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, PULL, PUSH, pack
from thinwire.transport.protocol.signing import Signer

Answer = tuple[int, str]


class Caller:
    """A device that speaks by hand."""

    def __init__(self, here: Place, name: str = "pi-1", key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.address, self.name = here.fleet.address, name
        folder = here.folder / "callers" / name
        folder.mkdir(parents=True, exist_ok=True)
        self.signer = Signer(key or device_key(folder))
        self.process = ""

    def call(
        self, path: str, header: bytes, rest: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """Status and kind of refusal."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            given = self.signed(path, header, rest, method) if headers is None else headers
            connection.request(method, path, pack(header) + rest, given)
            got = connection.getresponse()
            body = got.read()
            return got.status, json.loads(body)["error"] if got.status >= 400 and body else ""
        finally:
            connection.close()

    def signed(self, path: str, header: bytes, rest: bytes = b"", method: str = "POST") -> dict[str, str]:
        body = pack(header) + rest
        return self.signer.headers(method, path, hashlib.sha256(body).digest(), len(body), whole_key=path == HELLO)

    def hello(self, name: str = "") -> Answer:
        said = hello(name or self.name)
        self.process = said.process
        return self.call(HELLO, registration.to_bytes(said))

    def pull(self, process: str = "") -> Answer:
        wanted = {"process": process or self.process, "wait_s": 0.0, "in_flight": []}
        return self.call(PULL, json.dumps(wanted).encode())

    def push(self, reply: Reply, rest: bytes = b"") -> Answer:
        return self.call(PUSH, reply_to_bytes(reply), rest)
