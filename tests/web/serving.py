"""The page as the process that it is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def command(database: str, listen: str = "127.0.0.1:0", *more: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.web", "--database", database, "--listen", listen, *more]


@contextlib.contextmanager
def serving(database: str, listen: str = "127.0.0.1:0", *more: str) -> Iterator[Served]:
    """The page on `database`, ready; it ends with the block, or with this process."""
    line = command(database, listen, "--parent", str(os.getpid()), *more)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline().split()
            assert said[:1] == ["ready"], said
            yield Served(process, said[1])
        finally:
            process.terminate()
            process.wait(20)
