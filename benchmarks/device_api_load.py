"""Measure what devices and strangers cost a device API: handshakes, requests, rounds, a quiet day, a restart."""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.device_api_process import CODEC, RUN, ApiProcess
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import Hello, TaskReport
from thinwire.core.link_state import POLL_S
from thinwire.core.types import Part, ReplyHeader, Timings, UpdateId
from thinwire.transport.device.enroll import trust_of
from thinwire.transport.device.identity import Trust
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.protocol.http import PULL, pack
from thinwire.transport.protocol.signing import Signer, public_der

T = TypeVar("T")
R = TypeVar("R")
AT_ONCE = 24  # the device API takes 32 connections of one address that have not signed yet
DAY_S = 86_400.0
HEADERS_BYTES = 20 + 32  # of a segment: IPv4, and TCP with timestamps
KEEPALIVE_S = 60.0  # transport/device/connect.py
SEGMENTS = struct.Struct("<II")  # segs_out and segs_in, linux/tcp.h
SEGMENTS_AT = 136  # in struct tcp_info


@dataclass
class Devices:
    """Devices that a device API has approved, each with a link. `links` are not connected yet."""

    names: list[str]
    links: list[HttpsLink]
    keys: list[ec.EllipticCurvePrivateKey]
    processes: list[str]
    trust: Trust

    @classmethod
    def admitted(cls, api: ApiProcess, count: int, folder: Path) -> Devices:
        names = [f"{folder.name}-{number}" for number in range(count)]
        keys = [ec.generate_private_key(ec.SECP256R1()) for _ in names]
        api.request(
            "add", devices={name: public_der(key.public_key()).hex() for name, key in zip(names, keys, strict=True)}
        )
        trust = trust_of(api.url, api.pin)
        links = []
        for name, key in zip(names, keys, strict=True):
            (folder / name).mkdir(parents=True)
            links.append(HttpsLink(api.url, key, name, folder / name, trust))
        return cls(names, links, keys, [uuid.uuid4().hex for _ in names], trust)

    def greet(self) -> float:
        """Each says hello; gives the seconds within which the last one was told that devices come back."""
        task = TaskReport("digits", "1.0", "5" * 64, "1" * 64, ("identity", "topk"))
        said = [Hello(name, process, (task,)) for name, process in zip(self.names, self.processes, strict=True)]
        welcomes = list(_each(lambda one: one[0].hello(one[1]), list(zip(self.links, said, strict=True))))
        return max(welcome.spread_s for welcome in welcomes)

    def come_back(self) -> float:
        """Seconds until each has been heard again, `AT_ONCE` at a time and nobody waiting on purpose."""
        began = time.monotonic()
        list(_each(lambda link: link.pull(0.0), self.links))
        return time.monotonic() - began

    def close(self) -> None:
        for link in self.links:
            link.close()


def handshakes(api: ApiProcess, trust: Trust, count: int) -> float:
    """Seconds for so many strangers who shake hands, are verified against, and go."""
    host, port = _address(api.url)
    context, name = trust.context(), trust.names(host)[0]

    def one(number: int) -> None:
        source = (f"127.0.0.{2 + number % 200}", 0)  # as many hosts would: one may not have many unsigned connections
        with (
            socket.create_connection((host, port), 20.0, source) as raw,
            context.wrap_socket(raw, server_hostname=name) as tls,
        ):
            tls.unwrap()

    began = time.monotonic()
    _each(one, range(count))
    return time.monotonic() - began


def requests(api: ApiProcess, devices: Devices, each: int) -> float:
    """Seconds for `each` polls of every device that are answered at once, on a connection that stays.

    They are signed before: it is the device API's time that counts.
    """
    host, port = _address(api.url)
    context, name = devices.trust.context(), devices.trust.names(host)[0]
    calls = []
    for key, process in zip(devices.keys, devices.processes, strict=True):
        body = pack(json.dumps({"process": process, "wait_s": 0.0, "in_flight": []}).encode())
        signer, digest = Signer(key), hashlib.sha256(body).digest()
        signed = [signer.headers("POST", PULL, digest, len(body)) for _ in range(each)]
        said = [_posted(host, PULL, headers, body) for headers in signed]
        raw = socket.create_connection((host, port), 20.0)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        calls.append((context.wrap_socket(raw, server_hostname=name), said))

    def one(call: tuple[ssl.SSLSocket, list[bytes]]) -> None:
        tls, said = call
        with tls, tls.makefile("rb") as answers:
            for request in said:
                tls.sendall(request)
                if not answers.readline().startswith(b"HTTP/1.1 200"):
                    raise RuntimeError("a poll was refused")
                length = 0
                while line := answers.readline().strip().lower():
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                answers.read(length)

    began = time.monotonic()
    _each(one, calls)
    return time.monotonic() - began


class Answering:
    """Each device waits for assignments and answers them with so many bytes, until the block ends."""

    def __init__(self, devices: Devices, payload_bytes: int, folder: Path) -> None:
        self._devices, self._ending = devices, threading.Event()
        self._body = hashlib.shake_128(b"up").digest(payload_bytes)
        self._bundle = folder / "answer"
        self._bundle.write_bytes(self._body)
        pairs = zip(devices.names, devices.links, strict=True)
        self._threads = [threading.Thread(target=self._serve, args=pair, daemon=True) for pair in pairs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._devices.close()
        for thread in self._threads:
            thread.join(20.0)

    def _serve(self, name: str, link: HttpsLink) -> None:
        part = Part("frame/0", len(self._body), hashlib.sha256(self._body).hexdigest())
        while not self._ending.is_set():
            try:
                delivery = link.pull(POLL_S)
            except ThinwireError:
                if self._ending.is_set():
                    return
                raise
            if delivery is None:
                continue
            assignment = delivery.assignment
            header = ReplyHeader(
                assignment.assignment_id, UpdateId(RUN, name, assignment.round), assignment.base_version, 96, 12,
                11.25, 0.73205,
                {"train/loss": (41.72911, 96.0), "eval/loss": (40.1833, 96.0), "eval/accuracy": (71.0, 96.0)},
                Timings(0.0123, 0.0001, 0.1034, 2.0412, 0.0377), (part,), CODEC, residual_norm=0.2931,
            )  # fmt: skip
            link.push(header, self._bundle)


@dataclass(frozen=True)
class Poll:
    """Holds what one long poll that brings nothing costs its line: bytes inside TCP, and segments, both ways."""

    bytes: int
    segments: int
    waited_s: float

    def a_day(self) -> float:
        """Bytes on the wire of polls of `POLL_S` one after the other, with the headers of TCP and IPv4.

        The probes that keep the line open are as many as polls have on average, whose length a client draws from
        within a tenth of `POLL_S`: this one may have had more or fewer.
        """
        probes = POLL_S / KEEPALIVE_S - 0.5 - self.waited_s // KEEPALIVE_S
        segments = self.segments + 2 * 2 * probes  # from both ends, and each is answered
        return (self.bytes + HEADERS_BYTES * segments) * DAY_S / POLL_S


def quiet_poll(api: ApiProcess, device: Devices, wait_s: float) -> Poll:
    """Measure one poll on a line that is open, as the device API counts its bytes and the kernel its segments."""
    (link,) = device.links
    link.pull(0.0)
    line = link._pulling._line
    assert line is not None
    before, segments = api.stats(), _segments(line.sock)
    began = time.monotonic()
    link.pull(wait_s)
    waited_s = time.monotonic() - began
    after = api.stats()
    spent = sum(after[key] - before[key] for key in ("sent_bytes", "received_bytes"))
    time.sleep(0.2)  # the last acknowledgement
    return Poll(spent, _segments(line.sock) - segments, waited_s)


def _segments(sock: socket.socket) -> int:
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return sum(SEGMENTS.unpack_from(told, SEGMENTS_AT))


def _posted(host: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("https://").rpartition(":")
    return host, int(port)


def _each(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(call, items))
