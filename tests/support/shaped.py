"""Machines whose lines are as slow as wanted: `with star({"slow": 0.25, "fast": 20}) as net`, in Mb/s up.

    aggregator 10.77.1.2 -- 10.77.1.1 router 10.77.2.1 -- 10.77.2.2 the first device
                                             10.77.3.1 -- 10.77.3.2 the second one

Network namespaces and veth pairs, each device's uplink through the kernel's token bucket (tc tbf), and its downlink
where a rate is given for that.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.support import namespaces
from tests.support.namespaces import AGGREGATOR, ROUTER, do, ip, plug

BURST, QUEUED = "10kb", "2s"  # more than a packet; a queue of so long before packets are lost
_numbers = itertools.count()


def why_not() -> str:
    """Why no line can be shaped here; empty where one can."""
    if reason := namespaces.why_not():
        return reason
    if shutil.which("tc") is None:
        return "there is no tc command (iproute2)"
    name = f"tw{os.getpid()}y"
    do("netns", "add", name)
    try:
        made = _tbf(name, "lo", 1.0)
        return f"tc tbf is not allowed here: {made.stderr.strip()}" if made.returncode else ""
    finally:
        ip("netns", "delete", name)


@dataclass(frozen=True)
class Star:
    """The namespaces' names."""

    aggregator: str
    router: str
    devices: Mapping[str, str]

    def build(self, up_mbit: Mapping[str, float], down_mbit: Mapping[str, float], queued: str) -> None:
        for name in (self.aggregator, self.router, *self.devices.values()):
            do("netns", "add", name)
            do("-n", name, "link", "set", "lo", "up")
        plug(self.aggregator, self.router, "aggregator", AGGREGATOR, ROUTER[0])
        for at, (device, name) in enumerate(self.devices.items(), start=2):
            plug(name, self.router, device, f"10.77.{at}.2", f"10.77.{at}.1")
            shape(name, "router", up_mbit[device], queued)
            if device in down_mbit:
                shape(self.router, device, down_mbit[device], queued)
        do("netns", "exec", self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def remove(self) -> None:
        for name in (self.aggregator, self.router, *self.devices.values()):
            ip("netns", "delete", name)


@contextlib.contextmanager
def star(
    up_mbit: Mapping[str, float], down_mbit: Mapping[str, float] | None = None, *, queued: str = QUEUED
) -> Iterator[Star]:
    """`queued`: how long a packet may wait for its turn, as tc says it."""
    begin = f"tw{os.getpid()}s{next(_numbers)}"
    made = Star(f"{begin}a", f"{begin}r", {device: f"{begin}d{at}" for at, device in enumerate(up_mbit)})
    try:
        made.build(up_mbit, down_mbit or {}, queued)
        yield made
    finally:
        made.remove()


def shape(name: str, line: str, mbit: float, queued: str) -> None:
    done = _tbf(name, line, mbit, queued)
    if done.returncode:
        raise RuntimeError(f"{line} of {name}: {done.stderr.strip()}")


def _tbf(name: str, line: str, mbit: float, queued: str = QUEUED) -> subprocess.CompletedProcess[str]:
    words = ["tc", "-n", name, "qdisc", "add", "dev", line, "root", "tbf", "rate", f"{mbit:g}mbit"]
    return subprocess.run([*words, "burst", BURST, "latency", queued], capture_output=True, text=True, check=False)
