"""What was recorded of a version of the protocol is understood by both ends for as long as the version is spoken."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support import recorded_session as session
from tests.support.certificates import Authority
from tests.support.recorded_api import recorded_api_of
from tests.support.transcript import GOLDEN, Exchange, Meaning, Transcript, header_of, length_of
from tests.support.transport_doubles import Place
from tests.transport.write_transcript import recorded_place, until_taken
from thinwire.core.fleet import ClientConnected
from thinwire.core.invitation import Invitation
from thinwire.core.protocol import SPOKEN
from thinwire.core.types import Failure, ReplyHeader
from thinwire.transport.device.enroll import join, trust_of
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.protocol.certificates import server_name
from thinwire.transport.protocol.signing import Signer

HINT = "the session of a new version is recorded by python -m tests.transport.write_transcript"


@pytest.fixture(params=sorted(SPOKEN), ids=lambda version: f"protocol-{version}")
def recorded(request: pytest.FixtureRequest) -> Transcript:
    folder = GOLDEN / f"protocol-{request.param}"
    assert folder.is_dir(), HINT
    return Transcript.read(folder)


class Replay:
    """The recorded requests at a device API of today, each on the connection that it was made on."""

    def __init__(self, here: Place, wall: float) -> None:
        assert here.authority is not None
        self.here, self._wall = here, wall
        self.context, self.name = Trust("", here.authority.cas()).context(), here.authority.server_name()
        self._open = contextlib.ExitStack()
        self._connections: dict[int, ssl.SSLSocket] = {}

    def answer(self, exchange: Exchange) -> bytes:
        for what in exchange.happened:
            session.happening(self.here, what)
        sock = self._connections.get(exchange.connection) or self._dial(exchange.connection)
        # Two requests were recorded by a clock that ran on while the device API's stood: the device API reads theirs as
        # it comes.
        stamp = re.search(rb"flwr-timestamp: (\S+)", exchange.request, re.IGNORECASE)
        ahead_s = datetime.fromisoformat(stamp[1].decode()).timestamp() - self._wall if stamp else 0.0
        self.here.options["clock"].at = max(0.0, ahead_s)
        sock.sendall(exchange.request)
        if exchange.cut >= 0:
            until_taken(self.here, exchange.cut)
            sock.close()
            return b""
        with sock.makefile("rb") as told:
            header = header_of(told)
            return header + (b"" if exchange.line[0] == "HEAD" else told.read(length_of(header)))

    def _dial(self, number: int) -> ssl.SSLSocket:
        host, _, port = self.here.fleet.address.rpartition(":")
        raw = socket.create_connection((host, int(port)), 20.0)
        made = self._open.enter_context(self.context.wrap_socket(raw, server_hostname=self.name))
        self._connections[number] = made
        return made

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def replay(tmp_path: Path, recorded: Transcript) -> Iterator[Replay]:
    with recorded_place(tmp_path, recorded.wall) as here:
        made = Replay(here, recorded.wall)
        yield made
        made.close()


def test_todays_device_api_answers_the_recorded_requests_as_it_did(recorded: Transcript, replay: Replay) -> None:
    for exchange in recorded.exchanges:
        answer = replay.answer(exchange)
        if exchange.cut < 0:
            before, now = Meaning.of(exchange, exchange.answer), Meaning.of(exchange, answer)
            assert now.holds(before), (exchange.name, before, now)


def test_todays_device_api_understands_the_recorded_requests(recorded: Transcript, replay: Replay) -> None:
    arrived = list[object]()
    for exchange in recorded.exchanges:
        replay.answer(exchange)
        arrived += replay.here.fleet.poll(0.0)
    hellos = [each.hello for each in arrived if isinstance(each, ClientConnected)]
    headers = {each.update_id: each for each in arrived if isinstance(each, ReplyHeader)}
    failures = [each for each in arrived if isinstance(each, Failure)]
    assert [replace(each, link={}, trusted_pins=()) for each in hellos] == [session.HELLO] * 2
    assert {each.trusted_pins for each in hellos} == {(recorded.pin,)}
    assert [replace(each, transfer=None) for each in headers.values()] == [session.SMALL_REPLY, session.LARGE_REPLY]
    sent = [b"".join(replay.here.fleet.open(update_id)) for update_id in headers]
    assert sent == [b"".join(session.ANSWER), b"".join(session.LARGE_ANSWER)]
    assert [replace(each, transfer=None) for each in failures if each.kind == "task-error"] == [
        replace(session.FAILURE, device=session.NAME)
    ]
    assert replay.here.roster.devices[session.NAME].state == "revoked"


def test_todays_device_understands_the_recorded_answers(recorded: Transcript, tmp_path: Path) -> None:
    with recorded_api_of(recorded) as api:
        device = session.Device(f"http://{api.address}", device_key(tmp_path), tmp_path, None, recorded.wall)
        got = session.lived(device, lambda what: None)
        assert api.surprises == []
        assert api.out_of_candidates == ["01-ca", "02-join"]
    assignments = [delivery.assignment if delivery else None for delivery in got.deliveries]
    small, large, again, bare = (wanted for wanted, _ in session.ASKS.values())
    assert assignments == [small, large, again, None, bare]
    assert got.bodies == tuple(b"".join(parts) for _, parts in session.ASKS.values() if parts)
    assert got.withdrawn == {again.assignment_id}
    assert (got.before.kind, got.after.kind) == ("assignment", "revoked")
    welcome = got.welcome
    assert (welcome.name, welcome.protocol, welcome.poll_s) == (session.NAME, session.HELLO.protocol, 120.0)
    assert (welcome.server_time, len(welcome.cas)) == (recorded.wall, 1)


def test_todays_device_joins_by_the_recorded_answers(recorded: Transcript, tmp_path: Path) -> None:
    """Nobody has the keys of the recorded CA and device any more, so others stand in where one is to be proved."""
    with recorded_api_of(recorded, Authority().chain(tmp_path)) as api:
        assert trust_of(f"https://{api.address}", recorded.pin).pins == (recorded.pin,)
    mine, key = Authority(), device_key(tmp_path)
    shown = replace(recorded, exchanges=tuple(_standing_in(mine, key, each) for each in recorded.exchanges))
    with recorded_api_of(shown, mine.chain(tmp_path)) as api:
        invitation = Invitation(mine.pin, session.SECRET)
        joined = join(f"https://{api.address}", invitation, key, session.NAME, {})
    assert (joined.name, joined.state, joined.trust.pins) == (session.NAME, "approved", (recorded.pin,))


def _standing_in(authority: Authority, key: ec.EllipticCurvePrivateKey, exchange: Exchange) -> Exchange:
    """The answers to a join with this CA, and for this device's key."""
    if exchange.route == "ca":
        body = json.dumps({"cas": [authority.pem], "server_name": server_name(authority.pin)}).encode()
        return replace(exchange, answer=b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    if exchange.route == "join":
        before, mine = Meaning.of(exchange, exchange.answer).said[0]["fingerprint"], Signer(key).fingerprint
        return replace(exchange, answer=exchange.answer.replace(before.encode(), mine.encode()))
    return exchange
