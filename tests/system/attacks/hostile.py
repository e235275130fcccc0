"""Every message that a device may send, mutated, oversized or truncated, and rightly signed: it reaches the readers.

Requests whose line, headers or signatures are wrong are made by tests/support/fuzzed_requests.py.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import http.client
import json
import random
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from docs.generate.device_api import KINDS
from tests.support.callers import Caller, Said
from tests.support.fleet_words import answer, hello
from tests.support.fuzzed_requests import BOMB, ODD, WORDS
from thinwire.core.fleet import TaskReport
from thinwire.core.serialization import reply_to_json
from thinwire.core.types import Failure
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import CA, HELLO, JOIN, LEAVE, PULL, PUSH, block, pack

ALLOWED = {"200", "206", "404", *KINDS} - {"503 internal", "503 disk"}
BARE = {said[:3] for said in ALLOWED}  # the answer to a HEAD has no body
HUNG_UP = "(hung up)"
PATIENCE_S = 2.0  # of a request that is cut short, or waits for ever
KIND_OF = {"hello": 4, "pull": 12, "update": 28, "upload": 14, "evaluation": 10, "failure": 14, "join": 6, "bundle": 4,
           "offset": 4, "leave": 1, "ca": 3}  # fmt: skip
VALUES: list[Any] = [
    *ODD, float("nan"), float("inf"), -0.0, 2**53 + 1, -(2**63), 1e-320, "\u4e00" * 3000, "\U0001f600" * 500, "a\x00b",
    "\x1b[2J", "digits-1/evil-1/1", "toy-1/pi-1/1", "0" * 64, [["a", 1]] * 20, {"a": {"a": {"a": {}}}}, {"": None},
    [None] * 300, {f"eval/{nth}": [1, 1] for nth in range(200)}, {"eval/loss": [1e308, 1]}, "2026", 1.5, "1", False,
]  # fmt: skip


@functools.cache
def chinese() -> str:
    """A million letters that take three bytes each in UTF-8, and six in ASCII JSON."""
    return "".join(map(chr, random.Random(17).choices(range(0x4E00, 0x9FA5), k=1_000_000)))


@dataclass(frozen=True)
class Sound:
    """A request as it should be: `json` is the first block of its body, `rest` what follows."""

    method: str
    target: str
    json: dict[str, Any] | None = None
    rest: bytes = b""

    @property
    def body(self) -> bytes:
        return (pack(json.dumps(self.json).encode()) if self.json is not None else b"") + self.rest


@dataclass
class Hostile:
    """`send(count)` makes so many requests of the devices `callers`; the last of them may leave, and so be revoked.

    `assignments` gives ids of assignments that are open, of this device or of others. The same seed makes the same
    messages, but for signatures and what `assignments` gives.
    """

    callers: Sequence[Caller]
    seed: int
    assignments: Callable[[], list[str]] = list
    run: str = "toy-1"
    seen: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def __post_init__(self) -> None:
        self.draw, self.number = random.Random(self.seed), 0
        self._lines: dict[str, http.client.HTTPConnection] = {}

    def send(self, count: int) -> None:
        """Make requests, and hold each answer against the page of the device API."""
        for _ in range(count):
            kind = self.draw.choices(list(KIND_OF), list(KIND_OF.values()))[0]
            leaving = kind == "leave" or self.draw.random() < 0.02
            caller = self.callers[-1] if leaving else self.draw.choice(self.callers[:-1])
            given = self.sound(kind, caller)
            way = self.draw.choices(
                (self.valued, self.worded, self.sized, self.blocked, self.cut, None), (44, 22, 8, 10, 10, 6)
            )[0]
            if given.method != "POST" and way is not None and self.draw.random() < 0.9:
                way = self.cut  # it has no body
            method, target, body = (given.method, given.target, given.body) if way is None else way(given)
            told = self._told(caller, method, target, body)
            self.seen[f"{kind} {told}"] += 1
            self.sent += 1
            fine = told in (BARE if method == "HEAD" else ALLOWED)
            assert fine or told == HUNG_UP, (self.seed, self.sent, kind, told, target, body[:200])
            if way is None and kind == "upload" and told == "200":
                self._upload(caller, given)

    def begin(self) -> None:
        """Have each say hello, as a device without a task that could be requested."""
        for caller in self.callers:
            said = replace(hello(caller.name), tasks=(TaskReport("other"),))
            caller.process = said.process
            self._told(caller, "POST", HELLO, pack(registration.to_bytes(said)))

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    # Sound messages

    def sound(self, kind: str, caller: Caller) -> Sound:
        self.number += 1
        assignment_id = self.draw.choice(
            [*self.assignments(), f"{self.run}.1.{caller.name}", f"{self.run}.2.pi-1", "nobody", ""]
        )
        body = self.draw.randbytes(self.draw.choice((0, 1, 50, 5000)))
        part = f"/tw/v1/parts/{self.run}/{self.draw.randrange(1, self.number + 1)}/{self.draw.choice((0, 0, 1, 9))}"
        match kind:
            case "ca":
                return Sound("GET", CA)
            case "leave":
                return Sound("POST", LEAVE)
            case "bundle":
                return Sound("GET", f"/tw/v1/assignments/{assignment_id or 'x'}/bundle")
            case "offset":
                return Sound("HEAD", part)
            case "join":
                return Sound("POST", JOIN, {"secret": f"{self.draw.getrandbits(128):032x}", "name": "evil-9"})
            case "hello":
                said = replace(hello(caller.name, caller.process), tasks=(TaskReport("other", codecs=("int8",)),))
                return Sound("POST", HELLO, json.loads(registration.to_bytes(said)))
            case "pull":
                held = [assignment_id] * self.draw.randrange(3)
                return Sound("POST", PULL, {"process": caller.process, "wait_s": 0.0, "in_flight": held})
            case "failure":
                return Sound(
                    "POST", PUSH, reply_to_json(Failure("task-error", "ValueError in task.py:3", assignment_id))
                )
            case "evaluation":
                return Sound("POST", PUSH, self._reply(caller, assignment_id))
            case "upload":
                large = bytes(self.draw.choice((1, 300_000)))
                return Sound("POST", PUSH, self._reply(caller, assignment_id, large))
        return Sound("POST", PUSH, self._reply(caller, assignment_id, body), body)

    def _reply(self, caller: Caller, assignment_id: str, *bodies: bytes) -> dict[str, Any]:
        header = answer(caller.name, assignment_id, self.number, *bodies)
        run = self.draw.choice((self.run, self.run, "digits-1", f"made-up-{self.number}"))
        return reply_to_json(replace(header, update_id=replace(header.update_id, run=run)))

    def _upload(self, caller: Caller, given: Sound) -> None:
        """The part of an upload that was offered: in pieces, of the wrong place, of other bytes, or cut short."""
        assert given.json is not None
        _, _, sequence = given.json["update_id"].split("/")
        run, length = given.json["update_id"].split("/")[0], given.json["parts"][0]["length"]
        at, data = 0, bytes(length)
        for _ in range(3):
            size = self.draw.choice((length, length // 2, 1, 0))
            wrong = self.draw.choice((data, data, self.draw.randbytes(length), data + b"x"))[at : at + size]
            offset = self.draw.choice((str(at), str(at), "0", "-1", "9" * 20, "\u0661", "x"))
            target = f"/tw/v1/parts/{run}/{sequence}/0?offset={offset}"
            digest = hashlib.sha256(data).digest()  # of the whole part, as the protocol has it
            headers = caller.signer.headers("PUT", target.encode("ascii", "replace").decode(), digest, len(wrong))
            told = self._told(caller, "PUT", target.encode("ascii", "replace").decode(), wrong, headers)
            self.seen[f"part {told}"] += 1
            assert told == HUNG_UP or told in ALLOWED, (self.seed, self.sent, "part", told, target)
            at += len(wrong) * (told == "200")

    # What becomes of them: (method, target, body)

    def valued(self, given: Sound) -> tuple[str, str, bytes]:
        """Another value somewhere in the JSON, a key less, or one more."""
        if given.json is None:
            return self.blocked(given)
        raw: Any = json.loads(json.dumps(given.json))
        for _ in range(self.draw.choice((1, 1, 1, 2, 4))):
            place: Any = raw
            while place:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = self.draw.choice(keys)
                if isinstance(place[key], (dict, list)) and place[key] and self.draw.random() < 0.7:
                    place = place[key]
                    continue
                if isinstance(place, dict) and self.draw.random() < 0.15:
                    del place[key]
                elif isinstance(place, dict) and self.draw.random() < 0.1:
                    place[self.draw.choice(["x", "\ud800", "", "transfer", "type", "eval/loss", "a" * 3000])] = 1
                else:
                    place[key] = copy.deepcopy(self.draw.choice(VALUES))
                break
        if isinstance(raw.get("wait_s"), int | float) and raw["wait_s"] > 0 and self.draw.random() < 0.98:
            raw["wait_s"] = 0.001  # else most of the time is spent on waiting
        if given.target == HELLO and self.draw.random() < 0.9:
            raw["process"] = given.json["process"]  # of another process it is told after a second only
        text = json.dumps(raw, ensure_ascii=self.draw.random() < 0.5)
        return given.method, given.target, pack(text.encode("utf-8", "surrogatepass")) + given.rest

    def worded(self, given: Sound) -> tuple[str, str, bytes]:
        """The JSON's bytes changed, cut, doubled or in another encoding."""
        if given.json is None:
            return self.blocked(given)
        text = json.dumps(given.json)
        data = bytearray(text.encode(self.draw.choice(("utf-8", "utf-8", "utf-8", "utf-16", "utf-8-sig", "utf-32"))))
        for _ in range(self.draw.choice((1, 1, 2, 9))):
            at = self.draw.randrange(len(data) + 1)
            match self.draw.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.draw.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = self.draw.choice(WORDS)
                case 3:
                    data[at:at] = data[at : at + self.draw.choice((1, 30, 300))]
                case 4:
                    data = bytearray(data[:1] + bytes(data[1:]).rstrip(b"}") + b"," + bytes(data[1:]))
                case _:
                    del data[at : at + self.draw.choice((1, 4, 60))]
            if not data:
                break
        return given.method, given.target, pack(bytes(data)) + given.rest

    def sized(self, given: Sound) -> tuple[str, str, bytes]:
        """Far larger than it should be."""
        raw, letters = dict(given.json or {}), "\u4e00\u4e01\u6f22"
        match self.draw.randrange(6):
            case 0:
                count = self.draw.choices((30_000, 60_000, 1_000_000), (10, 10, 1))[0]
                raw["codec"] = chinese()[:count]
            case 1:
                raw["metrics"] = {f"{nth}{letters}": [1.0, 1.0] for nth in range(self.draw.choice((67, 3000)))}
            case 2:
                raw["parts"] = [{"name": "f", "length": 0, "sha256": "0" * 64, "offset": 0}] * 900
            case 3:
                deep: Any = []
                for _ in range(self.draw.choice((9, 200))):
                    deep = [deep]
                raw[self.draw.choice(["held", "versions", "tasks", "timings", "text"])] = deep
            case 4:
                raw["text"] = raw["process"] = "\x00" * 20_000
            case _:
                raw |= {f"k{nth}": nth for nth in range(8000)}
        text = json.dumps(raw, ensure_ascii=False)
        return given.method, given.target, pack(text.encode()) + given.rest

    def blocked(self, given: Sound) -> tuple[str, str, bytes]:
        """No block that fits."""
        data = given.body
        body = self.draw.choice((
            data[: self.draw.randrange(len(data) + 1)], data + self.draw.randbytes(9), self.draw.randbytes(60),
            block(self.draw.randbytes(60)), struct.pack("<I", self.draw.choice((0, 2**31, 2**32 - 1))) + data[4:],
            pack(self.draw.choice(WORDS)), block(data[4:] + b"\0"), BOMB if self.draw.random() < 0.1 else b"",
        ))  # fmt: skip
        return given.method, given.target, body

    def cut(self, given: Sound) -> tuple[str, str, bytes]:
        """What follows the header is shorter, longer or another; or the whole is for another target."""
        rest = self.draw.choice((given.rest[:-1], given.rest + b"x", self.draw.randbytes(len(given.rest)), b""))
        target = given.target
        if self.draw.random() < 0.3:
            pieces = target.split("/")
            pieces[-1] = self.draw.choice(("..", "0", "9" * 17, "%00", "x" * 300, "-1"))
            target = "/".join(pieces)
        return given.method, target, replace(given, rest=rest).body

    def _told(
        self, caller: Caller, method: str, target: str, body: bytes, headers: dict[str, str] | None = None
    ) -> str:
        for _ in range(2):  # a connection that stood may have been closed by the other end meanwhile
            fresh = caller.name not in self._lines
            try:
                if fresh:
                    self._lines[caller.name] = caller.connection()
                    self._lines[caller.name].sock.settimeout(PATIENCE_S)
                line = self._lines[caller.name]
                said: Said = caller.call(method, target, body, headers, on=line)
            except (OSError, http.client.HTTPException, ssl.SSLError) as error:
                if (dead := self._lines.pop(caller.name, None)) is not None:
                    dead.close()
                if fresh or isinstance(error, TimeoutError):
                    return HUNG_UP
                continue
            if said.headers.get("connection") == "close":
                self._lines.pop(caller.name).close()
            return f"{said.status} {said.kind}".strip() if said.status >= 400 else str(said.status)
        return HUNG_UP
