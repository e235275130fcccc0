"""What can be read of a request, and how much of it: over real sockets, by hand."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, answers_now, hello, polled
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import FixedLimits
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import Failure, Part, ReplyHeader, UpdateId
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, PULL, PUSH, pack


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    limits = FixedLimits(ReplyLimit(100_000))
    with place(tmp_path, limits=limits, grace_s=60.0) as made:  # a caller between two connections has not left
        yield made


@pytest.mark.parametrize("run", ["..", ".hidden", "a b", "x" * 200, ""])
def test_a_run_that_cannot_be_a_folder_is_refused(here: Place, run: str) -> None:
    caller = Caller(here)
    caller.hello()
    assert caller.push(ReplyHeader("assignment-1", UpdateId(run, "pi-1", 1), 0, 1)) == (409, "protocol")


def test_an_answer_beyond_its_limit_is_refused_before_it_is_read(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    header = ReplyHeader(
        "assignment-1", UpdateId("digits-1", "pi-1", 1), 0, 1, parts=(Part("frame/0", 2**40, "0" * 64),)
    )
    assert caller.push(header) == (413, "too-large")
    failure = polled(here.fleet, Failure)
    assert (failure.kind, failure.assignment_id, failure.device) == ("protocol", "assignment-1", "pi-1")


@pytest.mark.parametrize(("path", "length"), [(HELLO, 2**20), (PULL, 2**20), (PUSH, 2**23)])
def test_a_body_beyond_its_limit_is_refused_before_it_is_read(here: Place, path: str, length: int) -> None:
    caller = Caller(here)
    caller.hello()
    headers = caller.signer.headers("POST", path, length=4 + length) | {"content-length": str(4 + length)}
    connection = http.client.HTTPConnection(caller.address, timeout=60)
    connection.putrequest("POST", path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(length.to_bytes(4, "little"))
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"null", b"\xff", b'{"name": 1}', b"[" * 100_000])
def test_what_is_not_readable_is_refused(here: Place, header: bytes) -> None:
    caller = Caller(here)
    caller.hello()
    assert [caller.call(path, header) for path in (HELLO, PULL, PUSH)] == [(409, "protocol")] * 3


def test_a_hello_with_an_impossible_name_or_protocol_is_refused(here: Place) -> None:
    caller = Caller(here)
    said = registration.to_bytes(hello("pi-1"))
    assert caller.hello("Pi/1") == (409, "protocol")
    assert caller.call(HELLO, said.replace(b'"protocol":1,"oldest":1', b'"protocol":9,"oldest":8')) == (403, "protocol")


def test_a_body_of_unknown_length_is_refused(here: Place) -> None:
    caller = Caller(here)
    connection = http.client.HTTPConnection(caller.address, timeout=60)
    headers = caller.signed(HELLO, b"{}") | {"transfer-encoding": "chunked"}
    connection.request("POST", HELLO, iter([pack(b"{}")]), headers, encode_chunked=True)
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

    def full(draft: Path, header: ReplyHeader, received: bytes = b"") -> None:
        raise OSError(28, "No space left on device")

    header = answer("pi-1", "assignment-1", 1, b"abc")
    with monkeypatch.context() as patched:
        patched.setattr(here.spool, "commit", full)
        assert caller.push(header, b"abc") == (503, "disk")
        assert not answers_now(here.fleet)
    assert caller.push(header, b"abc") == (200, "")
    assert polled(here.fleet, ReplyHeader).update_id == header.update_id


def test_each_reply_that_is_not_stored_leaves_no_draft(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(here)
    caller.hello()

    def full(draft: Path, header: ReplyHeader, received: bytes = b"") -> None:
        assert draft.read_bytes() == b"abc"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(here.spool, "commit", full)
    for _ in range(2):
        assert caller.push(answer("pi-1", "assignment-1", 1, b"abc"), b"abc") == (503, "disk")
        assert here.spool.drafts() == []
