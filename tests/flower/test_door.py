"""What the door lets in, and what it answers to all the rest: over real sockets, by hand."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fleet_laws import answer, answers_now, envelope, hello, polled, pulled
from tests.flower.doubles import Place, place
from thinwire.core.errors import Refused, ThinwireError
from thinwire.core.fleet import NodeJoined
from thinwire.core.messages import reply_to_bytes
from thinwire.core.types import Failure, Part, ReplyHead, UpdateId
from thinwire.flower import FlowerFleet, device_key
from thinwire.flower.wire import hellos
from thinwire.flower.wire.framing import packed
from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.routes import HELLO, PULL, PUSH
from thinwire.flower.wire.signing import Signer

Answer = tuple[int, str]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, limit=lambda ask_id: 100_000) as made:
        yield made


class Caller:
    """A device that speaks by hand."""

    def __init__(self, here: Place, name: str = "pi-1", key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.address, self.name = here.fleet.address, name
        folder = here.folder / "callers" / name
        folder.mkdir(parents=True, exist_ok=True)
        self.signer = Signer(key or device_key(folder))
        self.process = ""

    def call(
        self, path: str, head: bytes, rest: bytes = b"", headers: dict[str, str] | None = None, method: str = "POST"
    ) -> Answer:
        """Status and kind of refusal."""
        connection = http.client.HTTPConnection(self.address, timeout=10)
        try:
            given = self.signed(path, head, rest, method) if headers is None else headers
            connection.request(method, path, packed(head) + rest, given)
            got = connection.getresponse()
            body = got.read()
            return got.status, json.loads(body)["error"] if got.status >= 400 and body else ""
        finally:
            connection.close()

    def signed(self, path: str, head: bytes, rest: bytes = b"", method: str = "POST") -> dict[str, str]:
        body = packed(head) + rest
        return self.signer.headers(method, path, hashlib.sha256(body).digest(), len(body), whole_key=path == HELLO)

    def hello(self, name: str = "") -> Answer:
        said = hello(name or self.name)
        self.process = said.process
        return self.call(HELLO, hellos.to_bytes(said))

    def pull(self, process: str = "") -> Answer:
        wanted = {"process": process or self.process, "wait_s": 0.0, "held": []}
        return self.call(PULL, json.dumps(wanted).encode())

    def push(self, reply: ReplyHead | Failure, rest: bytes = b"") -> Answer:
        return self.call(PUSH, reply_to_bytes(reply), rest)


def test_every_route_of_the_superlink_is_unknown_outside(here: Place) -> None:
    app = here.fleet._superlink.app
    routes = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert len(routes) > 20
    routes |= {("GET", p) for p in ("/", "/docs", "/openapi.json", "/health", "/v1/fleet/pull-messages", f"/{HELLO}")}
    routes |= {("POST", p) for p in (HELLO + "/", "/" + HELLO, "/tw/v1/../v1/hello", "/tw%2fv1/hello", "/TW/v1/hello")}
    routes |= {(method, HELLO) for method in ("GET", "PUT", "OPTIONS", "DELETE", "HEAD")}
    connection = http.client.HTTPConnection(here.fleet.address, timeout=10)
    for method, path in sorted(routes):
        connection.request(method, path.replace("{", "").replace("}", ""), b"")
        got = connection.getresponse()
        assert (method, path, got.status, got.read()) == (method, path, 404, b"")
        assert {name.lower() for name, _ in got.getheaders()} == {"content-length"}
    connection.close()


def test_an_unsigned_request_is_refused(here: Place) -> None:
    caller = Caller(here)
    for path in (HELLO, PULL, PUSH):
        assert caller.call(path, b"{}", headers={}) == (401, "signature")


def test_an_altered_head_is_refused(here: Place) -> None:
    caller = Caller(here)
    assert caller.hello() == (200, "")
    given = reply_to_bytes(answer("pi-1", "ask-1"))
    headers = caller.signed(PUSH, given)
    assert caller.call(PUSH, given.replace(b'"examples":32', b'"examples":99'), headers=headers) == (401, "signature")
    assert not answers_now(here.fleet)


def test_altered_parts_are_refused_and_leave_nothing(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    head = answer("pi-1", "ask-1", 1, b"abc", b"d" * 90_000)
    for body in (b"abd" + b"d" * 90_000, b"abc" + b"d" * 89_999 + b"e"):
        assert caller.push(head, body) == (409, "damaged")
        signed = caller.signed(PUSH, reply_to_bytes(head), b"abc" + b"d" * 90_000)
        assert caller.call(PUSH, reply_to_bytes(head), body, signed) == (401, "signature")
    assert caller.push(head, b"abc") == (409, "protocol")
    assert caller.push(head, b"abc" + b"d" * 90_001) == (409, "protocol")
    assert not here.spool.heads()
    assert not here.spool.drafts()
    assert not answers_now(here.fleet)


def test_a_replayed_request_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    head = reply_to_bytes(Failure("task-error", "x", "ask-1"))
    headers = caller.signed(PUSH, head)
    assert caller.call(PUSH, head, headers=headers) == (200, "")
    assert caller.call(PUSH, head, headers=headers) == (401, "replay")
    assert len(answers_now(here.fleet)) == 1


def test_a_request_of_before_a_restart_is_refused_after_it(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    head = reply_to_bytes(Failure("task-error", "x", "ask-1"))
    headers = caller.signed(PUSH, head)
    here.restart()
    assert caller.call(PUSH, head, headers=headers) == (401, "clock")


@pytest.mark.parametrize("age_s", [400, -60])
def test_a_clock_that_is_wrong_is_refused(here: Place, age_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(here)
    caller.hello()
    monkeypatch.setattr(here.fleet._gate._clock, "wall", lambda: time.time() + age_s, raising=False)
    assert caller.pull() == (401, "clock")


def test_another_key_for_a_known_name_is_refused(here: Place) -> None:
    assert Caller(here).hello() == (200, "")
    assert Caller(here, key=ec.generate_private_key(ec.SECP384R1())).hello() == (409, "name")
    assert [row.name for row in here.roster.rows()] == ["pi-1"]


def test_a_known_key_under_another_name_is_who_it_was(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.hello("pi-2") == (200, "")
    assert [row.name for row in here.roster.rows()] == ["pi-1"]


def test_an_unknown_key_is_told_to_say_hello(here: Place) -> None:
    caller = Caller(here)
    assert caller.pull() == (401, "hello")
    assert caller.push(answer("pi-1", "ask-1")) == (401, "hello")


def test_a_pull_of_a_process_that_did_not_say_hello_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.pull() == (200, "")
    assert caller.pull("another") == (401, "hello")


@pytest.mark.parametrize("state", ["revoked", "pending"])
def test_a_device_that_may_not_call_is_shut_out_at_its_next_request(here: Place, state: Any) -> None:
    caller = Caller(here)
    caller.hello()
    here.roster.put("pi-1", state)
    assert caller.hello() == (403, state)
    assert caller.pull() == (403, state)
    assert caller.push(answer("pi-1", "ask-1")) == (403, state)
    assert not answers_now(here.fleet)


def test_an_answer_in_anothers_name_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.push(answer("pi-2", "ask-1")) == (403, "device")


@pytest.mark.parametrize("run", ["..", ".hidden", "a b", "x" * 200, ""])
def test_a_run_that_cannot_be_a_folder_is_refused(here: Place, run: str) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.push(ReplyHead("ask-1", UpdateId(run, "pi-1", 1), 0, 1)) == (409, "protocol")


def test_an_answer_beyond_its_limit_is_refused_before_it_is_read(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    head = ReplyHead("ask-1", UpdateId("digits-1", "pi-1", 1), 0, 1, parts=(Part("frame/0", 2**40, "0" * 64),))
    assert caller.push(head) == (413, "too-large")
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.ask_id, failure.device) == ("protocol", "ask-1", "pi-1")


@pytest.mark.parametrize(("path", "length"), [(HELLO, 2**20), (PULL, 2**20), (PUSH, 2**23)])
def test_a_body_beyond_its_limit_is_refused_before_it_is_read(here: Place, path: str, length: int) -> None:
    caller = Caller(here)
    caller.hello()
    headers = caller.signer.headers("POST", path, length=4 + length) | {"content-length": str(4 + length)}
    connection = http.client.HTTPConnection(caller.address, timeout=10)
    connection.putrequest("POST", path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(length.to_bytes(4, "little"))
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("head", [b"", b"{", b"[]", b"null", b"\xff", b'{"name": 1}', b"[" * 100_000])
def test_what_cannot_be_read_is_refused(here: Place, head: bytes) -> None:
    caller = Caller(here)
    caller.hello()
    assert [caller.call(path, head) for path in (HELLO, PULL, PUSH)] == [(409, "protocol")] * 3


def test_a_hello_with_an_impossible_name_or_protocol_is_refused(here: Place) -> None:
    caller = Caller(here)
    said = hellos.to_bytes(hello("pi-1"))
    assert caller.hello("Pi/1") == (409, "protocol")
    assert caller.call(HELLO, said.replace(b'"protocol":1,"oldest":1', b'"protocol":9,"oldest":8')) == (403, "protocol")


def test_a_body_of_unknown_length_is_refused(here: Place) -> None:
    caller = Caller(here)
    connection = http.client.HTTPConnection(caller.address, timeout=10)
    headers = caller.signed(HELLO, b"{}") | {"transfer-encoding": "chunked"}
    connection.request("POST", HELLO, iter([packed(b"{}")]), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_defect_of_ours_shows_no_trace(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(here)
    monkeypatch.setattr(here.roster, "seen", lambda hello, at: 1 / 0)
    assert caller.hello() == (503, "internal")


def test_a_disk_that_is_full_is_said_and_the_same_answer_is_taken_later(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(here)
    caller.hello()

    def full(draft: Path, head: ReplyHead) -> None:
        raise OSError(28, "No space left on device")

    head = answer("pi-1", "ask-1", 1, b"abc")
    with monkeypatch.context() as patched:
        patched.setattr(here.spool, "commit", full)
        assert caller.push(head, b"abc") == (503, "disk")
        assert not answers_now(here.fleet)
    assert caller.push(head, b"abc") == (200, "")
    assert polled(here.fleet, ReplyHead).update_id == head.update_id


def test_a_waiting_pull_is_answered_when_the_door_closes(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    socket_pull = http.client.HTTPConnection(here.fleet.address, timeout=20)
    caller = Caller(here, "pi-2")
    caller.hello()
    head = json.dumps({"process": caller.process, "wait_s": 20.0, "held": []}).encode()
    socket_pull.request("POST", PULL, packed(head), caller.signed(PULL, head))
    while here.fleet.stats()["requests"]["pull"] < 1:
        time.sleep(0.01)
    here.fleet.close()
    got = socket_pull.getresponse()
    assert (got.status, json.loads(got.read())["error"]) == (503, "closing")
    socket_pull.close()


def test_a_taken_port_is_said_in_words(here: Place) -> None:
    port = int(here.fleet.address.rsplit(":", 1)[1])
    with pytest.raises(ThinwireError, match="cannot listen on") as refused:
        FlowerFleet(here.roster, here.spool, port=port)
    assert refused.value.exit_code == 1
    assert "--listen" in refused.value.hint


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_door_beyond_loopback_is_refused(here: Place, host: str) -> None:
    with pytest.raises(ThinwireError, match="cannot be opened"):
        FlowerFleet(here.roster, here.spool, host=host)


def test_bytes_and_requests_of_a_device_are_counted(here: Place, tmp_path: Path) -> None:
    """Two requests a round, and a few hundred bytes around what is carried."""
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    polled(here.fleet, NodeJoined)
    for round_number in (1, 2):
        model = bytes(50_000)
        here.fleet.send([envelope("pi-1", f"ask-{round_number}", tmp_path, model)])
        ask = pulled(link).ask
        body = tmp_path / "answer"
        body.write_bytes(bytes(20_000))
        link.push(answer("pi-1", ask.ask_id, round_number, bytes(20_000)), body)
        transfer = polled(here.fleet, ReplyHead).transfer
        assert transfer is not None
        assert transfer.requests == (3 if round_number == 1 else 2)
        assert 50_000 < (transfer.sent_bytes or 0) < 52_000
        assert 20_000 < (transfer.received_bytes or 0) < 23_500
    stats = here.fleet.stats()
    assert stats["requests"] == {"hello": 1, "pull": 2, "push": 2}
    assert stats["sent_bytes"] > 100_000


def test_what_passes_the_socket_is_what_is_counted(here: Place) -> None:
    caller = Caller(here)
    said = hellos.to_bytes(hello("pi-1"))
    lines = "".join(f"{k}: {v}\r\n" for k, v in caller.signed(HELLO, said).items())
    body = packed(said)
    request = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
    host, port = caller.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(request)
        got = raw.recv(65_536)
    assert got.startswith(b"HTTP/1.1 200")
    stats = here.fleet.stats()
    assert (stats["received_bytes"], stats["sent_bytes"]) == (len(request), len(got))


def test_a_refusal_tells_the_client_to_stop_or_to_try_again(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    here.roster.put("pi-1", "revoked")
    with pytest.raises(Refused) as refused:
        link.pull(0.0)
    assert refused.value.exit_code == 5
    assert "revoked" in refused.value.why


def test_digests_in_heads_are_those_of_the_bytes(here: Place, tmp_path: Path) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    body = tmp_path / "answer"
    body.write_bytes(b"abc")
    link.push(answer("pi-1", "ask-1", 1, b"abc"), body)
    head = polled(here.fleet, ReplyHead)
    assert [part.sha256 for part in head.parts] == [hashlib.sha256(b"abc").hexdigest()]


class Passing:
    """A guest app that answers with its path."""

    paths = frozenset({"/v1/fleet/pull-messages"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        return None if b"flwr-signature" in headers else Refusal(412, "unknown", "not approved here")

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        return headers[b"flwr-signature"].decode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": body})


def test_guests_pass_at_their_paths_alone(tmp_path: Path) -> None:
    with place(tmp_path, guests=Passing()) as here:
        caller = http.client.HTTPConnection(here.fleet.address, timeout=10)
        for path, headers, status in (
            ("/v1/fleet/pull-messages", {"flwr-signature": "x"}, 200),
            ("/v1/fleet/pull-messages", {}, 412),
            ("/v1/fleet/pull-messages?x", {"flwr-signature": "x"}, 404),
            ("/v1/fleet/../fleet/pull-messages", {"flwr-signature": "x"}, 404),
            ("/v1/fleet/push-messages", {"flwr-signature": "x"}, 404),
        ):
            caller.request("POST", path, b"body", headers)
            got = caller.getresponse()
            assert (path, got.status) == (path, status)
            got.read()
        caller.close()


def test_a_stock_nodes_key_opens_no_path_of_ours(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    here.roster.devices["pi-1"] = replace(here.roster.devices["pi-1"], how="stock")
    assert caller.hello() == (403, "pending")
    assert caller.pull() == (403, "pending")
