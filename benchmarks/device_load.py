"""Measure what one hostile device costs the others: memory, waiting, and the processor for signatures that are refused.

    python -m benchmarks.device_load [--preset small|full|committed] --json

One device floods the aggregator's device API from a process of its own, on as many connections as one device may have:
replies of 150 kB whose JSON is small on the wire and large in memory, hellos, and parts that do not fit their digest.
Meanwhile another device polls, 50 times a second. Before that, a stranger sends requests with a wrong signature. All of
it runs plain on loopback and over TLS; a figure is the larger of both. The flood is signed before it is sent, so that
its own work is small; both ends share this machine's cores.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.device_api_process import CODEC, RUN, ApiProcess, api_process
from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.processes import status_bytes
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.serialization import MAX_HEADER_BYTES, reply_to_bytes
from thinwire.core.types import Part, ReplyHeader, UpdateId
from thinwire.transport.device.enroll import trust_of
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, JOIN, PUSH, pack
from thinwire.transport.protocol.signing import SIGNATURE_HEADER, Signer, public_der
from thinwire.transport.server.connections import CONNECTIONS_OF_ONE

POLLS_PER_S = 50.0
LARGE_JSON_BYTES = MAX_HEADER_BYTES - 2**16  # the most that any run's header may have is more than this
PADDING_BYTES = 150_000  # that do not deflate: a header may inflate to 32 times its length
PART_BYTES = 300_000  # more than comes in the request of its header
START = "from benchmarks.device_load import flood; flood()"
TASK = TaskReport("digits", "1.0", "5" * 64, "1" * 64, ("identity", "topk"))


@dataclass(frozen=True)
class Preset:
    """`signed`: how many requests of each kind are signed before the flood; `joins`: refused ones that are timed."""

    flood_s: float
    signed: int
    polls: int
    joins: int


PRESETS = {
    "tiny": Preset(0.2, 20, 20, 20),  # seconds: for the tests
    "small": Preset(5.0, 400, 200, 500),
    "full": Preset(30.0, 2000, 1000, 2000),
    "committed": Preset(10.0, 800, 500, 1000),
}


@dataclass(frozen=True)
class Line:
    """Connects a stranger to the device API."""

    url: str
    trust: Trust | None

    def open(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        made = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60.0)
        made.connect()
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.trust is not None:
            name = self.trust.names(str(parts.hostname))[0]
            made.sock = self.trust.context().wrap_socket(made.sock, server_hostname=name)
        return made


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Plain, then over TLS."""
    rows = list[dict[str, Any]]()
    for name in ("plain", "tls"):
        (folder / name).mkdir()
        rows.append({"transport": name, **_at_one_api(preset, folder / name, plain=name == "plain")})
        note(f"{name}: {rows[-1]}")
    figures = ("flood_memory_mb", "honest_pull_ratio", "refused_signature_ms")
    return rows, {name: max(row[name] for row in rows) for name in figures}


def _at_one_api(preset: Preset, folder: Path, *, plain: bool) -> dict[str, Any]:
    with api_process(folder, plain=plain) as api:
        trust = None if plain else trust_of(api.url, api.pin)
        keys = {name: _let_in(api, folder, name) for name in ("honest", "flood")}
        link = HttpsLink(api.url, keys["honest"], "honest", folder / "honest", trust)
        link.hello(Hello("honest", uuid.uuid4().hex, (TASK,)))
        try:
            refused_ms = _refused(api, Line(api.url, trust), preset.joins, HELLO if plain else JOIN)
            idle = _polls(link, preset.polls)
            _forget_peak(api.pid)
            before = status_bytes(api.pid, "VmRSS")
            with _flooding(folder, preset, Line(api.url, trust)) as told:
                flooded = _polls(link, preset.polls, preset.flood_s)
            peak = status_bytes(api.pid, "VmHWM")
        finally:
            link.close()
    return {
        "flood_memory_mb": max(0, peak - before) / 1e6,
        "honest_pull_ratio": _p95(flooded) / _p95(idle),
        "refused_signature_ms": refused_ms,
        "idle_pull_p95_ms": 1000 * _p95(idle),
        "flooded_pull_p95_ms": 1000 * _p95(flooded),
        "flooded_pull_max_ms": 1000 * max(flooded),
        "pulls": len(flooded),
        **{f"flood {answer}": count for answer, count in sorted(told.items())},
    }


def _let_in(api: ApiProcess, folder: Path, name: str) -> ec.EllipticCurvePrivateKey:
    (folder / name).mkdir()
    key = device_key(folder / name)
    api.request("add", devices={name: public_der(key.public_key()).hex()})
    return key


def _polls(link: HttpsLink, count: int, at_least_s: float = 0.0) -> list[float]:
    """Seconds of each poll that is answered at once."""
    took, end = list[float](), time.monotonic() + at_least_s
    while len(took) < count or time.monotonic() < end:
        began = time.monotonic()
        link.pull(0.0)
        took.append(time.monotonic() - began)
        time.sleep(max(0.0, 1 / POLLS_PER_S - took[-1]))
    return took


def _p95(took: list[float]) -> float:
    return sorted(took)[int(0.95 * (len(took) - 1))]


def _forget_peak(pid: int) -> None:
    """Let `VmHWM` begin again (proc(5), clear_refs); where that is not allowed the peak of before counts too."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _refused(api: ApiProcess, line: Line, count: int, path: str) -> float:
    """Milliseconds of the aggregator's processor for each request with a wrong signature, its share of TLS included."""
    body = pack(json.dumps({"secret": "0" * 32, "name": "stranger", "versions": {}}).encode())
    signer, digest = Signer(ec.generate_private_key(ec.SECP256R1())), hashlib.sha256(body).digest()
    other = signer.headers("POST", path, whole_key=True)[SIGNATURE_HEADER]
    said = [signer.headers("POST", path, digest, len(body), whole_key=True) for _ in range(count)]
    before, connection = api.cpu_s(), line.open()
    for headers in said:
        connection.request("POST", path, body, {**headers, SIGNATURE_HEADER: other})
        answer = connection.getresponse()
        answer.read()
        if answer.status not in (401, 429):
            raise RuntimeError(f"a wrong signature was answered with {answer.status}")
        if answer.will_close:
            connection.close()
            connection = line.open()
    connection.close()
    return 1000 * (api.cpu_s() - before) / count


@contextmanager
def _flooding(folder: Path, preset: Preset, line: Line) -> Iterator[dict[str, int]]:
    """While the block lasts the device `flood` floods; afterwards the dict says how often it was answered what."""
    told = dict[str, int]()
    trust = None if line.trust is None else [line.trust.url, list(line.trust.cas), line.trust.server_name]
    config = {"folder": str(folder / "flood"), "url": line.url, "trust": trust, "signed": preset.signed}
    process = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps(config)], cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the flood did not begin")
        process.stdin.write("go\n")
        process.stdin.flush()
        yield told
        process.stdin.close()
        told |= json.loads(process.stdout.readline())
    finally:
        with suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def flood() -> None:
    """The flooding device's process: it signs, says `ready`, and floods from the first line of its input to the end."""
    config = json.loads(sys.argv[1])
    trust = Trust(config["trust"][0], tuple(config["trust"][1]), config["trust"][2]) if config["trust"] else None
    line, signer = Line(config["url"], trust), Signer(device_key(Path(config["folder"])))
    turns = iter([_turn(signer, number) for number in range(3 * config["signed"])])
    print("ready", flush=True)
    sys.stdin.readline()
    ending, told, lock = threading.Event(), Counter[str](), threading.Lock()

    def send() -> None:
        connection: http.client.HTTPConnection | None = None
        while not ending.is_set():
            with lock:
                turn = next(turns, None) or _turn(signer, random.randrange(10**9))
            for kind, method, path, body, headers in turn:
                try:
                    connection = connection or line.open()
                    connection.request(method, path, body, headers)
                    answer = connection.getresponse()
                    answer.read()
                    said, closes = str(answer.status), answer.will_close
                except (OSError, http.client.HTTPException):
                    said, closes = "cut off", True
                with lock:
                    told[f"{kind} {said}"] += 1
                if closes and connection is not None:
                    connection.close()
                    connection = None

    threads = [threading.Thread(target=send, daemon=True) for _ in range(CONNECTIONS_OF_ONE)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ending.set()
    print(json.dumps(told), flush=True)


Request = tuple[str, str, str, bytes, dict[str, str]]  # kind, method, path, body, headers


def _turn(signer: Signer, number: int) -> list[Request]:
    """A reply that is large in memory, an upload's header with a wrong part behind it, or a hello, in turn."""
    if number % 3 == 0:
        return [_posted(signer, "large reply", PUSH, LARGE)]
    if number % 3 == 1:
        said = Hello("flood", "1" * 32, (TASK,))
        return [_posted(signer, "hello", HELLO, pack(registration.to_bytes(said)))]
    update = UpdateId(RUN, "flood", number)
    header = ReplyHeader(f"assignment-{number}", update, 0, 1, 1, 1.0, 1.0, {}, parts=(WRONG,), codec=CODEC)
    path = f"/tw/v1/parts/{RUN}/{number}/0?offset=0"
    headers = signer.headers("PUT", path, bytes.fromhex(WRONG.sha256), PART_BYTES)
    part = ("wrong part", "PUT", path, bytes(PART_BYTES), headers)
    return [_posted(signer, "upload", PUSH, pack(reply_to_bytes(header))), part]


def _posted(signer: Signer, kind: str, path: str, body: bytes) -> Request:
    headers = signer.headers("POST", path, hashlib.sha256(body).digest(), len(body), whole_key=path == HELLO)
    return kind, "POST", path, body, headers


def _large() -> bytes:
    """150 kB on the wire that are over a million empty lists in memory."""
    padding = base64.b64encode(random.Random(1).randbytes(PADDING_BYTES))
    lists = (LARGE_JSON_BYTES - len(padding)) // 3
    return pack(b'{"pad":"' + padding + b'","metrics":[' + b"[]," * lists + b"[]]}")


LARGE = _large()
WRONG = Part("frame/0", PART_BYTES, "0" * 64)


if __name__ == "__main__":
    run_in_folder("device_load", __doc__, PRESETS, measure)
