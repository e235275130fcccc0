"""What an expert would try with a device that was approved, and with one that is being revoked."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, bomb, joined, tls_place
from tests.support.fleet_words import answer, hello, polled
from thinwire.cli.devices import render
from thinwire.core.fleet import ClientConnected, ClientDisconnected, FixedLimits, TaskReport
from thinwire.core.part_file import PartFile
from thinwire.core.serialization import ReplyLimit
from thinwire.core.signals import until
from thinwire.core.types import Failure
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, PULL, PUSH, pack
from thinwire.transport.server.app import ConnectionClosed, Request
from thinwire.transport.server.auth import FAILED_JOINS
from thinwire.transport.server.connections import Connection
from thinwire.transport.server.presence import Presence
from thinwire.transport.server.registration import MAX_HELLOS, HelloRoute
from thinwire.transport.server.uploads import MAX_OPEN_UPLOADS, Upload, Uploads


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    limits = FixedLimits(ReplyLimit(2**30, header_bytes=2**19))  # as for a model of 3000 segments
    with tls_place(tmp_path, limits=limits) as made:
        yield made


# A device that was approved


@pytest.fixture
def liar(here: TlsPlace) -> Caller:
    """It has joined and said hello, and means no good."""
    caller = joined(here)
    assert caller.hello().status == 200
    polled(here.fleet, ClientConnected)
    return caller


def test_where_parts_begin_is_counted_once_however_many_there_are(tmp_path: Path) -> None:
    """For 30 000 parts of a byte the device API stood still for half a minute when it was counted for each."""
    reply = answer("pi-1", "assignment-1", 1, *[b"x"] * 1000)
    upload = Upload(reply, PartFile(tmp_path, reply.parts), 0.0)
    upload.file.size = 400
    assert upload.file.starts is upload.file.starts
    assert upload.offsets() == [1] * 400 + [0] * 600


def test_answers_that_are_begun_and_never_sent_hold_eight_files(here: TlsPlace, liar: Caller) -> None:
    for nth in range(1, MAX_OPEN_UPLOADS + 10):
        assert liar.push(answer("pi-1", "assignment-1", nth, bytes(300_000))).told == {"offsets": [0]}
    assert len(list((here.folder / "spool").rglob(".partial-*"))) == MAX_OPEN_UPLOADS


@pytest.mark.parametrize("at", ["%C2%B2", "1" * 5000, "+0", "%D9%A0", "x"])
def test_an_offset_that_is_no_number_is_a_wrong_one(
    here: TlsPlace, liar: Caller, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert liar.push(answer("pi-1", "assignment-1", 1, bytes(300_000))).status == 200
    assert liar.call("PUT", f"/tw/v1/parts/digits-1/1/0?offset={at}", b"x").short == (409, "offset")
    assert not caplog.records


def test_a_device_holds_so_many_connections_and_its_oldest_makes_room(here: TlsPlace, liar: Caller) -> None:
    """Signed for, none of them counts as a stranger's: they would take every descriptor that the device API has."""
    held = [liar.connection() for _ in range(24)]
    for connection in held:
        assert liar.call("GET", "/tw/v1/assignments/a/bundle", on=connection).short == (404, "assignment")
    assert here.fleet.stats()["connections"] <= 17
    with pytest.raises((OSError, http.client.HTTPException)):
        liar.call("GET", "/tw/v1/assignments/a/bundle", on=held[0])
    assert liar.call("GET", "/tw/v1/assignments/a/bundle", on=held[-1]).status == 404
    for connection in held:
        connection.close()


def test_what_a_device_says_of_itself_moves_no_cursor_and_breaks_no_list(
    here: TlsPlace, liar: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "a\ud800\x1b[2J\n\u202e"
    said = replace(hello("pi-1"), tasks=(TaskReport(bad, bad, error=bad, codecs=(bad,)),), versions={bad: bad})
    assert liar.call("POST", HELLO, pack(registration.to_bytes(said))).status == 200
    heard = polled(here.fleet, ClientConnected).hello
    assert liar.push(Failure("task-error", bad, "assignment-1")).status == 200
    texts = [
        heard.tasks[0].name,
        heard.tasks[0].error,
        *heard.versions,
        *heard.versions.values(),
        polled(here.fleet, Failure).text,
    ]
    assert all(text.isprintable() and text.startswith("a") for text in texts)
    render.print_devices(here.store.devices(), render.AggregatorState(tls=True), False)
    assert capsys.readouterr().out.isascii()
    assert liar.push(replace(answer("pi-1", "assignment-1", 1, b"x"), codec=bad), b"x").short == (409, "protocol")


# Revoked


def test_who_was_renamed_is_revoked_under_the_name_that_he_came_with_too(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep is switched off: between the two calls it would find the new name and ask for a hello instead."""
    monkeypatch.setattr(Presence, "renamed", lambda *_: None)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(liar.pull, 200.0)
        until(lambda: here.fleet.stats()["requests"]["pull"] == 1, PATIENCE_S)
        here.store.roster.rename("pi-1", "pi-2")
        here.store.roster.revoke("pi-2")
        here.fleet.revoke_access(["pi-2"])
        assert waiting.result(PATIENCE_S).short == (403, "revoked")
    assert polled(here.fleet, ClientDisconnected) == ClientDisconnected("pi-1", "revoked")
    assert here.fleet._presence.of("pi-1") is None


def test_who_is_revoked_while_the_file_of_an_upload_is_made_leaves_none(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = here.fleet._spool.partial

    def meanwhile(*which: Any) -> Path:
        path = made(*which)
        here.store.roster.revoke("pi-1")
        here.fleet.revoke_access(["pi-1"])
        return path

    monkeypatch.setattr(here.fleet._spool, "partial", meanwhile)
    assert liar.push(answer("pi-1", "assignment-1", 1, bytes(300_000))).short == (403, "revoked")
    assert list((here.folder / "spool").rglob(".partial-*")) == []
    assert here.fleet._uploads._open_uploads == {}
    assert not caplog.records


def test_a_part_whose_file_went_is_begun_again(here: TlsPlace, liar: Caller, caplog: pytest.LogCaptureFixture) -> None:
    header = answer("pi-1", "assignment-1", 1, bytes(300_000))
    assert liar.push(header).told == {"offsets": [0]}
    for file in (here.folder / "spool").rglob(".partial-*"):
        file.unlink()
    path, digest = "/tw/v1/parts/digits-1/1/0?offset=0", bytes.fromhex(header.parts[0].sha256)
    for wanted in ((404, "offer"), (200, "")):
        signed = liar.signer.headers("PUT", path, digest, 300_000)
        assert liar.call("PUT", path, bytes(300_000), headers=signed).short == wanted
        assert liar.push(header).status == 200
    assert not caplog.records


def test_a_connection_that_is_closed_twice_leaves_no_traceback(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of an upload whose writer was ended: it was one for each, as often as a device liked."""

    async def closed(_: object, request: Request) -> None:
        cycle = cast(Any, request._receive).__self__
        while not cycle.flow.read_paused:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        request.wire.close()
        raise ConnectionClosed

    monkeypatch.setattr(HelloRoute, "__call__", closed)
    with pytest.raises((OSError, http.client.HTTPException)):
        liar.call("POST", HELLO, bytes(200_000))
    assert liar.push(Failure("task-error", "", "assignment-1")).status == 200
    assert not caplog.records


def test_a_disk_that_refuses_keeps_nobody_in(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(here.fleet._spool, "drop_partial", refuse)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(liar.pull, 200.0)
        until(lambda: here.fleet.stats()["requests"]["pull"] == 1, PATIENCE_S)
        here.store.roster.revoke("pi-1")
        here.fleet.revoke_access(["pi-1"])
        assert waiting.result(PATIENCE_S).short == (403, "revoked")
    assert polled(here.fleet, ClientDisconnected) == ClientDisconnected("pi-1", "revoked")
    assert "could not be removed" in caplog.text


def test_a_hello_that_waited_while_its_device_was_revoked_is_not_welcomed(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def meanwhile(*_: object) -> None:
        here.store.roster.revoke("pi-1")
        here.fleet._revoke_here("pi-1")

    monkeypatch.setattr(HelloRoute, "_require_single_process", meanwhile)
    assert liar.hello().short == (403, "revoked")
    assert not [a for a in here.fleet.poll(0.2) if isinstance(a, ClientConnected)]
    assert here.fleet._presence.of("pi-1") is None


# What a device that was approved may cost


def test_a_header_of_nothing_is_not_blown_up(here: TlsPlace, liar: Caller) -> None:
    """4 KB that make a million lists kept the device API busy for a tenth of a second, as often as a device liked."""
    for path in (HELLO, PULL, PUSH):
        said = liar.call("POST", path, bomb(1_390_000))
        assert said.short == (409, "protocol")
        assert "a block of more than" in said.told["why"]


def test_a_header_of_many_digests_is_read(here: TlsPlace, liar: Caller) -> None:
    parts = [bytes([n % 256, n // 256]) for n in range(3000)]
    assert liar.push(answer("pi-1", "assignment-1", 1, *parts), b"".join(parts)).told == {"done": True}


def test_who_says_hello_all_the_time_is_told_to_wait(here: TlsPlace, liar: Caller) -> None:
    """Each hello that says something new is a row of the journal."""
    got = [liar.hello().short for _ in range(MAX_HELLOS)]
    assert got == [(200, "")] * (MAX_HELLOS - 1) + [(503, "busy")]
    assert len(here.store.events(None)) <= MAX_HELLOS


@pytest.mark.parametrize("state", ["pending", "revoked"])
def test_a_join_that_is_made_again_and_again_is_told_to_wait(here: TlsPlace, state: str) -> None:
    """Each takes the store's lock, and one that waits for approval writes a line into the log."""
    caller, secret = Caller(here), here.invited(approve_manually=True)
    assert caller.join(secret).status == 200
    if state == "revoked":
        here.store.roster.revoke("pi-1")
    got = [caller.join(secret).status for _ in range(FAILED_JOINS + 1)]
    assert got == [403 if state == "revoked" else 200] * FAILED_JOINS + [429]


def test_names_are_not_tried_out_with_an_invitation(here: TlsPlace) -> None:
    joined(here, "pi-1")
    caller, secret = Caller(here, "pi-1"), here.new_secret()
    got = [caller.join(secret).short for _ in range(FAILED_JOINS + 1)]
    assert got == [(409, "name")] * FAILED_JOINS + [(429, "joins")]


def test_of_two_that_wait_for_a_writer_only_one_goes_on_at_once(tmp_path: Path) -> None:
    reply = answer("pi-1", "assignment-1", 1, b"x")
    upload = Upload(reply, PartFile(tmp_path / "parts", reply.parts), 0.0, writer=Connection())
    uploads = cast(Any, SimpleNamespace(_open_uploads={reply.update_id: upload}))
    going = list[int]()

    async def both() -> None:
        async def one(number: int) -> None:
            await Uploads._release(uploads, upload)
            upload.writer = Connection()
            going.append(number)

        waiting = [asyncio.ensure_future(one(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        upload.writer = None
        upload.released.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert going == [1]
        upload.writer = None
        upload.released.set()
        await asyncio.gather(*waiting)

    asyncio.run(both())


def test_a_revocation_that_cannot_be_carried_out_is_not_confirmed(
    here: TlsPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> None:
        raise OSError("the database cannot be read")

    monkeypatch.setattr(here.store.roster, "rows", unreadable)
    with pytest.raises(OSError, match="cannot be read"):
        here.fleet.revoke_access(["pi-1"])
