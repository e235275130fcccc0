"""`flower-superexec`: the program that runs foreign apps. It serves the second SuperLink alone, and ends with us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from thinwire.client.disk.logbook import append_all

FIRST_S, MOST_S = 1.0, 60.0  # between two starts of one that ends by itself
STEADY_S = 30.0  # one that ran so long is begun again at once
END_S = 3.0
MAX_LOG_BYTES = 1 << 20  # of the log, and of the one before: whoever runs a foreign app makes it print

log = logging.getLogger("thinwire.stock")


class SuperExec:
    """Begun again with back-off when it ends by itself; what it and the apps say goes to `said`."""

    def __init__(self, said: Path) -> None:
        self._said = said
        self.pid = 0

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        keeping = asyncio.ensure_future(self._keep(address))
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _keep(self, address: str) -> None:
        loop, wait_s = asyncio.get_running_loop(), FIRST_S
        while True:
            began = loop.time()
            code = await self._once(address)
            wait_s = FIRST_S if loop.time() - began > STEADY_S else min(wait_s * 2, MOST_S)
            log.warning("flower-superexec ended (%s); started again in %.0f s; see %s", code, wait_s, self._said)
            await asyncio.sleep(wait_s)

    async def _once(self, address: str) -> int | str:
        here, there = os.pipe()
        said = (os.fdopen(here, "rb", 0), self._said, MAX_LOG_BYTES)
        threading.Thread(target=append_all, args=said, name="stock.log", daemon=True).start()
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(address), stdin=asyncio.subprocess.DEVNULL, stdout=there, stderr=there,
                env=_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(there)
        self.pid = process.pid
        try:
            return await process.wait()
        finally:
            self.pid = 0
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), END_S)
                except TimeoutError:
                    process.kill()


QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def _environment() -> dict[str, str]:
    """Flower starts its other programs by name: those of this environment come first."""
    beside = str(Path(sys.executable).parent)
    return {**os.environ, **QUIET, "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])}


def _command(address: str) -> list[str]:
    """The one of this environment, whatever the PATH says."""
    beside = Path(sys.executable).with_name("flower-superexec")
    program = str(beside) if beside.exists() else "flower-superexec"
    return [program, "--insecure", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
