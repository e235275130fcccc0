"""`thinwire` as it is, but an aggregator's flower-superexec is forked, and with it the foreign apps that it runs.

An aggregator's event loop starts programs by itself, and not by `subprocess`, where a fork server may do it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from typing import Any

from tests.support.fork_server import Forked
from thinwire.cli.main import main
from thinwire.flower import stock_gateway


class Process:
    """What is used of an `asyncio.subprocess.Process`."""

    def __init__(self, popen: subprocess.Popen[Any]) -> None:
        self._popen = popen
        self.pid, self.terminate, self.kill = popen.pid, popen.terminate, popen.kill

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._popen.wait)


async def start(*words: str, **more: Any) -> Process:
    """Do what `asyncio.create_subprocess_exec` does."""
    return Process(Forked(words, **more))


if __name__ == "__main__":
    forking = types.SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": start})
    stock_gateway.asyncio = forking  # type: ignore[attr-defined,assignment]  # the module that it imports
    sys.exit(main())
