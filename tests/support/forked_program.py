"""A program on PATH whose processes are forked: a shell starts it, and this process starts what it stands for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.fork_server import MAX_REQUEST, Forked

ADDRESS = "TEST_FORKS_AT"  # the socket at which the program asks for its process
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
wire.connect(os.environ["{address}"])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda came, _: wire.send(bytes([came])))
request = {{"words": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}
socket.send_fds(wire, [json.dumps(request).encode()], [0, 1, 2])
code = int(wire.recv(64) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def forked_program(program: Path, folder: Path) -> Iterator[Mapping[str, str]]:
    """Put a program of the same name into `folder`; gives the variables by which it finds this process.

    Invariant: a signal that ends it reaches its process and all that this started, as a terminal's does.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = folder / "forks"
    listening.bind(str(address))
    listening.listen()
    shown = folder / program.name
    shown.write_text(PROGRAM.format(python=sys.executable, address=ADDRESS))
    shown.chmod(0o755)
    accepting = threading.Thread(target=_accept, args=(listening, program), daemon=True)
    accepting.start()
    try:
        yield {ADDRESS: str(address)}
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listening.close()


def _accept(listening: socket.socket, program: Path) -> None:
    with contextlib.suppress(OSError):  # it is shut down
        while True:
            wire, _ = listening.accept()
            threading.Thread(target=_run, args=(wire, program), daemon=True).start()


def _run(wire: socket.socket, program: Path) -> None:
    with wire:
        message, descriptors, _, _ = socket.recv_fds(wire, MAX_REQUEST, 3)
        request = json.loads(message)
        stdin, stdout, stderr = descriptors
        process = Forked(
            [sys.executable, str(program), *request["words"]], cwd=request["cwd"], env=request["env"],
            stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        for number in descriptors:
            os.close(number)
        threading.Thread(target=_pass_signals, args=(wire, process), daemon=True).start()
        code = process.wait()
        with contextlib.suppress(OSError):  # the program was killed
            wire.send(str(code).encode())
            wire.shutdown(socket.SHUT_RDWR)


def _pass_signals(wire: socket.socket, process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        while came := wire.recv(1):
            os.killpg(process.pid, came[0])
        if process.poll() is None:  # the program was killed
            os.killpg(process.pid, signal.SIGKILL)
