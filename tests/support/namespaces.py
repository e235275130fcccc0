"""Two machines and a router between them, made of network namespaces: `with network() as net`.

    aggregator 10.77.1.2 -- 10.77.1.1 router 10.77.2.1 -- 10.77.2.2 device

Nothing of it can be seen outside, so the addresses are nobody's; the names carry this process's id.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

AGGREGATOR, DEVICE = "10.77.1.2", "10.77.2.2"
ROUTER = ("10.77.1.1", "10.77.2.1")
PORT = 9090
ESTABLISHED = "01"  # include/net/tcp_states.h
_numbers = itertools.count()


def why_not() -> str:
    """Why no namespaces can be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    name = f"tw{os.getpid()}x"
    made = ip("netns", "add", name)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        veth = ip("-n", name, "link", "add", "name", "one", "type", "veth", "peer", "name", "two")
        return f"veth pairs are not allowed here: {veth.stderr.strip()}" if veth.returncode else ""
    finally:
        ip("netns", "delete", name)


@dataclass(frozen=True)
class Network:
    """The three namespaces' names."""

    aggregator: str
    router: str
    device: str

    @staticmethod
    def inside(namespace: str) -> tuple[str, ...]:
        """What a command is begun with to run there; its process id is that of the command."""
        return ("ip", "netns", "exec", namespace)

    def link(self, state: str) -> None:
        """`down` is a cable that is pulled out between the router and the device; `up` puts it back."""
        do("-n", self.router, "link", "set", "device", state)

    def readdress(self, address: str) -> None:
        """The device gets another address, as from another network's DHCP: the old one is gone with its routes."""
        do("-n", self.device, "address", "flush", "dev", "router")
        self._address(address)

    def peers(self, pid: int) -> set[str]:
        """The addresses from which connections to a process's machine stand that are not the machine's own."""
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        return {
            _dotted(remote) for _, local, remote, state, *_ in rows
            if state == ESTABLISHED and int(local.partition(":")[2], 16) == PORT
        }  # fmt: skip

    def build(self) -> None:
        for name in (self.aggregator, self.router, self.device):
            do("netns", "add", name)
            do("-n", name, "link", "set", "lo", "up")
        for name, other, mine, its in (
            (self.aggregator, "aggregator", AGGREGATOR, ROUTER[0]),
            (self.device, "device", DEVICE, ROUTER[1]),
        ):
            plug(name, self.router, other, mine, its)
        do("netns", "exec", self.router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def remove(self) -> None:
        """Its veth pairs go with the namespaces, once no process is in them."""
        for name in (self.aggregator, self.router, self.device):
            ip("netns", "delete", name)

    def _address(self, address: str) -> None:
        do("-n", self.device, "address", "add", f"{address}/24", "dev", "router")
        do("-n", self.device, "route", "add", "default", "via", ROUTER[1])


@contextlib.contextmanager
def network() -> Iterator[Network]:
    begin = f"tw{os.getpid()}n{next(_numbers)}"
    made = Network(f"{begin}a", f"{begin}r", f"{begin}d")
    try:
        made.build()
        yield made
    finally:
        made.remove()


def _dotted(found: str) -> str:
    """An address of /proc/net/tcp: hex in this machine's byte order."""
    return socket.inet_ntoa(bytes.fromhex(found.partition(":")[0])[::-1])


def plug(name: str, router: str, other: str, mine: str, its: str) -> None:
    """A cable from a machine, where its end is called `router`, to the router, where its end is called `other`."""
    do("-n", name, "link", "add", "name", "router", "type", "veth", "peer", "name", other, "netns", router)
    do("-n", router, "address", "add", f"{its}/24", "dev", other)
    do("-n", router, "link", "set", other, "up")
    do("-n", name, "address", "add", f"{mine}/24", "dev", "router")
    do("-n", name, "link", "set", "router", "up")
    do("-n", name, "route", "add", "default", "via", its)


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=20)


def do(*words: str) -> None:
    done = ip(*words)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
