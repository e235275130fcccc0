"""Programs on PATH whose processes are forked: a shell starts one, and this process starts what it stands for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.fork_server import MAX_REQUEST, Forked

ADDRESS = "TEST_FORKS_AT"  # the socket at which the program asks for its process
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
name = os.path.basename(sys.argv[0])
wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
wire.connect(os.environ["{address}"])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda came, _: wire.send(bytes([came])))
request = {{"words": [name, *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
socket.send_fds(wire, [json.dumps(request).encode()], [0, 1, 2])
code = int(wire.recv(64) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def forked_programs(commands: Mapping[str, Sequence[str]], folder: Path) -> Iterator[Mapping[str, str]]:
    """Put programs into `folder`, by the name of each the command that it stands for, which begins with this Python.

    Gives the variables by which they find this process. Invariant: a signal that ends a program reaches its process and
    all that this started, as a terminal's does.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = folder / "forks"
    listening.bind(str(address))
    listening.listen()
    for name in commands:
        program = folder / name
        program.write_text(PROGRAM.format(python=sys.executable, address=ADDRESS))
        program.chmod(0o755)
    accepting = threading.Thread(target=_accept, args=(listening, commands), daemon=True)
    accepting.start()
    try:
        yield {ADDRESS: str(address)}
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listening.close()


def _accept(listening: socket.socket, commands: Mapping[str, Sequence[str]]) -> None:
    with contextlib.suppress(OSError):  # it is shut down
        while True:
            wire, _ = listening.accept()
            threading.Thread(target=_run, args=(wire, commands), daemon=True).start()


def _run(wire: socket.socket, commands: Mapping[str, Sequence[str]]) -> None:
    with wire:
        message, descriptors, _, _ = socket.recv_fds(wire, MAX_REQUEST, 3)
        request = json.loads(message)
        name, *words = request["words"]
        stdin, stdout, stderr = descriptors
        process = Forked(
            [*commands[name], *words], cwd=request["cwd"], env=request["env"],
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
