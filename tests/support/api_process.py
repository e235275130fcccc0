"""A TLS device API in a process of its own, so that its memory is its own: `with api_process(folder) as api`.

The process reads one word a line: `round` sends an assignment to the device `pi-1` and waits for its answer, `stats`
says the device API's counters; each is answered by one line of JSON. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import LineProcess, line_process, status_bytes
from tests.support.callers import TlsPlace, tls_place
from tests.support.fleet_words import PATIENCE_S, answer, envelope, hello, polled, written
from tests.support.processes import environment
from thinwire.core.errors import Unreachable
from thinwire.core.invitation import Invitation
from thinwire.core.types import ReplyHeader
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.server.tls import InternalCA

BODY = hashlib.shake_128(b"an update").digest(20_000)


@dataclass
class ApiProcess:
    """This end of it. `authority` is read from its folder; `secrets` are of open invitations; `log` is its stderr."""

    process: LineProcess
    authority: InternalCA

    def __post_init__(self) -> None:
        self.url, self.log = str(self.process.first["url"]), self.process.log
        self.secrets: list[str] = self.process.first["secrets"]

    def say(self, word: str) -> Mapping[str, Any]:
        return self.process.say(word)

    def round_s(self) -> float:
        """An assignment to `pi-1` and its answer, in seconds."""
        return float(self.say("round")["seconds"])

    def memory(self, key: str = "VmRSS") -> int:
        """In bytes: `VmRSS` now, `VmHWM` the most so far."""
        return status_bytes(self.process.pid, key)

    def forget_peak(self) -> None:
        """Let `VmHWM` begin again (proc(5), clear_refs)."""
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
def api_process(folder: Path) -> Iterator[ApiProcess]:
    command = [sys.executable, "-m", "tests.support.api_process", str(folder)]
    with line_process(command, folder / "log.txt", environment()) as process:
        yield ApiProcess(process, InternalCA(folder / "ca"))


@contextlib.contextmanager
def answering(link: HttpsLink, name: str, folder: Path) -> Iterator[list[int]]:
    """The device `name` answers every assignment in a thread until the block ends; how often it did."""
    ended, answered = threading.Event(), list[int]()

    def serve() -> None:
        body = written(folder, BODY)
        while not ended.is_set():
            try:
                if (delivery := link.pull(1.0)) is not None:
                    number = len(answered) + 1
                    link.push(answer(name, delivery.assignment.assignment_id, number, BODY), body)
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
    header = polled(here.fleet, ReplyHeader, lambda reply: reply.assignment_id == f"round-{number}")
    assert b"".join(here.fleet.open(header.update_id)) == BODY
    here.fleet.ack([header.update_id])
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
