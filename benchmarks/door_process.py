"""The door for devices over TLS in a process of its own, as an aggregator opens it: real store, spool and CA.

Run as `python -c "from benchmarks.door_process import main; main()" FOLDER [plain]`; a plain one is on loopback. It
reads one request a line and answers each with one line of JSON; it ends when its input does. There is no service behind
it: a round here is an ask to each device and its answer, durable in the spool, read and acknowledged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds
from benchmarks.resnet50 import shapes
from thinwire.core.fleet import Envelope, FixedLimits
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import Ask, Part, ReplyHeader, UpdateId, Verdict, Work
from thinwire.flower import FlowerFleet
from thinwire.server.submit import limit_of
from thinwire.store import FileSpool, Store
from thinwire.transport.server.tls import InternalCA

RUN, CODEC = "digits-1", "topk(0.01) > int8 > zstd"
START = "from benchmarks.door_process import main; main()"
END_S = 20.0
# Of a reply: those of a run that trains a ResNet-50.
LIMITS = FixedLimits(limit_of(RunPlan.parse('[run]\ntask = "digits"\n[local]\nlr = 0.1'), Layout.of(shapes())))


class DoorProcess:
    """This end of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self._heard()
        self.url, self.pin = str(said["url"]), str(said["pin"])

    def ask(self, what: str, **about: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **about}) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def stats(self) -> dict[str, Any]:
        return self.ask("stats")

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        return cpu_seconds(self._process.pid)

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the door's process ended; what it said last is in door.log")
        return dict(json.loads(line))


@contextlib.contextmanager
def door_process(folder: Path, *, plain: bool = False) -> Iterator[DoorProcess]:
    with open(folder / "door.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(folder), *(["plain"] if plain else [])], cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield DoorProcess(process)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class Opened:
    """The other end: what is asked of it."""

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
        """Let these in: name -> DER public key in hex."""
        for name, key in devices.items():
            self._store.roster.add(name, bytes.fromhex(key), "manual")
        return {}

    def restart(self) -> dict[str, Any]:
        """What a restart is to the devices: every connection is gone, and nobody has said hello."""
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
        self._fleet.send([Envelope(device, _ask(number, device, part), bundle) for device in devices])
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


def _ask(number: int, device: str, part: Part) -> Ask:
    """As a round in the middle of a run asks: the device holds the plan, and its last update was folded."""
    model, layout = (hashlib.sha256(text.encode()).hexdigest() for text in (f"model {number}", "layout"))
    verdict = Verdict(UpdateId(RUN, device, number - 1), "folded", number - 1)
    return Ask(
        f"{RUN}.{number}.{device}", RUN, "digits", "train", hashlib.sha256(b"plan").hexdigest(), number, number - 1,
        model, layout, CODEC, Work(12, 32), 60.0, (part,), verdicts=(verdict,),
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
