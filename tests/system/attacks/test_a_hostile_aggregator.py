"""An aggregator that is someone else's says what no aggregator says: the client stays, and does the next assignment."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_task import plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve, wanted
from thinwire.client.executor import InProcessExecutor
from thinwire.client.policy import Policy
from thinwire.client.task import LoadedTask
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import BadPayload
from thinwire.core.fleet import Welcome
from thinwire.core.serialization import assignment_from_bytes
from thinwire.transport.device.identity import ServerClock, Trust, device_key
from thinwire.transport.device.link import HttpsLink, LinkOptions
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, LATEST, PULL, PUSH, ApiError, block, inflate, pack
from thinwire.transport.server.tls import InternalCA

THIRTY_YEARS_S = 30 * 365 * 86_400.0
LAST_SECOND = 253_402_300_799.0  # of the year 9999
PIECE, PIECES = 2**20, 96
PATIENCE_S = 30.0
Lie = Callable[["Answering"], None]


def dumped(raw: Any) -> bytes:
    return json.dumps(raw, separators=(",", ":")).encode()


class Answering(BaseHTTPRequestHandler):
    """One connection to the hostile aggregator, which looks at no signature."""

    protocol_version = "HTTP/1.1"
    server: Hostile

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        if self.path == HELLO:
            self.server.hellos.put(said(body))
            runs = {f"small-{number}": letter * 16 for number, letter in enumerate("ab", 1)}
            welcome = {
                "name": "pi-1",
                "sequences": {},
                "runs": runs,
                "poll_s": 0.2,
                "protocol": 1,
                "spread_s": 0.0,
                "cas": [],
            }
            self.answer(pack(dumped({**welcome, "server_time": time.time(), **self.server.welcome})))
            self.server.welcome = {}
        elif self.path == PULL:
            with contextlib.suppress(queue.Empty):
                self.server.lies.get_nowait()(self)
                return
            try:
                assignment = pack(dumped(self.server.assignments.get(timeout=0.1)))
            except queue.Empty:
                assignment = block(b"")
            self.answer(pack(dumped({"cancelled": []})) + assignment)
        elif self.path == PUSH:
            self.server.pushes.put(said(body))
            self.answer(b'{"done":true}')

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.fetched.append(self.path)
        self.answer(b"", 404)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


class Hostile(ThreadingHTTPServer):
    """What the client said is in `hellos` and `pushes`; `assignments` and `lies` are given to its next pulls."""

    def __init__(self, folder: Path, tls: bool) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.hellos, self.pushes = queue.Queue[Any](), queue.Queue[Any]()
        self.assignments, self.lies = queue.Queue[Any](), queue.Queue[Lie]()
        self.welcome: dict[str, Any] = {}
        self.fetched, self.sent = list[str](), 0
        self.authority = InternalCA(folder / "ca") if tls else None
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_port}"
        if self.authority is not None:
            self.socket = self.authority.context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def handle_error(self, *_: Any) -> None:
        """A client hangs up where it was lied to."""


class Attacked:
    """A client that serves in a thread."""

    def __init__(
        self, folder: Path, server: Hostile, task: LoadedTask | None = None, stop: threading.Event | None = None
    ) -> None:
        self.server, self.told, self.stop = server, list[str](), stop or threading.Event()
        own = folder / "pi-1"
        own.mkdir()
        authority = server.authority
        trust = Trust(server.url, authority.cas(), authority.server_name(), name="pi-1") if authority else None
        self.admission, executor = AdmissionController(Policy(), own), InProcessExecutor(task or task_of())
        is_wanted = wanted(self.admission, [executor])
        self.link = HttpsLink(server.url, device_key(own), "pi-1", own, trust, LinkOptions(is_wanted=is_wanted))
        served = (self.link, [executor], Device(ClientInfo("pi-1"), own, self.admission), self.stop)
        self.thread = threading.Thread(target=serve, args=served, kwargs={"say": self.told.append})
        self.thread.start()
        self.layout = server.hellos.get(timeout=PATIENCE_S)["tasks"][0]["layout_digest"]

    def assign(self, number: int, **changed: Any) -> dict[str, Any]:
        """An assignment as it is written on the wire."""
        return {
            "assignment_id": f"small-1.{number}.pi-1", "run": "small-1", "task": "small", "kind": "train",
            "plan": plan_of().to_json(), "round": number, "base_version": 1, "base_digest": "",
            "layout_digest": self.layout, "codec": "identity", "work": {"steps": 1, "batch": 8}, "deadline_s": 60.0,
            "parts": [], "vectors": [], "outcomes": [], "protocol": 1, **changed,
        }  # fmt: skip

    def require_alive(self, number: int) -> None:
        """An assignment after the lie is answered: with a failure, since no model comes with it."""
        self.server.assignments.put(self.assign(number))
        while True:
            pushed = self.server.pushes.get(timeout=PATIENCE_S)
            if pushed["assignment_id"] == f"small-1.{number}.pi-1":
                assert pushed["kind"] == "base-mismatch", pushed
                return

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def said(body: bytes) -> Any:
    (length,) = struct.unpack("<I", body[:4])
    return json.loads(inflate(body[4 : 4 + length], 2**20))


@contextlib.contextmanager
def attacked(
    folder: Path, server: Hostile, task: LoadedTask | None = None, stop: threading.Event | None = None
) -> Iterator[Attacked]:
    """A client of an aggregator that serves in a thread too."""
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    try:
        made = Attacked(folder, server, task, stop)
        try:
            yield made
        finally:
            made.close()
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


@pytest.fixture(params=["plain", "tls"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Attacked]:
    with attacked(tmp_path, Hostile(tmp_path, request.param == "tls")) as made:
        yield made


def plans(device: Attacked) -> list[Any]:
    """Plans that no aggregator resolves."""
    honest = plan_of().to_json()
    local = honest["local"]
    return [
        {"local": 5}, {"local": [1]}, {"local": {"overlap": 5}}, {"local": {"overlap": {"max_delay": [1]}}},
        {**honest, "local": {**local, "overlap": "x"}},
        {**honest, "local": {**local, "overlap": {"max_delay": "zz"}}}, 5, [1], None,
    ]  # fmt: skip


def test_a_plan_whose_levels_are_no_mappings_is_answered(device: Attacked) -> None:
    for number, plan in enumerate(plans(device), 1):
        device.server.assignments.put(device.assign(number, plan=plan))
        pushed = device.server.pushes.get(timeout=PATIENCE_S)
        assert (pushed["assignment_id"], pushed["type"]) == (f"small-1.{number}.pi-1", "failure")
    device.require_alive(50)


def test_such_a_plan_with_a_model_to_fetch_is_answered_and_nothing_is_fetched(device: Attacked) -> None:
    parts = [{"name": "full/0", "length": 300_000, "sha256": "0" * 64, "offset": 0}]
    for number, plan in enumerate(plans(device), 1):
        device.server.assignments.put(device.assign(number, plan=plan, parts=parts))
        assert device.server.pushes.get(timeout=PATIENCE_S)["type"] == "failure"
    assert not device.server.fetched
    device.require_alive(50)


def endless(connection: Answering) -> None:
    """A pull is answered by a body that does not end."""
    connection.send_response(200)
    connection.send_header("transfer-encoding", "chunked")
    connection.end_headers()
    body = pack(dumped({"cancelled": []})) + block(b"")
    connection.wfile.write(b"%x\r\n%b\r\n" % (len(body), body))
    for _ in range(PIECES):
        connection.wfile.write(b"%x\r\n%b\r\n" % (PIECE, bytes(PIECE)))
        connection.server.sent += 1
    connection.wfile.write(b"0\r\n\r\n")


def huge(connection: Answering) -> None:
    """It announces more than any memory holds, and sends ten bytes of it."""
    connection.send_response(200)
    connection.send_header("content-length", "99999999999999")
    connection.end_headers()
    connection.wfile.write(pack(dumped({"cancelled": []})) + block(b"") + b"x" * 10)


def test_no_more_of_a_body_is_read_than_a_pull_can_need(device: Attacked) -> None:
    device.server.lies.put(endless)
    device.require_alive(1)
    assert device.server.sent < PIECES / 2, "of what the device does not read, buffers hold little"
    device.server.lies.put(huge)
    device.require_alive(2)


def wrong_time(now: float) -> Lie:
    return lambda connection: connection.answer(dumped({"error": "clock", "why": "x", "now": now}), 401)


def test_one_wrong_time_costs_one_call(device: Attacked) -> None:
    """The device learns it, and over TLS no certificate is valid then: it selects again what time it is."""
    for number, now in enumerate((time.time() + THIRTY_YEARS_S, LAST_SECOND, 1.0, 1e300), 1):
        device.server.lies.put(wrong_time(now))
        device.require_alive(number)


def test_one_welcome_with_a_wrong_time_costs_one_call(device: Attacked) -> None:
    for number, now in enumerate((time.time() + THIRTY_YEARS_S, LAST_SECOND, LATEST, 0.0), 1):
        device.server.welcome = {"server_time": now}
        device.server.lies.put(
            lambda connection: connection.answer(dumped({"error": "hello", "why": "", "now": 0}), 401)
        )
        device.require_alive(number)


def test_an_error_of_the_clients_own_while_it_reads_is_said_in_full_and_the_call_made_again(
    device: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no check foresaw."""
    read, failed = assignment_from_bytes, list[bytes]()

    def once(data: bytes) -> Any:
        if failed:
            return read(data)
        failed.append(data)
        raise AssertionError("not foreseen")

    monkeypatch.setattr("thinwire.transport.device.link.assignment_from_bytes", once)
    device.server.assignments.put(device.assign(1))
    device.require_alive(2)
    assert failed
    found = "\n".join(device.told)
    assert "a defect of Thinwire: AssertionError: not foreseen" in found
    assert "Traceback" in found
    assert "report" in found


@pytest.mark.parametrize("assignment_id", ["small-1.é.pi-1", "small 1 x", "../../x", "a?b", "a#b", "", "a/b"])
def test_an_id_that_no_path_can_carry_is_not_read(device: Attacked, assignment_id: str) -> None:
    with pytest.raises(BadPayload, match="assignment_id"):
        assignment_from_bytes(dumped(device.assign(1, assignment_id=assignment_id)))
    parts = [{"name": "full/0", "length": 300_000, "sha256": "0" * 64, "offset": 0}]
    device.server.assignments.put(device.assign(1, assignment_id=assignment_id, parts=parts))
    device.require_alive(2)
    assert not device.server.fetched


@pytest.mark.parametrize("now", [LATEST, LAST_SECOND, 1e300])
def test_no_time_that_is_said_is_too_late_to_be_signed(now: float) -> None:
    refusal = ApiError.read(401, dumped({"error": "clock", "why": "", "now": now}))
    since_boot = [0.0]
    clock = ServerClock(lambda: 0.0, lambda: since_boot[0])
    clock.learn(refusal.now)
    assert clock.now().year == 9000
    since_boot[0] = 1e13
    assert clock.now().year == 9000
    welcome = {**json.loads(registration.to_bytes(Welcome("pi-1", {}, 1.0, 0.0))), "server_time": now}
    if now > LATEST:
        with pytest.raises(BadPayload):
            registration.welcome_from_bytes(dumped(welcome))


@pytest.mark.parametrize("attack", ["it fails each time", "its run has another identity each time"])
def test_one_assignment_that_is_repeated_is_worked_on_as_often_as_its_owner_allows(
    device: Attacked, attack: str
) -> None:
    """The aggregator need not look at what the device says it holds, and gives the same id again and again."""
    device.admission.set_policy(Policy(rounds_a_day=2))
    answered = list[str]()
    for letter in "ababab":
        fails = attack == "it fails each time"
        changed = {"layout_digest": "0" * 64} if fails else {"kind": "init", "identity": letter * 16}
        device.server.assignments.put(device.assign(1, **changed))
        pushed = device.server.pushes.get(timeout=PATIENCE_S)
        answered.append(pushed.get("text", "").partition(":")[0] if pushed.get("kind") == "declined" else "")
    assert answered == ["", "", *["rounds_a_day"] * 4]
