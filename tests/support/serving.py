"""The dashboard in a thread of the tests' process, and as the process that it is."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.fork_server import Forked
from tests.support.processes import environment
from thinwire.store import Store
from thinwire.web.__main__ import page
from thinwire.web.settings import Settings, lock_beside


@dataclass
class Shown:
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@dataclass
class Served(Shown):
    process: subprocess.Popen[str]


@contextlib.contextmanager
def showing(database: str, lock: Path | None = None) -> Iterator[Shown]:
    """The dashboard on `database`: for what it shows it does not matter that nothing had to be imported for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Store.open(database) as store:
        port = listener.getsockname()[1]
        server = page(Settings(database, port=port, lock=lock or lock_beside(store.url)), store)
        thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
        thread.start()
        try:
            yield Shown(f"127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join(60)


def command(database: str, listen: str = "127.0.0.1:0", *more: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.web", "--database", database, "--listen", listen, *more]


@contextlib.contextmanager
def serving(
    database: str, listen: str = "127.0.0.1:0", *more: str, said: Path | None = None, adds: bool = False
) -> Iterator[Served]:
    """The dashboard on `database`, ready; it ends with the block, or with this process. `said`: a file for its
    stderr, to which it `adds`.
    """
    line = command(database, listen, "--parent", str(os.getpid()), *more)
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(said.open("ab" if adds else "wb")) if said else None
        process = stack.enter_context(Forked(line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment()))
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().split()
            assert ready[:1] == ["ready"], ready
            yield Served(ready[1], process)
        finally:
            process.terminate()
            process.wait(20)
