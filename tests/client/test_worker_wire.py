"""Between the service and the process that trains: nothing is allocated by what the other side says."""

from __future__ import annotations

import json
import socket
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.client.train.framed_socket import LENGTH, MAX_HEADER, BadFrame, FramedSocket
from thinwire.client.worker_process import Interpreter, WorkerDied, WorkerProcess, describe_exit

FLOATS = np.arange(5, dtype=np.float32)


@pytest.fixture
def pair() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    here, there = socket.socketpair()
    with here, there:
        yield FramedSocket(here), FramedSocket(there)


def test_what_is_sent_is_heard(pair: tuple[FramedSocket, FramedSocket]) -> None:
    here, there = pair
    here.send({"do": "work", "text": "ä"}, FLOATS, FLOATS[:0], FLOATS[::2])
    header = there.header()
    assert header == {"do": "work", "text": "ä", "vectors": [5, 0, 3]}
    vectors = there.vectors(header, [5, 0, 3])
    assert [v.tobytes() for v in vectors] == [FLOATS.tobytes(), b"", FLOATS[::2].tobytes()]


@pytest.mark.parametrize("sizes", [[5, 2**40], [6], [], [5, 0], [True], ["5"]])
def test_vectors_of_other_lengths_are_refused_before_anything_is_allocated(
    pair: tuple[FramedSocket, FramedSocket], sizes: Sequence[object]
) -> None:
    here, there = pair
    data = json.dumps({"vectors": sizes}).encode()
    here.sock.sendall(LENGTH.pack(len(data)) + data)
    header = there.header()
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            there.vectors(header, [5])
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_whatever_bytes_come_are_a_header_or_refused(said: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(LENGTH.pack(len(said)) + said)
        try:
            header = FramedSocket(there).header()
        except BadFrame:
            return
        assert isinstance(header["vectors"], list)


@pytest.mark.parametrize("data", [LENGTH.pack(MAX_HEADER + 1), LENGTH.pack(2) + b"[]", LENGTH.pack(2) + b"{}"])
def test_a_header_that_is_none_is_refused(pair: tuple[FramedSocket, FramedSocket], data: bytes) -> None:
    pair[0].sock.sendall(data)
    with pytest.raises(BadFrame):
        pair[1].header()


def test_a_header_that_is_too_long_is_not_sent(pair: tuple[FramedSocket, FramedSocket]) -> None:
    with pytest.raises(BadFrame):
        pair[0].send({"said": "x" * MAX_HEADER})


@pytest.mark.parametrize("cut", [0, 3, 10, 60])
def test_who_is_gone_is_noticed_wherever_it_was(pair: tuple[FramedSocket, FramedSocket], cut: int) -> None:
    here, there = pair
    data = json.dumps({"vectors": [20]}).encode()
    here.sock.sendall((LENGTH.pack(len(data)) + data + bytes(80))[:cut])
    here.sock.close()
    with pytest.raises(EOFError):
        there.vectors(there.header(), [20])


class Speaking(Interpreter):
    """Whose process says these bytes on the socket, and waits for the other side to go."""

    said = b""

    def command(self, descriptor: int) -> list[str]:
        code = f"import socket; s = socket.socket(fileno={descriptor}); s.sendall({self.said!r}); s.recv(1)"
        return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    "said", [LENGTH.pack(2**32 - 1), LENGTH.pack(4) + b"\x80\x04N.", LENGTH.pack(15) + b'{"vectors":"5"}']
)
def test_a_process_that_says_what_cannot_be_is_ended(tmp_path: Path, said: bytes) -> None:
    speaking = Speaking(None, tmp_path)
    object.__setattr__(speaking, "said", said)
    child = WorkerProcess(speaking, tmp_path, 20.0)
    with pytest.raises(WorkerDied, match="it sent an invalid message"):
        while child.receive(20.0) is None:
            pass
    assert not child.alive


def test_a_process_that_did_not_start_is_said(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="it did not start: No such file"):
        WorkerProcess(Interpreter(tmp_path / "python", tmp_path), tmp_path, 20.0)


@pytest.mark.parametrize(
    ("code", "text"), [(0, "ended with exit code 0"), (-15, "killed by SIGTERM"), (-100, "killed by signal 100")]
)
def test_an_exit_code_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
