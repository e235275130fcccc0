"""An aggregator that is killed in the middle of a transfer, as a power cut would: both ways it goes on where it was."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from benchmarks.processes import free_port
from tests.support.fleet_words import PATIENCE_S, hello
from tests.support.fork_server import Forked
from tests.support.processes import environment
from tests.support.proxy import Proxy, proxy
from tests.transport.test_cuts import BESIDE, SENT_TWICE, SIZE, assignment_of, file_of, header_of, pulled, pushed
from thinwire.core.fleet import Delivery
from thinwire.core.invitation import Invitation
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import device_key
from thinwire.transport.device.link import HttpsLink

AGGREGATOR = """
import os, signal, sys
from pathlib import Path
from tests.transport.test_cuts import assignment_of
from thinwire.core.types import ReplyHeader as ReplyHeader
from thinwire.flower import FlowerFleet
from thinwire.transport.server.tls import InternalCA as PrivateAuthority
from thinwire.core.part_file import PartFile
from thinwire.store import FileSpool, Store

folder, port = Path(sys.argv[1]), int(sys.argv[2])
if sys.argv[3:] == ["dies"]:  # as the power goes after a part was written, of which the disk has lost the beginning
    append = PartFile.append
    def append_and_die(self, file, data):
        append(self, file, data)
        if self.size in self.starts[1:]:
            with open(self.path, "r+b") as damaged:
                damaged.write(bytes(4096))
            os.kill(os.getpid(), signal.SIGKILL)
    PartFile.append = append_and_die
with Store.open(folder / "store.sqlite3") as store:
    authority = PrivateAuthority(folder / "ca")
    fleet = FlowerFleet(store.roster, FileSpool(folder / "spool"), port=port, authority=authority)
    if len(sys.argv) == 3:
        print(authority.pin, store.invitations.invite()[0].secret, flush=True)
    else:
        fleet.send([assignment_of(folder / "model")])
        print("again", flush=True)
    while True:
        for arrival in fleet.poll(0.1):
            if isinstance(arrival, ReplyHeader):
                with open(folder / "came.new", "wb") as file:
                    file.writelines(fleet.open(arrival.update_id))
                (folder / "came.new").rename(folder / "came")
                print("came", flush=True)
"""


class Aggregator:
    """A process that is killed, and started again on the same folder and port."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def out(self) -> IO[str]:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout

    def start(self, *more: str) -> str:
        command = [sys.executable, "-c", AGGREGATOR, str(self.folder), str(self.port), *more]
        self.process = Forked(command, stdout=subprocess.PIPE, text=True, env=environment())
        return self.out.readline()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.out.close()
            self.process = None


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[tuple[Aggregator, Proxy, HttpsLink]]:
    """An aggregator, a line to it, and a device behind the line."""
    made, folder = Aggregator(tmp_path), tmp_path / "device"
    folder.mkdir()
    file_of(tmp_path / "model", 1)
    try:
        pin, secret = made.start().split()
        with proxy(made.address) as line:
            url = f"https://{line.address}"
            joined = join(url, Invitation(pin, secret), device_key(folder), "pi-1", {})
            link = HttpsLink(url, device_key(folder), "pi-1", folder, joined.trust)
            link.hello(hello("pi-1"))
            yield made, line, link
            link.close()
    finally:
        made.kill()


def test_an_upload_goes_on_when_it_is_started_again(
    killed: tuple[Aggregator, Proxy, HttpsLink], tmp_path: Path
) -> None:
    aggregator, line, link = killed
    update = file_of(tmp_path / "update", 2)
    thread = threading.Thread(target=pushed, args=(link, header_of(update), update))
    line.up.cuts = [line.up.given + SIZE // 2]
    thread.start()
    until_cut(line)
    pause = threading.Event()
    while stored(tmp_path / "spool") < SIZE // 4:
        pause.wait(0.001)
    aggregator.kill()
    here, sent = stored(tmp_path / "spool"), line.up.taken
    assert aggregator.start("again") == "again\n"
    thread.join(PATIENCE_S)
    assert aggregator.out.readline() == "came\n"
    assert (tmp_path / "came").read_bytes() == update.read_bytes()
    assert line.up.taken - sent <= max(0, SIZE - here) * BESIDE + SENT_TWICE, "what its disk held is not sent again"


def test_a_download_goes_on_when_it_is_started_again(
    killed: tuple[Aggregator, Proxy, HttpsLink], tmp_path: Path
) -> None:
    aggregator, line, link = killed
    aggregator.kill()
    assert aggregator.start("again") == "again\n"
    began, got = line.down.taken, list[Delivery]()
    line.down.cuts = [line.down.given + SIZE // 2]
    thread = threading.Thread(target=lambda: got.append(pulled(link)))
    thread.start()
    until_cut(line)
    aggregator.kill()
    assert aggregator.start("again") == "again\n"
    thread.join(PATIENCE_S)
    (delivery,) = got
    assert delivery.assignment == assignment_of(tmp_path / "model").assignment
    assert delivery.bundle is not None
    assert delivery.bundle.read_bytes() == (tmp_path / "model").read_bytes()
    assert line.down.taken - began <= SIZE * BESIDE + 2 * SENT_TWICE


def until_cut(line: Proxy) -> None:
    pause = threading.Event()
    while not line.cut_count:
        pause.wait(0.001)


def stored(spool: Path) -> int:
    """Bytes on the aggregator's disk; those that a socket or a process held when it was killed are no part of them."""
    total = 0
    for path in spool.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it was made whole meanwhile, under another name
            total += path.stat().st_size if path.is_file() else 0
    return total
