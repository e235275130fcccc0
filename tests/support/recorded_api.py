"""A device API that is a transcript: it answers each request as the real one did when the transcript was recorded."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.transcript import Transcript, header_of, length_of


@dataclass
class RecordedApi:
    """`out_of_candidates`: names of exchanges that nobody has made yet; `surprises`: requests that no transcript
    answers.
    """

    transcript: Transcript
    address: str
    out_of_candidates: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out_of_candidates = [each.name for each in self.transcript.exchanges]
        self._lock = threading.Lock()

    def serve(self, sock: socket.socket) -> None:
        """A connection: the next answer that was given to this method and path."""
        with sock, sock.makefile("rb") as said:
            while header := header_of(said):
                method, target = header.split(b" ")[0].decode(), header.split(b" ")[1].decode()
                with self._lock:
                    waiting = [e for e in self.transcript.exchanges if e.name in self.out_of_candidates]
                    found = next((each for each in waiting if each.line == (method, target)), None)
                    if found is None:
                        self.surprises.append(f"{method} {target}")
                        return
                    self.out_of_candidates.remove(found.name)
                said.read(length_of(header) if found.cut < 0 else found.cut)
                if found.cut >= 0:
                    return
                sock.sendall(found.answer)


@contextlib.contextmanager
def recorded_api_of(transcript: Transcript, tls: ssl.SSLContext | None = None) -> Iterator[RecordedApi]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        api, served = RecordedApi(transcript, f"{host}:{port}"), list[threading.Thread]()

        def one(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):
                api.serve(tls.wrap_socket(sock, server_side=True) if tls else sock)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    served.append(threading.Thread(target=one, args=(sock,), daemon=True))
                    served[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield api
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(60)
