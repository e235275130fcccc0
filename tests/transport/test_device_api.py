"""What the device API lets in, and whom it knows: over real sockets, by hand."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, answers_now, envelope, hello, polled
from tests.support.transport_doubles import Place, place
from thinwire.core.clock import RealClock
from thinwire.core.errors import Refused, ThinwireError, Unreachable
from thinwire.core.fleet import FixedLimits
from thinwire.core.serialization import ReplyLimit, reply_to_bytes
from thinwire.core.types import Failure, ReplyHeader
from thinwire.flower import FlowerFleet
from thinwire.transport.device.identity import ServerClock, device_key
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, PULL, PUSH, pack
from thinwire.transport.protocol.signing import Signer


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    limits = FixedLimits(ReplyLimit(100_000))
    with place(tmp_path, limits=limits, grace_s=60.0) as made:  # a caller between two connections has not left
        yield made


def test_every_route_of_the_superlink_is_unknown_outside(here: Place) -> None:
    app = here.fleet._superlink.app
    routes = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert len(routes) > 20
    routes |= {("GET", p) for p in ("/", "/docs", "/openapi.json", "/health", "/v1/fleet/pull-messages", f"/{HELLO}")}
    routes |= {("POST", p) for p in (HELLO + "/", "/" + HELLO, "/tw/v1/../v1/hello", "/tw%2fv1/hello", "/TW/v1/hello")}
    routes |= {(method, HELLO) for method in ("GET", "PUT", "OPTIONS", "DELETE", "HEAD")}
    connection = http.client.HTTPConnection(here.fleet.address, timeout=60)
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
    given = reply_to_bytes(answer("pi-1", "assignment-1"))
    headers = caller.signed(PUSH, given)
    assert caller.call(PUSH, given.replace(b'"examples":32', b'"examples":99'), headers=headers) == (401, "signature")
    assert not answers_now(here.fleet)


def test_altered_parts_are_refused_and_leave_nothing(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    header = answer("pi-1", "assignment-1", 1, b"abc", b"d" * 90_000)
    for body in (b"abd" + b"d" * 90_000, b"abc" + b"d" * 89_999 + b"e"):
        assert caller.push(header, body) == (409, "damaged")
        signed = caller.signed(PUSH, reply_to_bytes(header), b"abc" + b"d" * 90_000)
        assert caller.call(PUSH, reply_to_bytes(header), body, signed) == (401, "signature")
    assert caller.push(header, b"abc") == (409, "protocol")
    assert caller.push(header, b"abc" + b"d" * 90_001) == (409, "protocol")
    assert not here.spool.headers()
    assert not here.spool.drafts()
    assert not answers_now(here.fleet)


def test_a_replayed_request_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    header = reply_to_bytes(Failure("task-error", "x", "assignment-1"))
    headers = caller.signed(PUSH, header)
    assert caller.call(PUSH, header, headers=headers) == (200, "")
    assert caller.call(PUSH, header, headers=headers) == (401, "replay")
    assert len(answers_now(here.fleet)) == 1


def test_a_request_of_before_a_restart_is_refused_after_it(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    header = reply_to_bytes(Failure("task-error", "x", "assignment-1"))
    headers = caller.signed(PUSH, header)
    here.restart()
    assert caller.call(PUSH, header, headers=headers) == (401, "clock")


@dataclass
class SetClock(RealClock):
    """This machine's clock, set ahead, and with more time passed."""

    ahead_s: float = 0.0
    passed_s: float = 0.0

    def now(self) -> float:
        return time.monotonic() + self.passed_s

    def wall(self) -> float:
        return time.time() + self.passed_s + self.ahead_s


@pytest.mark.parametrize("step_s", [8 * 3600.0, 1.0])
def test_a_step_back_of_the_aggregators_clock_refuses_no_device_and_allows_no_replay(
    tmp_path: Path, step_s: float
) -> None:
    """As when its machine began with its time zone's hours, and then learned the time."""
    clock = SetClock(ahead_s=step_s)
    with place(tmp_path, clock=clock, grace_s=600.0) as here:
        clock.ahead_s = 0.0
        link = here.link("pi-1", clock=ServerClock())
        link.hello(hello("pi-1"))
        assert here.fleet.stats()["refused"] == {"/tw/v1/hello 401": 1}, "the device learns the time from the refusal"
        link.pull(0.0)
        caller = Caller(here, "pi-2")
        caller.signer = Signer(device_key(tmp_path), link.clock.now)
        caller.hello()
        header = reply_to_bytes(Failure("task-error", "x", "assignment-1"))
        headers = caller.signed(PUSH, header)
        assert caller.call(PUSH, header, headers=headers) == (200, "")
        assert caller.call(PUSH, header, headers=headers) == (401, "replay")
        clock.passed_s = 320.0
        assert caller.call(PUSH, header, headers=headers) == (401, "clock")
        link.pull(0.0)
        assert len(here.fleet._authenticator._window._spent) == 1, "the nonces from before have expired"


@pytest.mark.parametrize("age_s", [400, -60])
def test_a_clock_that_is_wrong_is_refused(here: Place, age_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(here)
    caller.hello()
    monkeypatch.setattr(here.fleet._authenticator.clock, "wall", lambda: time.time() + age_s, raising=False)
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
    assert caller.push(answer("pi-1", "assignment-1")) == (401, "hello")


def test_a_pull_of_a_process_that_did_not_say_hello_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.pull() == (200, "")
    assert caller.pull("another") == (401, "hello")


@pytest.mark.parametrize("state", ["revoked", "pending"])
def test_a_device_that_may_not_call_is_revoked_at_its_next_request(here: Place, state: Any) -> None:
    caller = Caller(here)
    caller.hello()
    here.roster.put("pi-1", state)
    assert caller.hello() == (403, state)
    assert caller.pull() == (403, state)
    assert caller.push(answer("pi-1", "assignment-1")) == (403, state)
    assert not answers_now(here.fleet)


def test_an_answer_in_anothers_name_is_refused(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.push(answer("pi-2", "assignment-1")) == (403, "device")


def test_a_waiting_pull_is_answered_when_the_device_api_closes(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    socket_pull = http.client.HTTPConnection(here.fleet.address, timeout=60)
    caller = Caller(here, "pi-2")
    caller.hello()
    header = json.dumps({"process": caller.process, "wait_s": 20.0, "in_flight": []}).encode()
    socket_pull.request("POST", PULL, pack(header), caller.signed(PULL, header))
    while here.fleet.stats()["requests"]["pull"] < 1:
        time.sleep(0.01)
    here.fleet.close()
    got = socket_pull.getresponse()
    assert (got.status, json.loads(got.read())["error"]) == (503, "closing")
    socket_pull.close()


def test_a_taken_port_is_said_in_words(here: Place) -> None:
    port = int(here.fleet.address.rsplit(":", 1)[1])
    with pytest.raises(Unreachable, match="cannot listen on") as refused:
        FlowerFleet(here.roster, here.spool, port=port)
    assert refused.value.why == "the port is taken by another process"
    assert "--listen" in refused.value.hint


@pytest.mark.parametrize(
    "browser",
    [{"host": "evil.example:9090"}, {"origin": "http://evil.example:9090"}, {"sec-fetch-site": "same-origin"}],
)
def test_no_page_in_a_browser_enrolls_a_device(here: Place, browser: dict[str, str]) -> None:
    """A page whose name is rebound to 127.0.0.1 calls the device API as its own, and signs with a key that it makes."""
    page = Caller(here, "pi-9")
    said = registration.to_bytes(hello("pi-9"))
    assert page.call(HELLO, said, headers=page.signed(HELLO, said) | browser) == (403, "browser")
    assert not here.roster.rows()
    assert page.hello() == (200, ""), "the same without a browser's headers"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_device_api_beyond_loopback_is_refused(here: Place, host: str) -> None:
    with pytest.raises(ThinwireError, match="does not open"):
        FlowerFleet(here.roster, here.spool, host=host)


def test_a_refusal_tells_the_client_to_stop_or_to_try_again(here: Place) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    here.roster.put("pi-1", "revoked")
    with pytest.raises(Refused) as refused:
        link.pull(0.0)
    assert refused.value.exit_code == 5
    assert "revoked" in refused.value.why


def test_a_reply_to_an_assignment_that_a_restored_run_makes_again_arrives_again(here: Place) -> None:
    """The device sent it before the run was restored, and has the same reply for the same assignment."""
    caller, reply = Caller(here), answer("pi-1", "assignment-1", 1, b"abc")
    caller.hello()
    assert caller.push(reply, b"abc") == (200, "")  # its outbox, before the run makes the assignment
    here.fleet.ack([polled(here.fleet, ReplyHeader).update_id])
    here.fleet.send([envelope("pi-1", "assignment-1")])
    assert caller.pull() == (200, "")
    assert caller.push(reply, b"abc") == (200, "")
    assert polled(here.fleet, ReplyHeader).update_id == reply.update_id
    assert [bytes(part) for part in here.fleet.open(reply.update_id)] == [b"abc"]
    assert caller.push(reply, b"abc") == (200, "")
    assert not answers_now(here.fleet), "it is a duplicate now"
