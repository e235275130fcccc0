"""Record the session of today's protocol: `python -m tests.transport.write_transcript`.

It holds what every device out there says and understands. One that was written is never written again: devices that
speak it are in the field, and a change of it is a new version of the protocol (core/protocol.py), which gets its own.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests.support import recorded_session as session
from tests.support.transcript import GOLDEN, Exchange, Transcript, header_of, length_of
from tests.support.transport_doubles import Place, place
from thinwire.core.clock import VirtualClock
from thinwire.core.invitation import Invitation
from thinwire.core.types import PROTOCOL
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import Trust, device_key

FOLDER = GOLDEN / f"protocol-{PROTOCOL}"
PATIENCE_S = 20.0
RECORDED_POLL_S = 120.0  # what a device API said when the session was recorded


@contextlib.contextmanager
def recorded_place(folder: Path, wall: float) -> Iterator[Place]:
    """The device API of a session. It writes an upload as soon as the bytes before the cut are there, so that a replay
    is cut at the same byte: what a device API has not taken yet when a line is cut is lost.
    """
    stopped = VirtualClock(origin=wall)
    with (
        patch("thinwire.transport.server.uploads.STREAM_BYTES", session.CUT_AT),
        place(folder, tls=True, clock=stopped, poll_s=RECORDED_POLL_S) as here,
    ):
        here.roster.invitations[session.SECRET] = ""
        yield here


def until_taken(here: Place, cut: int) -> None:
    """Until so many bytes of the upload are written."""
    end = time.monotonic() + PATIENCE_S
    while not any(path.stat().st_size == cut for path in here.spool.folder.glob(".partial-*")):
        assert time.monotonic() < end, "what came of an upload was not written"
        time.sleep(0.01)


class Tap:
    """A man in the middle with the device API's own key: he passes everything on, and writes it down."""

    def __init__(self, here: Place) -> None:
        self.here, self.exchanges = here, list[Exchange]()
        self.happened, self._open, self._count, self._cut = list[str](), set[socket.socket](), 0, False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = "https://{}:{}".format(*self._listening.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def hang_up(self) -> None:
        for sock in list(self._open):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            sock, _ = self._listening.accept()
            threading.Thread(target=self._carry, args=(sock, self._count), daemon=True).start()
            self._count += 1

    def _carry(self, sock: socket.socket, number: int) -> None:
        authority = self.here.authority
        assert authority is not None
        host, _, port = self.here.fleet.address.rpartition(":")
        far = socket.create_connection((host, int(port)))
        try:
            with (
                authority.context.wrap_socket(sock, server_side=True) as near,
                Trust("", authority.cas()).context().wrap_socket(far, server_hostname=authority.server_name()) as api,
            ):
                self._open.add(near)
                self._pass(near, api, number)
        except OSError as error:
            if not isinstance(error, (ConnectionError, ssl.SSLError)):
                raise

    def _pass(self, near: ssl.SSLSocket, api: ssl.SSLSocket, number: int) -> None:
        said, told = near.makefile("rb"), api.makefile("rb")
        while header := header_of(said):
            cut = session.CUT_AT if header.startswith(b"PUT") and not self._cut else -1
            request = header + said.read(length_of(header) if cut < 0 else cut)
            happened, self.happened = tuple(self.happened), []
            api.sendall(request)
            answer = b""
            if cut < 0:
                answer = header_of(told)
                answer += b"" if header.startswith(b"HEAD") else told.read(length_of(answer))
            name = f"{len(self.exchanges) + 1:02}-{header.split(b' ')[1].decode().split('?')[0].split('/')[3]}"
            self.exchanges.append(Exchange(name, number, happened, request, answer, cut))
            if cut >= 0:
                self._cut = True
                until_taken(self.here, cut)
                break
            near.sendall(answer)
        self._open.discard(near)


def record(folder: Path) -> Transcript:
    wall = float(int(time.time()))
    standing = patch("thinwire.transport.device.enroll.ServerClock", lambda: session.clock_at(wall))
    with recorded_place(folder / "api", wall) as here, standing:
        assert here.authority is not None
        tap, key = Tap(here), device_key(folder)
        invitation = Invitation(here.authority.pin, session.SECRET)
        clock = session.clock_at(wall)
        trust = join(tap.url, invitation, key, session.NAME, {"thinwire": "0.1.0"}, clock).trust

        def happen(what: str) -> None:
            tap.happened.append(what)
            session.happening(here, what)
            if what == "restart":
                tap.hang_up()

        session.lived(session.Device(tap.url, key, folder / "device", trust, wall), happen)
        return Transcript(wall, here.authority.pin, tuple(tap.exchanges))


def main() -> None:
    if FOLDER.exists():
        raise SystemExit(f"{FOLDER} is written, and devices speak it: a change needs another version of the protocol")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("api", "device"):
            (Path(folder) / part).mkdir()
        made = record(Path(folder))
    made.write(FOLDER)
    for each in made.exchanges:
        print(each.name, each.connection, *each.line, len(each.request), each.answer.split(b"\r\n")[0].decode())


if __name__ == "__main__":
    main()
