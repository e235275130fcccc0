"""What an expert would try: against a device that joins, as a stranger at the door, and as a device that was let in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.fleet_laws import answer, hello, polled
from tests.flower.callers import PATIENCE_S, Caller, TlsPlace, joined, tls_place
from tests.flower.certificates import Authority
from tests.flower.doubles import MemoryRoster, Place, place
from tests.flower.test_joining import listening
from thinwire.cli import shown_devices
from thinwire.cli.waiting import until
from thinwire.core.clock import RealClock
from thinwire.core.errors import Refused, UsageError
from thinwire.core.fleet import NodeJoined, NodeLeft, TaskReport
from thinwire.core.messages import ask_to_bytes
from thinwire.core.types import Ask, Failure
from thinwire.flower import device_key
from thinwire.flower.device.joining import join
from thinwire.flower.device.trust import Trust
from thinwire.flower.door.account import Wire
from thinwire.flower.door.limits import CONNECTIONS_OF_ONE, FAILED_JOINS
from thinwire.flower.door.requests import Gone, Request
from thinwire.flower.lane.hello import MOST_HELLOS, HelloRoute
from thinwire.flower.lane.uploads import OFFERS, Offer, Uploads
from thinwire.flower.stock.carrying import Carried
from thinwire.flower.stock.passing import StockPass
from thinwire.flower.stock.superexec import SuperExec
from thinwire.flower.stock.superlink import StockSuperLink
from thinwire.flower.stock.training_app import described, trained
from thinwire.flower.wire import hellos
from thinwire.flower.wire.certificates import private_context, server_name
from thinwire.flower.wire.framing import WORDS, block, packed
from thinwire.flower.wire.invitation import Invitation
from thinwire.flower.wire.routes import HELLO, JOIN, PULL, PUSH
from thinwire.flower.wire.signing import PUBLIC_KEY_HEADER, fingerprint, public_der

# In the middle, at join


@pytest.mark.parametrize("before", [False, True])
def test_a_pinned_certificate_brings_no_other_one_along(tmp_path: Path, before: bool) -> None:
    """One PEM text may hold several certificates: whoever stands in between adds his own CA to the door's."""
    door, his = Authority(), Authority()
    secret = Invitation.draw(door.pin)
    both = his.pem + door.pem if before else door.pem + his.pem
    shows: dict[str, object] = {"cas": [both], "server_name": server_name(door.pin)}
    forged, refused = his.chain(tmp_path, name=server_name(door.pin)), "not the aggregator of this invitation"
    with listening(forged, shows) as (url, heard), pytest.raises(Refused, match=refused):
        join(url, secret, device_key(tmp_path), "pi-1", {})
    assert len(heard) == 1, "he was asked for the CA, and for nothing else"


def test_a_file_of_trust_holds_each_certificate_once_and_nothing_beside_it(tmp_path: Path) -> None:
    door, his = Authority(), Authority()
    trust = Trust("https://agg.example", ("as an operator has it:\n" + door.pem + his.pem,), server_name(door.pin))
    assert [int(str(ca["serialNumber"]), 16) for ca in trust.context().get_ca_certs()] == [
        door.certificate.serial_number
    ]


# A stranger at the door


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    with tls_place(tmp_path) as made:
        yield made


def bomb(count: int) -> bytes:
    """4 KB that are `count` empty lists of JSON."""
    deflate = zlib.compressobj(9, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return block(deflate.compress(b"[" + b"[]," * count + b"[]]") + deflate.flush())


def test_a_strangers_join_is_not_blown_up_and_counts_as_failed(here: TlsPlace) -> None:
    stranger = Caller(here)
    got = [stranger.call("POST", JOIN, bomb(1_390_000)).short for _ in range(FAILED_JOINS + 1)]
    assert got == [(409, "protocol")] * FAILED_JOINS + [(429, "joins")]


def test_paths_that_strangers_make_up_are_not_remembered(here: TlsPlace) -> None:
    stranger = Caller(here)
    connection = stranger.connection()
    for nth in range(100):
        path = f"/tw/v1/asks/{nth}/bundle" if nth % 2 else f"/tw/v1/parts/run-{nth}/1/0"
        assert stranger.call("GET" if nth % 2 else "HEAD", path, headers={}, on=connection).status == 401
    connection.close()
    assert len(here.fleet.stats()["refused"]) == 2


def test_a_query_that_cannot_be_read_is_no_path_and_no_defect(here: TlsPlace, caplog: pytest.LogCaptureFixture) -> None:
    path = "/tw/v1/parts/digits-1/1/0?" + "&".join("abcdef")
    assert Caller(here).call("PUT", path, b"x", headers={}).status == 404
    assert not caplog.records


@contextlib.contextmanager
def stranger_at(here: Place) -> Iterator[socket.socket]:
    """A connection that nobody signs on, and that holds little of what it does not read."""
    host, port = here.fleet.address.rsplit(":", 1)
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(PATIENCE_S)
        plain.connect((host, int(port)))
        if here.authority is None:
            yield plain
            return
        with private_context(here.authority.cas()).wrap_socket(plain, server_hostname="localhost") as secured:
            yield secured


@pytest.mark.parametrize("tls", [False, True])
def test_refusals_that_a_stranger_does_not_read_are_not_kept_for_him(tmp_path: Path, tls: bool) -> None:
    """Many requests at once, each refused: what he does not read would lie here, and not there."""
    asked = b"GET /tw/v1/asks/a/bundle HTTP/1.1\r\n\r\n" * 2000
    with place(tmp_path, tls=tls) as here, stranger_at(here) as stranger, pytest.raises(OSError):
        for _ in range(8 * 2**20 // len(asked)):  # 30 MB of answers
            stranger.sendall(asked)


def test_what_follows_a_refused_body_is_not_read(here: TlsPlace) -> None:
    """Trailers of a chunked body are headers without a limit."""
    with stranger_at(here) as stranger:
        stranger.sendall(b"POST /tw/v1/join HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        assert stranger.recv(65_536).startswith(b"HTTP/1.1 413 ")
        (http,) = here.fleet._listener.wires.state.connections
        for nth in range(16):
            stranger.sendall(b"x-%d: %s\r\n" % (nth, b"a" * 10_000))
        with contextlib.suppress(OSError, ssl.SSLError):
            assert stranger.recv(1) == b""
        assert len(getattr(http, "headers", ())) == 1


# A device that was let in


@pytest.fixture
def liar(here: TlsPlace) -> Caller:
    """It has joined and said hello, and means no good."""
    caller = joined(here)
    assert caller.hello().status == 200
    polled(here.fleet, NodeJoined)
    return caller


def test_where_parts_begin_is_counted_once_however_many_there_are(tmp_path: Path) -> None:
    """For 30 000 parts of a byte the door stood still for half a minute when it was counted for each."""
    offer = Offer(answer("pi-1", "ask-1", 1, *[b"x"] * 1000), tmp_path, 0.0, size=400)
    assert offer.starts is offer.starts
    assert offer.offsets() == [1] * 400 + [0] * 600


def test_answers_that_are_begun_and_never_sent_hold_eight_files(here: TlsPlace, liar: Caller) -> None:
    for nth in range(1, OFFERS + 10):
        assert liar.push(answer("pi-1", "ask-1", nth, bytes(300_000))).told == {"offsets": [0]}
    assert len(list((here.folder / "spool").rglob(".partial-*"))) == OFFERS


@pytest.mark.parametrize("at", ["%C2%B2", "1" * 5000, "+0", "%D9%A0", "x"])
def test_an_offset_that_is_no_number_is_a_wrong_one(
    here: TlsPlace, liar: Caller, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert liar.push(answer("pi-1", "ask-1", 1, bytes(300_000))).status == 200
    assert liar.call("PUT", f"/tw/v1/parts/digits-1/1/0?offset={at}", b"x").short == (409, "offset")
    assert not caplog.records


def test_a_device_holds_so_many_connections_and_its_oldest_makes_room(here: TlsPlace, liar: Caller) -> None:
    """Signed for, none of them counts as a stranger's: they would take every descriptor that the door has."""
    held = [liar.connection() for _ in range(24)]
    for connection in held:
        assert liar.call("GET", "/tw/v1/asks/a/bundle", on=connection).short == (404, "ask")
    assert here.fleet.stats()["connections"] <= 17
    with pytest.raises((OSError, http.client.HTTPException)):
        liar.call("GET", "/tw/v1/asks/a/bundle", on=held[0])
    assert liar.call("GET", "/tw/v1/asks/a/bundle", on=held[-1]).status == 404
    for connection in held:
        connection.close()


def test_what_a_device_says_of_itself_moves_no_cursor_and_breaks_no_list(
    here: TlsPlace, liar: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "a\ud800\x1b[2J\n\u202e"
    said = replace(hello("pi-1"), tasks=(TaskReport(bad, bad, error=bad, codecs=(bad,)),), versions={bad: bad})
    assert liar.call("POST", HELLO, packed(hellos.to_bytes(said))).status == 200
    heard = polled(here.fleet, NodeJoined).hello
    assert liar.push(Failure("task-error", bad, "ask-1")).status == 200
    texts = [
        heard.tasks[0].name,
        heard.tasks[0].error,
        *heard.versions,
        *heard.versions.values(),
        polled(here.fleet, Failure).text,
    ]
    assert all(text.isprintable() and text.startswith("a") for text in texts)
    shown_devices.devices(here.store.devices(), True, False)
    assert capsys.readouterr().out.isascii()
    assert liar.push(replace(answer("pi-1", "ask-1", 1, b"x"), codec=bad), b"x").short == (409, "protocol")


# Shut out


def test_who_was_renamed_is_shut_out_under_the_name_that_he_came_with_too(here: TlsPlace, liar: Caller) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(liar.pull, 200.0)
        until(lambda: here.fleet.stats()["requests"]["pull"] == 1, PATIENCE_S)
        here.store.roster.rename("pi-1", "pi-2")
        here.store.roster.revoke("pi-2")
        here.fleet.shut_out(["pi-2"])
        assert waiting.result(PATIENCE_S).short == (403, "revoked")
    assert polled(here.fleet, NodeLeft) == NodeLeft("pi-1", "revoked")
    assert here.fleet._sessions.of("pi-1") is None


def test_who_is_shut_out_while_the_file_of_an_upload_is_made_leaves_none(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = here.fleet._spool.partial

    def meanwhile(*which: Any) -> Path:
        path = made(*which)
        here.store.roster.revoke("pi-1")
        here.fleet.shut_out(["pi-1"])
        return path

    monkeypatch.setattr(here.fleet._spool, "partial", meanwhile)
    assert liar.push(answer("pi-1", "ask-1", 1, bytes(300_000))).short == (403, "revoked")
    assert list((here.folder / "spool").rglob(".partial-*")) == []
    assert here.fleet._uploads._offers == {}
    assert not caplog.records


def test_a_part_whose_file_went_is_begun_anew(here: TlsPlace, liar: Caller, caplog: pytest.LogCaptureFixture) -> None:
    head = answer("pi-1", "ask-1", 1, bytes(300_000))
    assert liar.push(head).told == {"offsets": [0]}
    for file in (here.folder / "spool").rglob(".partial-*"):
        file.unlink()
    path, digest = "/tw/v1/parts/digits-1/1/0?offset=0", bytes.fromhex(head.parts[0].sha256)
    for wanted in ((404, "offer"), (200, "")):
        signed = liar.signer.headers("PUT", path, digest, 300_000)
        assert liar.call("PUT", path, bytes(300_000), headers=signed).short == wanted
        assert liar.push(head).status == 200
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
        raise Gone

    monkeypatch.setattr(HelloRoute, "__call__", closed)
    with pytest.raises((OSError, http.client.HTTPException)):
        liar.call("POST", HELLO, bytes(200_000))
    assert liar.push(Failure("task-error", "", "ask-1")).status == 200
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
        here.fleet.shut_out(["pi-1"])
        assert waiting.result(PATIENCE_S).short == (403, "revoked")
    assert polled(here.fleet, NodeLeft) == NodeLeft("pi-1", "revoked")
    assert "could not be removed" in caplog.text


def test_a_hello_that_waited_while_its_device_was_shut_out_is_not_welcomed(
    here: TlsPlace, liar: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def meanwhile(*_: object) -> None:
        here.store.roster.revoke("pi-1")
        here.fleet._shut_out_here("pi-1")

    monkeypatch.setattr(HelloRoute, "_alone", meanwhile)
    assert liar.hello().short == (403, "revoked")
    assert not [a for a in here.fleet.poll(0.2) if isinstance(a, NodeJoined)]
    assert here.fleet._sessions.of("pi-1") is None


# What a device that was let in may cost


def test_a_head_of_nothing_is_not_blown_up(here: TlsPlace, liar: Caller) -> None:
    """4 KB that make a million lists kept the door busy for a tenth of a second, as often as a device liked."""
    for path in (HELLO, PULL, PUSH):
        said = liar.call("POST", path, bomb(1_390_000))
        assert said.short == (409, "protocol")
        assert "a block of more than" in said.told["why"]


def test_a_head_of_many_digests_is_read(here: TlsPlace, liar: Caller) -> None:
    parts = [bytes([n % 256, n // 256]) for n in range(3000)]
    assert liar.push(answer("pi-1", "ask-1", 1, *parts), b"".join(parts)).told == {"done": True}


def test_who_says_hello_all_the_time_is_told_to_wait(here: TlsPlace, liar: Caller) -> None:
    """Each hello that says something new is a row of the journal."""
    got = [liar.hello().short for _ in range(MOST_HELLOS)]
    assert got == [(200, "")] * (MOST_HELLOS - 1) + [(503, "busy")]
    assert len(here.store.events(None)) <= MOST_HELLOS


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
    offer = Offer(answer("pi-1", "ask-1", 1, b"x"), tmp_path / "parts", 0.0, size=0, writer=Wire())
    going = list[int]()

    async def both() -> None:
        async def one(number: int) -> None:
            await Uploads._release(cast(Any, None), offer)
            offer.writer = Wire()
            going.append(number)

        waiting = [asyncio.ensure_future(one(number)) for number in (1, 2)]
        await asyncio.sleep(0)
        offer.writer = None
        offer.released.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert going == [1]
        offer.writer = None
        offer.released.set()
        await asyncio.gather(*waiting)

    asyncio.run(both())


# A browser on the aggregator's machine


@pytest.mark.parametrize(
    "browser",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "none"}],
)
def test_no_page_in_a_browser_controls_the_second_superlink(browser: dict[str, str]) -> None:
    """Whoever may call it runs code. A page whose name is rebound to 127.0.0.1 calls it as its own."""
    link = StockSuperLink(authenticated=False)

    def ask(headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection(link.control_address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
            connection.request("POST", "/v1/control/list-runs", b"", {**kind, **headers})
            return connection.getresponse().status

    async def both() -> list[int]:
        async with link.running():
            return [await asyncio.to_thread(ask, headers) for headers in ({}, browser)]

    assert asyncio.run(both()) == [200, 403]


@pytest.mark.parametrize("host", ["evil.example:9090", "127.0.0.1.evil.example", "", "localhost.evil:9090"])
def test_no_page_in_a_browser_passes_a_plain_door_as_a_stock_node(host: str) -> None:
    guests = StockPass(MemoryRoster(), RealClock(), SuperExec(Path("said")), private=True)
    for good in ("127.0.0.1:9090", "localhost:9090", "[::1]:9090", "127.1.2.3"):
        assert guests.may_pass({b"host": good.encode()}) is None
    assert (refusal := guests.may_pass({b"host": host.encode()})) is not None
    assert (refusal.status, refusal.kind) == (403, "browser")
    assert guests.may_pass({b"host": b"127.0.0.1:9090", b"origin": b"http://127.0.0.1:9090"}) is not None


@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_run_of_stock_nodes_names_no_module(tmp_path: Path, kind: str) -> None:
    """What is trained is named on the node's own command line; the run's name for it went before that."""
    (tmp_path / "his.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    context = cast(Any, SimpleNamespace(node_config={"task": "json", "home": str(tmp_path)}, node_id=1))
    name = f"digits={tmp_path}/his.py:x"
    with pytest.raises(UsageError, match="is no task's name"):
        if kind == "query":
            described(Carried(json.dumps({"task": name, "seed": 1}).encode()), context)
        else:
            trained(Carried(ask_to_bytes(Ask("digits-1.1.pi-1", "digits-1", name, "train", {}))), context)
    assert not (tmp_path / "ran").exists()


class AllPass:
    """Guests of whom everybody may pass, by the key that they name."""

    paths = frozenset({"/v1/fleet/pull-messages"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> None:
        return None

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        return headers[b"key"].decode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def test_a_stock_node_holds_so_many_connections_too(tmp_path: Path) -> None:
    with tls_place(tmp_path, guests=AllPass()) as here:
        caller = Caller(here)
        held = [(caller.connection(), {"key": "a" if nth < 24 else "b"}) for nth in range(26)]
        for connection, headers in held:
            assert caller.call("POST", "/v1/fleet/pull-messages", b"", headers, connection).status == 200
        until(lambda: here.fleet.stats()["connections"] == CONNECTIONS_OF_ONE + 2, PATIENCE_S)
        assert here.fleet.stats()["connections"] == CONNECTIONS_OF_ONE + 2
        for connection, _ in held:
            connection.close()


def test_one_key_of_a_stock_node_is_one_however_it_is_spelled() -> None:
    guests = StockPass(MemoryRoster(), RealClock(), SuperExec(Path("said")), private=False)
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    said = {
        guests.who({PUBLIC_KEY_HEADER.encode(): base64.b64encode(spelled)})
        for spelled in (pem, pem + b"\n", b"x\n" + pem)
    }
    assert said == {fingerprint(public_der(public))}
