"""What a hostile aggregator answers costs a device neither its client, nor its memory, nor its processor."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.small_task import task_of
from tests.system.attacks.test_a_hostile_aggregator import (
    PATIENCE_S,
    PIECE,
    PIECES,
    Answering,
    Hostile,
    attacked,
    dumped,
    said,
)
from thinwire.client.admission import AdmissionController
from thinwire.client.calls import ENDING_CHECK_S
from thinwire.client.errors import CannotReply
from thinwire.client.loop import MAX_PULLED, MAX_PULLED_BYTES, PAUSE_S
from thinwire.core.errors import BadPayload
from thinwire.core.plan import RunPlan
from thinwire.core.plan_text import MAX_VALUES
from thinwire.core.serialization import MAX_HEADER_BYTES, assignment_from_bytes
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import PUSH, block, pack

MB = 1e6
MAX_S, MAX_MB = 3.0, 64.0  # of one message
WIDE = 30_000  # features: an update of 360 kB, which is uploaded in parts
Answer = Callable[["Uploading"], None]


class Uploading(Answering):
    """Takes uploads as well; `answers` are given to the next requests of a method."""

    server: Watched

    def do_POST(self) -> None:
        if self.path == PUSH and self._lied("POST"):
            return
        if self.path == PUSH and self.headers["content-length"] is not None:
            header = said(self.rfile.read(int(self.headers["content-length"])))
            self.server.pushes.put(header)
            large = sum(part["length"] for part in header.get("parts", ())) > 2**18
            self.answer(dumped({"offsets": [0] * len(header["parts"])} if large else {"done": True}))
            return
        super().do_POST()

    def do_PUT(self) -> None:
        self.server.uploads.append("PUT")
        if not self._lied("PUT"):
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(b'{"offset":0,"done":true}')

    def do_HEAD(self) -> None:
        self.server.uploads.append("HEAD")
        if not self._lied("HEAD"):
            self.answer(b"", 404)

    def _lied(self, method: str) -> bool:
        found = self.server.answers.get(method)
        if not found:
            return False
        found.pop(0)(self)
        return True


class Watched(Hostile):
    def __init__(self, folder: Path, tls: bool = False) -> None:
        super().__init__(folder, tls)
        self.RequestHandlerClass = Uploading
        self.answers: dict[str, list[Answer]] = {}
        self.uploads: list[str] = []


def hang_up(connection: Uploading) -> None:
    connection.rfile.read(1000)
    connection.close_connection = True


def offset(text: str) -> Answer:
    def answer(connection: Uploading) -> None:
        connection.send_response(200)
        connection.send_header("content-length", "0")
        connection.send_header("upload-offset", text)
        connection.end_headers()

    return answer


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "-1", "1_0", ""])
def test_an_offset_that_is_no_number_ends_no_client(tmp_path: Path, text: str) -> None:
    with attacked(tmp_path, Watched(tmp_path), task_of(lambda: nn.Linear(WIDE, 3))) as device:
        server = device.server
        assert isinstance(server, Watched)
        server.answers = {"PUT": [hang_up], "HEAD": [offset(text)]}
        server.assignments.put(device.assign(1, kind="init", assignment_id="small-1.init.pi-1"))
        device.require_alive(2)
        assert server.uploads[:2] == ["PUT", "HEAD"]


def endless(first: bytes, status: int = 200) -> Answer:
    """Chunks of which one has -1 bytes: http.client reads them until the other end hangs up."""

    def answer(connection: Answering) -> None:
        connection.send_response(status)
        connection.send_header("transfer-encoding", "chunked")
        connection.end_headers()
        connection.wfile.write(first + b"-1\r\n")
        for _ in range(PIECES):
            connection.wfile.write(bytes(PIECE))
            connection.server.sent += 1

    return answer


@pytest.mark.parametrize("status", [200, 503])
def test_a_chunk_of_less_than_no_bytes_is_not_read_without_end(tmp_path: Path, status: int) -> None:
    with attacked(tmp_path, Watched(tmp_path)) as device:
        device.server.lies.put(endless(b"", status))  # type: ignore[arg-type]  # a lie to a pull
        device.require_alive(1)
        assert device.server.sent < PIECES / 2, "of what the device does not read, buffers hold little"


def test_nor_is_one_in_the_answer_to_a_reply(tmp_path: Path) -> None:
    with attacked(tmp_path, Watched(tmp_path)) as device:
        server = device.server
        assert isinstance(server, Watched)
        server.answers = {"POST": [endless(b""), endless(b"", 503)]}
        device.require_alive(1)
        assert server.sent < PIECES / 2


def numbered(count: int, value: str) -> str:
    return ",".join(f'"k{nth}":{value}' for nth in range(count))


PLANS: dict[str, Callable[[], str]] = {  # texts of megabytes, which each worker that collects this file would write
    "lists": lambda: '{"run":[' + "[]," * 1_300_000 + "[]]}",
    "tables": lambda: '{"run":[' + '{"":0},' * 580_000 + "{}]}",
    "waited for": lambda: (
        '{"run":{"task":"small"},"cohort":{"wait_for":[' + "[]," * 1_300_000 + '[]]},"local":{"lr":1}}'
    ),
    "unknown keys": lambda: '{"run":{' + numbered(170_000, "0") + '},"local":{"lr":1}}',
    "numbers waited for": lambda: (
        '{"run":{"task":"small"},"cohort":{"wait_for":[' + "0," * 500_000 + '0]},"local":{"lr":1}}'
    ),
    "one long key": lambda: '{"run":{"task":"small","' + "x" * 4_000_000 + '":0},"local":{"lr":1}}',
    "rules": lambda: (
        '{"run":{"task":"small"},"uplink":{"layers":{' + numbered(170_000, '"int8"') + '}},"local":{"lr":1}}'
    ),
    "as many as are read": lambda: (
        '{"run":{"task":"small"},"cohort":{"wait_for":[' + "[]," * (MAX_VALUES - 100) + '[]]},"local":{"lr":1}}'
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_costs_a_device_more_than_a_moment_and_little_memory(tmp_path: Path, name: str) -> None:
    """Some kB on the wire: a million values, which a device parses, judges twice and explains."""
    raw = {
        "assignment_id": "small-1.1.pi-1", "run": "small-1", "task": "small", "kind": "train", "plan": "@",
        "outcomes": [],
        "work": {"steps": 1, "batch": 8}, "parts": [],
    }  # fmt: skip
    data = dumped(raw).replace(b'"@"', PLANS[name]().encode())
    assert len(data) <= MAX_HEADER_BYTES
    admission = AdmissionController(None, tmp_path)

    def take() -> None:
        with contextlib.suppress(BadPayload, CannotReply):  # the message is refused, or the assignment
            assignment = assignment_from_bytes(data)
            assert not admission.is_wanted(assignment)
            admission.admit(assignment)

    began = time.process_time()
    take()
    assert time.process_time() - began < MAX_S
    tracemalloc.start()
    try:
        take()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_MB * MB, f"{peak / MB:.0f} MB"
    assert not admission.plans.digests and not list(tmp_path.glob("plans/*")), "none is kept for good"


def test_honest_plans_of_many_devices_are_read() -> None:
    names = [f"a-device-in-the-field-{nth:05}" for nth in range(MAX_VALUES - 200)]
    plan = {"run": {"task": "small"}, "cohort": {"wait_for": names}, "local": {"lr": 1}}
    assert RunPlan.from_json(plan).cohort.wait_for == names
    assigned = {
        "assignment_id": "a",
        "run": "small-1",
        "task": "small",
        "kind": "train",
        "work": {},
        "parts": [],
        "outcomes": [],
    }
    assert assignment_from_bytes(dumped({**assigned, "plan": RunPlan.from_json(plan).to_json()})).run == "small-1"


def test_a_welcome_is_bounded_before_it_is_parsed() -> None:
    welcome: dict[str, Any] = {"name": "pi-1", "sequences": {}, "poll_s": 1, "server_time": 1, "protocol": 1}
    assert registration.welcome_from_bytes(dumped(welcome)).name == "pi-1"
    assert registration.welcome_from_bytes(dumped({**welcome, "spread_s": 86_400.0})).spread_s == 3600.0, (
        "kept for years"
    )
    many = {f"small-{nth}": nth for nth in range(20_000)}
    assert registration.welcome_from_bytes(dumped({**welcome, "sequences": many})).sequences == many
    with pytest.raises(BadPayload):
        registration.welcome_from_bytes(dumped({**welcome, "more": [[]] * 250_000}))


class Watching(threading.Event):
    """A client's end; `full`: its thread that pulls has stopped for a look, `paused`: for a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.paused = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "pull" and timeout == ENDING_CHECK_S:
            self.full.set()
        if threading.current_thread().name == "pull" and timeout == PAUSE_S:
            self.paused.set()
        return super().wait(timeout)


def test_what_waits_while_a_device_works_is_bounded_also_where_it_is_withdrawn(tmp_path: Path) -> None:
    """The aggregator withdraws each assignment and sends another: none of them counts as held, and all of them wait."""
    armed, begun, go_on, stop = threading.Event(), threading.Event(), threading.Event(), Watching()
    given = list[int]()

    def model() -> nn.Module:
        if armed.is_set():
            begun.set()
            go_on.wait(PATIENCE_S)
        return nn.Linear(4, 3)

    with attacked(tmp_path, Watched(tmp_path), task_of(model), stop) as device:

        def another(connection: Answering) -> None:
            given.append(100 + len(given))
            assignment = pack(dumped(device.assign(given[-1], more="x" * (MAX_PULLED_BYTES // 8))))
            connection.answer(pack(dumped({"cancelled": [f"small-1.{given[-1] - 1}.pi-1"]})) + assignment)

        armed.set()
        device.server.assignments.put(device.assign(1, kind="init"))
        assert begun.wait(PATIENCE_S)
        for _ in range(2 * MAX_PULLED):
            device.server.lies.put(another)
        assert stop.full.wait(PATIENCE_S)
        assert len(given) == 8
        armed.clear()
        go_on.set()
        device.require_alive(2)


def test_who_answers_each_pull_at_once_keeps_no_processor_busy(tmp_path: Path) -> None:
    """A pull is signed: an aggregator that says nothing a thousand times a second took a core."""
    stop = Watching()

    def nothing(connection: Answering) -> None:
        connection.answer(pack(dumped({})) + block(b""))

    with attacked(tmp_path, Watched(tmp_path), stop=stop) as device:
        for _ in range(1000):
            device.server.lies.put(nothing)
        assert stop.paused.wait(PATIENCE_S)
        assert not device.server.lies.empty(), "it takes the next answer at once for ever"
        device.server.lies = queue.Queue()
        device.require_alive(1)
