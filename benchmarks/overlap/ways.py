"""The ways of devices to their aggregator: machines of their own whose lines the kernel shapes, or a proxy on loopback.

Each direction carries `bytes_per_s` over all connections of a device together, as an access line does; no latency is
added.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Protocol

from benchmarks.processes import Processes, free_port
from tests.support.namespaces import AGGREGATOR, PORT
from tests.support.shaped import Star, star

ROOT = Path(__file__).parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
QUEUED = "100ms"  # before packets are lost, as in a home router
CALL_S = 120.0

Inside = tuple[str, ...]  # what a command is begun with to run on another machine


class Way(Protocol):
    """`listen` is the device API's address, `inside` where the aggregator runs."""

    @property
    def listen(self) -> str: ...

    @property
    def inside(self) -> Inside: ...

    def device(self, name: str, home: Path, processes: Processes) -> tuple[Inside, list[str]]:
        """Return where a device runs, and the words that `client start` needs to find its aggregator, which serves."""


@contextmanager
def way(shaped_by: str, names: list[str], bytes_per_s: float) -> Iterator[Way]:
    """`shaped_by` is "netns" or "proxy"; without a line for 0 bytes a second. Processes must end before it does."""
    if not bytes_per_s or shaped_by == "proxy":
        yield OnLoopback(bytes_per_s)
        return
    rates = dict.fromkeys(names, 8e-6 * bytes_per_s)
    with star(rates, rates, queued=QUEUED) as net:
        yield OnMachines(net)


class OnLoopback:
    """Without TLS; each device through a proxy, or straight for 0 bytes a second."""

    inside: Inside = ()

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.port = bytes_per_s, free_port()
        self.listen = f"127.0.0.1:{self.port}"

    def device(self, name: str, home: Path, processes: Processes) -> tuple[Inside, list[str]]:
        port = self._line(name, processes) if self.bytes_per_s else self.port
        return (), ["--aggregator", f"http://127.0.0.1:{port}"]

    def _line(self, name: str, processes: Processes) -> int:
        port = free_port()
        words = ("-m", "benchmarks.overlap.line", str(port), str(self.port), str(self.bytes_per_s))
        processes.start(f"line-{name}", [sys.executable, *words], ONE_THREAD)
        processes.until(lambda: _answers(port), 60, "the line is there")
        return port


@dataclass(frozen=True)
class OnMachines:
    """Network namespaces, so that devices join and speak TLS."""

    net: Star
    listen: str = f"0.0.0.0:{PORT}"

    @property
    def inside(self) -> Inside:
        return _inside(self.net.aggregator)

    def device(self, name: str, home: Path, processes: Processes) -> tuple[Inside, list[str]]:
        there = _inside(self.net.devices[name])
        (invited,) = json.loads(called(self.inside, "devices", "invite", "--json", "--home", str(home)))
        url = f"https://{AGGREGATOR}:{PORT}"
        called(there, "client", "join", url, invited["invitation"], "--name", name, "--home", str(home))
        return there, []


def called(inside: Inside, *words: str) -> str:
    """Return what a command of `thinwire` prints."""
    done = subprocess.run(
        thinwire(inside, *words), capture_output=True, text=True, timeout=CALL_S, check=False, env=_environment()
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:2])}: {done.stderr.strip()}")
    return done.stdout


def thinwire(inside: Inside, *words: str) -> list[str]:
    return [*inside, sys.executable, "-m", "thinwire.cli", *words]


def _inside(namespace: str) -> Inside:
    return ("ip", "netns", "exec", namespace)


def _environment() -> Mapping[str, str]:
    return {**os.environ, **ONE_THREAD}


def _answers(port: int) -> bool:
    with closing(socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
