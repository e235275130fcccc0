"""The device API for devices over TLS in a process of its own, as an aggregator opens it: real store, spool and CA.

Run as `python -c "from benchmarks.device_api_process import main; main()" FOLDER [plain]`; a plain one is on loopback.
It reads one request a line and answers each with one line of JSON; it ends when its input does. There is no service
behind it: a round here is an assignment to each device and its answer, durable in the spool, read and acknowledged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import LineProcess, cpu_seconds, line_process
from benchmarks.resnet50 import shapes
from thinwire.core.fleet import Envelope, FixedLimits
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import Assignment, Part, ReplyHeader, UpdateId, UpdateOutcome, Work
from thinwire.flower import FlowerFleet
from thinwire.server.service import limit_of
from thinwire.store import FileSpool, Store
from thinwire.transport.server.tls import InternalCA

RUN, CODEC = "digits-1", "topk(0.01) > int8 > zstd"
START = "from benchmarks.device_api_process import main; main()"
ROOT = Path(__file__).parents[1]
# Of a reply: those of a run that trains a ResNet-50.
LIMITS = FixedLimits(limit_of(RunPlan.parse('[run]\ntask = "digits"\n[local]\nlr = 0.1'), Layout.of(shapes())))


class ApiProcess:
    """This end of it."""

    def __init__(self, process: LineProcess) -> None:
        self._process, self.pid = process, process.pid
        self.url, self.pin = str(process.first["url"]), str(process.first["pin"])

    def request(self, what: str, **about: Any) -> dict[str, Any]:
        return self._process.say(json.dumps({"what": what, **about}))

    def stats(self) -> dict[str, Any]:
        return self.request("stats")

    def cpu_s(self) -> float:
        return cpu_seconds(self.pid)


@contextlib.contextmanager
def api_process(folder: Path, *, plain: bool = False) -> Iterator[ApiProcess]:
    command = [sys.executable, "-c", START, str(folder), *(["plain"] if plain else [])]
    with line_process(command, folder / "api.log", {**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        yield ApiProcess(process)


class Opened:
    """The other end: what is requested of it."""

    def __init__(self, folder: Path, plain: bool = False) -> None:
        self._folder, self._store = folder, Store.open(folder / "store.sqlite3")
        self._authority = None if plain else InternalCA(folder / "ca")
        self._fleet = self._opened(0)

    def start(self) -> dict[str, Any]:
        scheme, pin = ("https", self._authority.pin) if self._authority else ("http", "")
        return {"url": f"{scheme}://{self._fleet.address}", "pin": pin}

    def stats(self) -> dict[str, Any]:
        return self._fleet.stats()

    def add(self, devices: dict[str, str]) -> dict[str, Any]:
        """Approve these: name -> DER public key in hex."""
        for name, key in devices.items():
            self._store.roster.add(name, bytes.fromhex(key), "manual")
        return {}

    def restart(self) -> dict[str, Any]:
        """Close every connection and forget every hello, as a restart does, and return the new address."""
        port = int(self._fleet.address.rpartition(":")[2])
        self._fleet.close()
        self._fleet = self._opened(port)
        return {}

    def round(self, number: int, devices: list[str], payload_bytes: int) -> dict[str, Any]:
        """Ask each of them, and take its answer in."""
        body = hashlib.shake_128(b"down").digest(payload_bytes)
        bundle = self._folder / "bundle"
        bundle.write_bytes(body)
        part = Part("1/0", len(body), hashlib.sha256(body).hexdigest())
        began = time.monotonic()
        self._fleet.send([Envelope(device, _assign(number, device, part), bundle) for device in devices])
        waited = set(devices)
        while waited:
            for arrival in self._fleet.poll(1.0):
                if isinstance(arrival, ReplyHeader):
                    if sum(len(each) for each in self._fleet.open(arrival.update_id)) != payload_bytes:
                        raise RuntimeError(f"{arrival.update_id} is not what was sent")
                    self._fleet.ack([arrival.update_id])
                    waited.discard(arrival.update_id.device)
        return {"seconds": time.monotonic() - began}

    def close(self) -> None:
        self._fleet.close()
        self._store.close()

    def _opened(self, port: int) -> FlowerFleet:
        return FlowerFleet(
            self._store.roster, FileSpool(self._folder / "spool"), port=port, authority=self._authority, limits=LIMITS
        )  # fmt: skip


def _assign(number: int, device: str, part: Part) -> Assignment:
    """Return an assignment in the middle of a run: the device has the plan, and its last update was aggregated."""
    model, layout = (hashlib.sha256(text.encode()).hexdigest() for text in (f"model {number}", "layout"))
    outcome = UpdateOutcome(UpdateId(RUN, device, number - 1), "aggregated", number - 1)
    return Assignment(
        f"{RUN}.{number}.{device}", RUN, "digits", "train", hashlib.sha256(b"plan").hexdigest(), number, number - 1,
        model, layout, CODEC, Work(12, 32), 60.0, (part,), outcomes=(outcome,),
    )  # fmt: skip


def main() -> None:
    opened = Opened(Path(sys.argv[1]), plain="plain" in sys.argv[2:])
    try:
        print(json.dumps(opened.start()), flush=True)
        for line in sys.stdin:
            about = json.loads(line)
            print(json.dumps(getattr(opened, about.pop("what"))(**about)), flush=True)
    finally:
        opened.close()
