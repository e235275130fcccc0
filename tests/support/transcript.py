"""A recorded session: raw requests and raw answers of the device API, in the order in which they were made.

In FOLDER, `NN-ROUTE.request` and `NN-ROUTE.answer` are the bytes inside TLS, heads and bodies. `session.json` says when
it was, and of each exchange on which connection it was made, what happened before it, and after how many bytes of its
body it was cut (-1: not).
"""

from __future__ import annotations

import http.client
import io
import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from thinwire.core.serialization import MAX_HEADER_BYTES
from thinwire.transport.protocol.http import find_route, inflate, unblock

GOLDEN = Path(__file__).parents[1] / "golden" / "transcripts"
BLOCKS = {"hello": 1, "pull": 2}  # how many blocks of JSON an answer of 200 begins with


@dataclass(frozen=True)
class Exchange:
    name: str
    connection: int
    happened: tuple[str, ...]
    request: bytes
    answer: bytes
    cut: int = -1

    @property
    def line(self) -> tuple[str, str]:
        """Method and target."""
        method, target, _ = self.request.split(b"\r\n", 1)[0].decode().split(" ")
        return method, target

    @property
    def route(self) -> str:
        at = find_route(*self.line)
        assert at is not None, self.line
        return at.route.name


@dataclass(frozen=True)
class Transcript:
    """`wall`: the time at which both clocks stood; `pin`: of the CA that the device API had."""

    wall: float
    pin: str
    exchanges: tuple[Exchange, ...]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        said = []
        for each in self.exchanges:
            (folder / f"{each.name}.request").write_bytes(each.request)
            (folder / f"{each.name}.answer").write_bytes(each.answer)
            said.append({key: value for key, value in asdict(each).items() if key not in ("request", "answer")})
        text = json.dumps({"wall": self.wall, "pin": self.pin, "exchanges": said}, indent=1)
        (folder / "session.json").write_text(text + "\n")

    @classmethod
    def read(cls, folder: Path) -> Transcript:
        raw = json.loads((folder / "session.json").read_text())
        exchanges = (
            Exchange(
                each["name"], each["connection"], tuple(each["happened"]),
                (folder / f"{each['name']}.request").read_bytes(), (folder / f"{each['name']}.answer").read_bytes(),
                each["cut"],
            )
            for each in raw["exchanges"]
        )  # fmt: skip
        return cls(raw["wall"], raw["pin"], tuple(exchanges))


def header_of(file: io.BufferedIOBase) -> bytes:
    """A request's or an answer's line and headers; empty at the end."""
    lines = []
    while (line := file.readline()) not in (b"", b"\r\n"):
        lines.append(line)
    return b"".join([*lines, b"\r\n"]) if lines else b""


def length_of(header: bytes) -> int:
    for line in header.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class _Given:
    """What `http.client` reads an answer from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


@dataclass(frozen=True)
class Meaning:
    """An answer without what differs from device API to device API: the CAs, the words and the time of a refusal, how
    well JSON was deflated.
    """

    status: int
    headers: dict[str, str]
    said: list[Any]
    rest: bytes

    @classmethod
    def of(cls, exchange: Exchange, answer: bytes) -> Meaning:
        got = http.client.HTTPResponse(cast(socket.socket, _Given(answer)), method=exchange.line[0])
        got.begin()
        body = got.read()
        headers = {name.lower(): value for name, value in got.getheaders()}
        if (blocks := BLOCKS.get(exchange.route, 0)) and got.status == 200:
            headers.pop("content-length")
            said = []
            for _ in range(blocks):
                data, rest = unblock(body)
                said.append(json.loads(inflate(data, MAX_HEADER_BYTES)) if data else None)
                body = bytes(rest)
        elif exchange.route == "bundle" and got.status < 400:
            said = []
        else:
            headers.pop("content-length")
            said, body = [json.loads(body)] if body else [], b""
        return cls(got.status, headers, [_plain(each) for each in said], body)

    def holds(self, before: Meaning) -> bool:
        """Whether all that `before` said is still said; more may be."""
        same = (self.status, self.rest) == (before.status, before.rest)
        return same and _holds(self.headers, before.headers) and _holds(self.said, before.said)


def _plain(said: Any) -> Any:
    if isinstance(said, dict):
        said = {**said, **({"why": ""} if isinstance(said.get("why"), str) else {})}
        said |= {"now": 0.0} if "error" in said and "now" in said else {}
        said |= {"cas": len(said["cas"])} if "cas" in said else {}
        said |= {"server_name": ""} if "server_name" in said else {}
    return said


def _holds(now: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return isinstance(now, dict) and all(name in now and _holds(now[name], before[name]) for name in before)
    if isinstance(before, list):
        return isinstance(now, list) and len(now) == len(before) and all(map(_holds, now, before))
    return bool(now == before)
