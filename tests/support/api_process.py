"""A TLS door in a process of its own, so that its memory is its own: `with door_process(folder) as door`.

The process reads one word a line: `round` asks the device `pi-1` and waits for its answer, `stats` says the door's
counters; each is answered by one line of JSON. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.callers import TlsPlace, tls_place
from tests.support.fleet_words import PATIENCE_S, answer, envelope, hello, polled, written
from tests.support.processes import environment
from thinwire.core.errors import Unreachable
from thinwire.core.types import ReplyHeader
from thinwire.transport import HttpsLink, device_key
from thinwire.transport.device.enroll import join
from thinwire.transport.protocol.registration import Invitation
from thinwire.transport.server.tls import InternalCA

BODY = hashlib.shake_128(b"an update").digest(20_000)


@dataclass
class DoorProcess:
    """This end of it. `authority` is read from its folder; `secrets` are of open invitations; `log` is its stderr."""

    process: subprocess.Popen[str]
    url: str
    authority: InternalCA
    secrets: list[str]
    log: Path
    asked: threading.Lock = field(default_factory=threading.Lock)

    def say(self, word: str) -> Mapping[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.asked:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        assert line, f"the door ended with {self.process.poll()}"
        return dict(json.loads(line))

    def round_s(self) -> float:
        """An ask to `pi-1` and its answer, in seconds."""
        return float(self.say("round")["seconds"])

    def memory(self, key: str = "VmRSS") -> int:
        """In bytes: `VmRSS` now, `VmHWM` the most so far."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def forget_peak(self) -> None:
        """Let `VmHWM` begin anew (proc(5), clear_refs)."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def link(self, folder: Path, name: str) -> HttpsLink:
        """A device that joined and said hello."""
        folder.mkdir(parents=True, exist_ok=True)
        key = device_key(folder)
        trust = join(self.url, Invitation(self.authority.pin, self.secrets.pop()), key, name, {}).trust
        link = HttpsLink(self.url, key, name, folder, trust)
        link.hello(hello(name))
        return link


@contextlib.contextmanager
def door_process(folder: Path) -> Iterator[DoorProcess]:
    with open(folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.api_process", str(folder)], env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = json.loads(process.stdout.readline())
        yield DoorProcess(process, said["url"], InternalCA(folder / "ca"), said["secrets"], folder / "log.txt")
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def answering(link: HttpsLink, name: str, folder: Path) -> Iterator[list[int]]:
    """The device `name` answers every ask in a thread until the block ends; how often it did."""
    ended, answered = threading.Event(), list[int]()

    def serve() -> None:
        body = written(folder, BODY)
        while not ended.is_set():
            try:
                if (delivery := link.pull(1.0)) is not None:
                    number = len(answered) + 1
                    link.push(answer(name, delivery.ask.ask_id, number, BODY), body)
                    answered.append(number)
            except Unreachable:
                time.sleep(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield answered
    finally:
        ended.set()
        link.close()
        thread.join(PATIENCE_S)


def _round(here: TlsPlace, number: int) -> dict[str, Any]:
    began = time.monotonic()
    here.fleet.send([envelope("pi-1", f"round-{number}", here.folder, BODY)])
    head = polled(here.fleet, ReplyHeader, lambda reply: reply.ask_id == f"round-{number}")
    assert b"".join(here.fleet.open(head.update_id)) == BODY
    here.fleet.ack([head.update_id])
    return {"seconds": time.monotonic() - began}


def main() -> None:
    folder = Path(sys.argv[1])
    with tls_place(folder) as here:
        secrets = [invited.secret for invited in here.store.invitations.invite(count=8)]
        print(json.dumps({"url": here.url, "secrets": secrets}), flush=True)
        for number, line in enumerate(sys.stdin):
            said = _round(here, number) if line.strip() == "round" else here.fleet.stats()
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
