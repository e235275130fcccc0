"""An approved device that lies: it settles nobody else's assignment, writes nothing but its own, and breaks nothing."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, answers_now, envelope, hello, polled, pulled
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import ClientConnected, FixedLimits
from thinwire.core.serialization import ReplyLimit, reply_to_json
from thinwire.core.types import Failure, PhaseReply, ReplyHeader
from thinwire.store import FileSpool
from thinwire.transport.protocol.http import PUSH
from thinwire.transport.server.assignments import MAX_MESSAGES, MAX_SPOOLED_REPLIES
from thinwire.transport.server.connections import CONNECTIONS_OF_ONE

ENDED = 0  # no status: the connection was ended


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    limits = FixedLimits(ReplyLimit(100_000))
    with place(
        tmp_path, spool=lambda: FileSpool(tmp_path / "spool"), limits=limits, grace_s=60.0
    ) as made:  # a caller may pause
        yield made


def test_who_answers_anothers_assignment_does_not_take_it_away(here: Place) -> None:
    link, liar = here.link("pi-2"), Caller(here)
    link.hello(hello("pi-2"))
    liar.hello()
    polled(here.fleet, ClientConnected)
    here.fleet.send([envelope("pi-2", "assignment-2")])
    assert liar.push(answer("pi-1", "assignment-2", 1, b"stolen"), b"stolen")[0] == 200
    assert liar.push(answer("pi-1", "assignment-2", 1, b"stolen"), b"stolen")[0] == 200
    assert liar.push(Failure("offline", "gone", "assignment-2"))[0] == 200
    assert pulled(link).assignment.assignment_id == "assignment-2"
    assert {getattr(a, "device", "pi-1") for a in answers_now(here.fleet)} == {"pi-1"}
    here.fleet.cancel(["assignment-2"])
    assert here.fleet._state.in_flight() == set()


HOSTILE: dict[str, list[Any]] = {
    "update_id": [f"{run}/pi-1/1" for run in ("..", ".", "", "a b", "a\0", "~", "-x", "x" * 200, "\u202e", "a\n")]
    + ["r/../pi-1/1", "r/pi-1/1/..", "r/PI-1/1", "r/pi-1/9" + "9" * 30, "r/pi-1/-1", "r/pi-2/1"]
    + ["r/pi-1/" + "9" * 5000],
    "assignment_id": ["\ud800", "\0", "a" * 5000, "\x1b]0;owned\x07"],
    "examples": [10**400, 1e308, "NaN", -1, None, [], {}],
    "a": ["nan", 1e308, "inf"],
    "steps": [10**30],
    "metrics": [{"eval/loss": [1e308, 1]}, {"x": [1, 1e-308]}, {"x": 3}, [], {"\ud800": [1, 1]}],
    "timings": [{"train_s": "nan"}, {"train_s": "1e999"}],
    "counters": [{"n": 10**30}],
    "parts": [
        [{"name": "f", "length": length, "sha256": "0" * 64, "offset": 0}]
        for length in (-1, 10**30, 2**62, 1e400, "6.5")
    ]
    + [[{"name": "../../x", "length": 0, "sha256": "0" * 64, "offset": 0}], [{}] * 65_537, [{}] * 65_000],
}  # fmt: skip


def test_no_header_gets_more_than_a_refusal(here: Place, caplog: pytest.LogCaptureFixture) -> None:
    liar = Caller(here)
    liar.hello()
    plain = reply_to_json(answer("pi-1", "assignment", 1))
    before = {path.relative_to(here.folder) for path in here.folder.rglob("*") if path.is_file()}
    for field, values in HOSTILE.items():
        for value in values:
            status, _ = liar.call(PUSH, json.dumps({**plain, field: value}).encode())
            assert status in (403, 409, 413), (field, str(value)[:60], status)
    assert {path.relative_to(here.folder) for path in here.folder.rglob("*") if path.is_file()} == before
    assert "defect" not in caplog.text
    assert not [a for a in answers_now(here.fleet) if isinstance(a, ReplyHeader)]


@pytest.mark.parametrize("wait", ["NaN", "Infinity", "1e999", "-1e999", "1" + "0" * 400])
def test_a_pull_that_waits_for_no_number_is_answered(here: Place, caplog: pytest.LogCaptureFixture, wait: str) -> None:
    liar = Caller(here)
    liar.hello()
    here.fleet.send([envelope("pi-1", "assignment")])
    polled(here.fleet, ClientConnected)
    header = f'{{"process": "{liar.process}", "wait_s": {wait}, "in_flight": []}}'.encode()
    assert liar.call("/tw/v1/pull", header)[0] in (200, 409)
    assert "defect" not in caplog.text


def test_an_update_pushed_by_many_at_once_arrives_once(here: Place) -> None:
    """On twice the connections that a device has: the aggregator ends the oldest, whatever it is in the middle of."""
    liar = Caller(here)
    liar.hello()
    polled(here.fleet, ClientConnected)
    body = b"x" * 50_000
    header = answer("pi-1", "assignment", 1, body)
    other = replace(header, examples=header.examples + 1)

    def push(reply: ReplyHeader) -> int:
        try:
            return liar.push(reply, body)[0]
        except (OSError, http.client.HTTPException):
            return ENDED

    def push_until_answered(reply: ReplyHeader) -> int:
        return next(status for status in iter(lambda: push(reply), None) if status not in (503, ENDED))

    with ThreadPoolExecutor(2 * CONNECTIONS_OF_ONE) as threads:
        got = list(threads.map(lambda i: push(other if i % 2 else header), range(16)))
    assert set(got) <= {200, 409, 503, ENDED}
    assert {push_until_answered(header), push_until_answered(other)} == {200, 409}, "one of the two came, and stays"
    assert sum(isinstance(a, ReplyHeader) for a in answers_now(here.fleet)) == 1
    assert not list((here.folder / "spool").rglob(".draft-*"))


def test_a_device_cannot_fill_the_spool(here: Place) -> None:
    liar = Caller(here)
    liar.hello()
    got = [liar.push(answer("pi-1", f"made-up-{i}", i, b"x"), b"x") for i in range(1, MAX_SPOOLED_REPLIES + 4)]
    assert got == [(200, "")] * MAX_SPOOLED_REPLIES + [(503, "busy")] * 3
    assert liar.push(answer("pi-1", "made-up-1", 1, b"x"), b"x")[0] == 200, "what is here is answered as before"
    assert here.link("pi-2").hello(hello("pi-2")).name == "pi-2"
    headers = [a for a in answers_now(here.fleet) if isinstance(a, ReplyHeader)]
    here.fleet.ack([headers[0].update_id])
    assert liar.push(answer("pi-1", "made-up", 99, b"x"), b"x")[0] == 200
    here.restart()
    assert here.fleet._mailbox.waiting("pi-1") == MAX_SPOOLED_REPLIES


@pytest.mark.parametrize("line", [b"POST /", b"POST /tw/v1/hello HTTP/1.1\r\nx: ", b"POST /tw/v1/hello HTTP/1.1\r\n"])
def test_headers_without_end_are_cut_off(here: Place, line: bytes) -> None:
    """From anybody who reaches the device API: nothing is signed yet."""
    host, port = here.fleet.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        stranger.sendall(line)
        with pytest.raises(OSError):
            for nth in range(64):
                stranger.sendall(b"a" * 2**20 if not line.endswith(b"\n") else f"h{nth}: {'b' * 2**20}\r\n".encode())
    caller = Caller(here)
    assert caller.hello() == (200, "")


def test_a_device_cannot_fill_the_memory_with_messages_of_phases(here: Place) -> None:
    """Nobody polls for minutes while a large sum is made."""
    liar = Caller(here)
    liar.hello()
    message = PhaseReply("digits-1.3~share.pi-1", "A" * 60_000)
    got = [liar.push(message) for _ in range(MAX_MESSAGES + 2)]
    assert got == [(200, "")] * MAX_MESSAGES + [(503, "busy")] * 2
    assert sum(isinstance(a, PhaseReply) for a in here.fleet.poll(0.0)) == MAX_MESSAGES
    assert liar.push(message)[0] == 200
