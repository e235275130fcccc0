"""Answers in pieces: cut anywhere, gone on from there, by the bytes that are durable."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, answers_now, envelope, polled, until
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import ClientConnected, ClientDisconnected
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import Failure, ReplyHeader
from thinwire.store import FileSpool, spool
from thinwire.transport.protocol.http import PUSH, pack
from thinwire.transport.server.assignments import MAX_SPOOLED_REPLIES

BODIES = (random.Random(1).randbytes(700_000), b"", random.Random(2).randbytes(300_001))
PATIENCE_S = 20.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, spool=lambda: FileSpool(tmp_path / "spool")) as made:
        yield made


class Uploader(Caller):
    """A device that sends one large answer by hand."""

    def __init__(self, here: Place, name: str = "pi-1") -> None:
        super().__init__(here, name)
        self.here, self.given = here, answer(name, "assignment-1", 1, *BODIES)
        assert self.hello() == (200, "")

    def assign(self, method: str, path: str, body: bytes = b"", digest: bytes | None = None, length: int = -1) -> Any:
        """(status, JSON, headers)."""
        connection = http.client.HTTPConnection(self.here.fleet.address, timeout=60)
        try:
            said = len(body) if length < 0 else length
            signed = self.signer.headers(method, path, digest or hashlib.sha256(body).digest(), said)
            connection.request(method, path, body or None, signed | {"content-length": str(said)})
            got = connection.getresponse()
            data = got.read()
            return got.status, json.loads(data) if data else {}, got.headers
        finally:
            connection.close()

    def push_header(self) -> list[int] | None:
        """How much of each part is there; None when all is done."""
        status, said, _ = self.assign("POST", PUSH, pack(reply_to_bytes(self.given)))
        assert status == 200
        return None if said.get("done") else said["offsets"]

    def path(self, index: int, offset: int | None = None) -> str:
        return f"/tw/v1/parts/digits-1/1/{index}" + ("" if offset is None else f"?offset={offset}")

    def put(self, index: int, offset: int, data: bytes | None = None) -> Any:
        body = BODIES[index][offset:] if data is None else data
        digest = hashlib.sha256(BODIES[index]).digest()
        status, said, _ = self.assign("PUT", self.path(index, offset), body, digest)
        return status, said

    def durable(self, index: int) -> int:
        status, _, headers = self.assign("HEAD", self.path(index))
        assert status == 200
        return int(headers["upload-offset"])

    def cut(self, index: int, offset: int, after: int) -> None:
        """A PUT whose connection ends after some bytes."""
        connection = http.client.HTTPConnection(self.here.fleet.address, timeout=60)
        body, path = BODIES[index][offset:], self.path(index, offset)
        signed = self.signer.headers("PUT", path, hashlib.sha256(BODIES[index]).digest(), len(body))
        connection.putrequest("PUT", path)
        for name, value in {**signed, "content-length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body[:after])
        connection.close()


def test_a_large_answer_comes_part_by_part(here: Place) -> None:
    device = Uploader(here)
    assert device.push_header() == [0, 0, 0]
    assert device.put(0, 0) == (200, {"offset": 700_000, "done": False})
    assert device.put(2, 0) == (200, {"offset": 300_001, "done": True})
    header = polled(here.fleet, ReplyHeader)
    assert [bytes(part) for part in here.fleet.open(header.update_id)] == list(BODIES)
    assert device.push_header() is None, "it is here: said again, it is not sent again"
    assert not answers_now(here.fleet)


def test_twenty_cuts_and_a_restart_give_the_same_bytes(here: Place) -> None:
    """What was durable is never sent again."""
    device, draws, sent = Uploader(here), random.Random(3), 0
    device.push_header()
    for nth in range(20):
        index = 0 if device.durable(0) < len(BODIES[0]) else 2
        offset = device.durable(index)
        after = draws.randrange(40_000)
        device.cut(index, offset, after)
        assert offset <= device.durable(index) <= offset + after
        sent += after
        if nth == 10:
            before = device.durable(index)
            here.restart()
            device.hello()
            offsets = device.push_header()
            assert offsets is not None
            assert offsets[index] == before
    for index in (0, 2):
        if (offset := device.durable(index)) < len(BODIES[index]):
            assert device.put(index, offset)[0] == 200
    header = polled(here.fleet, ReplyHeader)
    assert [bytes(part) for part in here.fleet.open(header.update_id)] == list(BODIES)


def test_a_wrong_offset_is_answered_with_the_right_one(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    device.cut(0, 0, 50_000)
    offset = device.durable(0)
    for wrong in (offset + 1, 700_001):
        assert device.put(0, wrong, b"x")[0] == 409
    status, said, headers = device.assign("PUT", device.path(0, 9), b"x", hashlib.sha256(BODIES[0]).digest())
    assert (status, said["error"], int(headers["upload-offset"])) == (409, "offset", offset)
    assert device.put(2, 0)[1]["error"] == "offset", "the parts come in their order"


def test_a_part_that_does_not_fit_its_digest_begins_again(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    assert device.put(0, 0, b"x" * 700_000)[1]["error"] == "damaged"
    assert device.durable(0) == 0
    assert device.put(0, 0)[0] == 200


def test_a_part_is_not_longer_than_its_header_said(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    assert device.put(0, 0, BODIES[0] + b"x")[0] == 413
    assert device.put(1, 0, b"x")[0] == 413


def test_parts_of_no_offer_are_unknown(here: Place) -> None:
    device = Uploader(here)
    assert device.put(0, 0) == (404, {"error": "offer", "why": "this reply was not offered: push its header first",
                                      "now": pytest.approx(time.time(), abs=60)})  # fmt: skip
    device.push_header()
    assert device.assign("HEAD", device.path(3))[0] == 404
    assert Uploader(here, "pi-2").put(0, 0)[0] == 404, "an upload belongs to one device"


def test_a_new_writer_ends_the_one_before(here: Place) -> None:
    """The old connection may look alive for a minute after its device lost it."""
    device = Uploader(here)
    device.push_header()
    hanging = http.client.HTTPConnection(here.fleet.address, timeout=60)
    path = device.path(0, 0)
    signed = device.signer.headers("PUT", path, hashlib.sha256(BODIES[0]).digest(), 700_000)
    hanging.putrequest("PUT", path)
    for name, value in {**signed, "content-length": "700000"}.items():
        hanging.putheader(name, value)
    hanging.endheaders()
    hanging.send(BODIES[0][:100_000])
    offset = device.durable(0)
    assert device.put(0, offset)[0] == 200
    with pytest.raises((OSError, http.client.HTTPException)):
        hanging.send(BODIES[0][100_000:400_000])
        hanging.getresponse()
    hanging.close()
    assert device.put(2, 0)[1]["done"]


def test_a_reply_that_is_being_committed_is_not_cut_back_by_a_second_writer(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the connection was cut after the last byte: the device asks what is here, and sends the empty rest."""
    device, add_header, ended = Uploader(here), spool._add_header, threading.Event()
    added, may_continue = threading.Event(), threading.Event()

    def add_and_wait(draft: Path, *rest: Any) -> None:
        add_header(draft, *rest)
        added.set()
        assert may_continue.wait(PATIENCE_S)

    def finish_first() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the second writer may abort it
            device.put(2, 0)
        ended.set()

    monkeypatch.setattr(spool, "_add_header", add_and_wait)
    device.push_header()
    device.put(0, 0)
    first = threading.Thread(target=finish_first)
    first.start()
    assert added.wait(PATIENCE_S)
    (draft,) = (here.folder / "spool").rglob(".partial-*")
    size, answers = draft.stat().st_size, list[Any]()
    second = threading.Thread(target=lambda: answers.append(device.put(2, len(BODIES[2]), b"")))
    second.start()
    until(lambda: ended.is_set() or draft.stat().st_size < size)
    may_continue.set()
    first.join()
    second.join()
    assert [header.parts for header in FileSpool(here.folder / "spool").headers()] == [device.given.parts]
    status, said = answers[0]
    assert (status, said["error"]) == (404, "offer")
    assert device.push_header() is None


def test_revoked_its_upload_is_gone_its_assignment_refused_and_nothing_arrives(here: Place) -> None:
    device = Uploader(here)
    polled(here.fleet, ClientConnected)
    here.fleet.send([envelope("pi-1", "assignment-1"), envelope("pi-1", "assignment-2")])
    device.push(answer("pi-1", "assignment-2", 2, b"x"), b"x")
    device.push_header()
    device.cut(0, 0, 100_000)
    device.durable(0)
    here.roster.put("pi-1", "revoked")
    here.fleet.revoke_access(["pi-1"])
    assert not list((here.folder / "spool").rglob(".*"))
    assert not here.spool.headers()
    arrived = here.fleet.poll(0.0)
    assert [(a.kind, a.text, a.assignment_id) for a in arrived if isinstance(a, Failure)] == [
        ("refused", "revoked", "assignment-1")
    ]
    assert [(a.device, a.why) for a in arrived if isinstance(a, ClientDisconnected)] == [("pi-1", "revoked")]
    assert not [a for a in arrived if isinstance(a, ReplyHeader)]
    assert device.pull() == (403, "revoked")
    here.roster.put("pi-1", "approved")
    assert device.hello() == (200, "")
    assert device.pull() == (200, "")
    here.fleet.send([envelope("pi-1", "assignment-3")])
    assert device.pull() == (200, "")


def test_an_unfinished_upload_of_a_run_is_deleted_with_its_bytes_and_may_begin_again(here: Place) -> None:
    """As at the end of a private round: what is here of a late update is in the clear, and is never used."""
    device = Uploader(here)
    device.push_header()
    device.cut(0, 0, 100_000)
    device.durable(0)
    spool = here.folder / "spool"
    here.fleet.drop_uploads("another-1")
    assert list(spool.rglob(".partial-*"))
    here.fleet.drop_uploads("digits-1")
    assert not list(spool.rglob(".*"))
    status, _ = device.put(0, 100_000)
    assert status == 404
    assert device.push_header() == [0, 0, 0]
    assert device.put(0, 0) == (200, {"offset": 700_000, "done": False})
    assert device.put(2, 0) == (200, {"offset": 300_001, "done": True})
    header = polled(here.fleet, ReplyHeader)
    here.fleet.drop_uploads("digits-1")
    assert [bytes(part) for part in here.fleet.open(header.update_id)] == list(BODIES), "a whole reply stays"


def test_all_replies_of_a_run_that_is_over_are_deleted_and_its_devices_may_send_others(here: Place) -> None:
    device = Uploader(here)
    device.push_header()
    device.cut(0, 0, 100_000)
    device.durable(0)
    for sequence in range(2, 2 + MAX_SPOOLED_REPLIES - 1):
        assert device.push(answer("pi-1", f"assignment-{sequence}", sequence, b"x"), b"x") == (200, "")
    other = answer("pi-1", "assignment-0", MAX_SPOOLED_REPLIES + 1, b"x")
    assert device.push(other, b"x") == (200, "")
    assert device.push(answer("pi-1", "another", 99, b"x"), b"x") == (503, "busy")
    here.fleet.drop_replies("another-1")
    assert len(here.spool.headers()) == MAX_SPOOLED_REPLIES
    here.fleet.drop_replies("digits-1")
    assert not [path for path in (here.folder / "spool").rglob("*") if path.is_file()]
    assert device.push(other, b"x") == (200, ""), "it is acknowledged again, and not stored"
    assert not here.spool.headers()
    assert device.push(answer("pi-1", "another", 99, b"x"), b"x") == (200, "")
