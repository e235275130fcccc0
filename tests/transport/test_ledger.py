"""Counts in a file, which outlive the process that counted."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.core.clock import VirtualClock
from thinwire.core.types import Transfer
from thinwire.transport.server.connections import FIELDS, HEAD, NUMBERS, RECORD_BYTES, Ledger, TrafficCounter
from thinwire.transport.server.presence import Presence

DIES = """
import os, signal, sys
from pathlib import Path
from thinwire.transport.server.connections import TrafficCounter as Account
from thinwire.transport.server.connections import Ledger

ledger = Ledger(Path(sys.argv[1]))
account = Account(ledger.of("pi-1"))
account.sent_bytes += 1000
account.durable(account.untold())
account.sent_bytes += 7
account.received_bytes += 5
account.untold()  # for an answer that never became durable
account.requests += 1
ledger.keep()
account.sent_bytes += 3
os.kill(os.getpid(), signal.SIGKILL)
"""


def record(name: str, *numbers: int) -> bytes:
    fields = FIELDS.pack(name.encode(), *numbers)
    return (fields + zlib.crc32(fields).to_bytes(4, "little")).ljust(RECORD_BYTES, b"\0")


def counted(path: Path, *names: str) -> list[tuple[int, int, int]]:
    """What the next process has to tell of each."""
    ledger = Ledger(path)
    return [TrafficCounter(ledger.of(name)).untold() for name in names]


def test_what_a_killed_process_had_kept_and_not_told_is_there_for_the_next(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "wire")], check=False)
    assert died.returncode == -signal.SIGKILL
    for _ in range(2):
        ledger = Ledger(tmp_path / "wire")
        account = TrafficCounter(ledger.of("pi-1"))
        told = account.untold()
        assert told == (7, 5, 1)
    account.durable(told)
    ledger.keep("pi-1")
    assert counted(tmp_path / "wire", "pi-1") == [(0, 0, 0)]


def test_only_what_an_answer_told_counts_as_told_when_it_is_durable(tmp_path: Path) -> None:
    """Another answer of the device may be on its way to the disk meanwhile."""
    ledger = Ledger(tmp_path / "wire")
    account = TrafficCounter(ledger.of("pi-1"))
    account.sent_bytes += 10
    first = account.untold()
    account.sent_bytes += 20
    account.untold()
    account.durable(first)
    ledger.keep()
    assert counted(tmp_path / "wire", "pi-1") == [(20, 0, 0)]


def test_what_stands_in_an_answer_is_kept_as_told_at_once(tmp_path: Path) -> None:
    sessions = Presence(VirtualClock(), 4.0, 240.0, lambda *gone: None, Ledger(tmp_path / "wire"))
    sessions.account("pi-1").sent_bytes += 5
    sessions.keep()
    sessions.told("pi-1", Transfer(sent_bytes=sessions.account("pi-1").untold()[0]))
    assert counted(tmp_path / "wire", "pi-1") == [(0, 0, 0)]


def test_as_many_devices_as_there_are_have_numbers_of_their_own(tmp_path: Path) -> None:
    names = [f"pi-{number:04d}" for number in range(300)]
    first = Ledger(tmp_path / "wire")
    for number, name in enumerate(names):
        first.of(name)[0] = number
    first.keep()
    again = Ledger(tmp_path / "wire")
    assert [again.of(name)[0] for name in names] == list(range(300))
    again.of("another")[1] = 9
    again.keep()
    assert (Ledger(tmp_path / "wire").of("another")[1], Ledger(tmp_path / "wire").of("pi-0299")[0]) == (9, 299)
    assert (tmp_path / "wire").stat().st_size == 302 * RECORD_BYTES
    assert (tmp_path / "wire").stat().st_mode & 0o777 == 0o600


def test_only_what_changed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "wire")
    for number in range(1000):
        ledger.of(f"pi-{number:04d}")
    ledger.keep()
    really, written = os.pwrite, list[int]()

    def watched(file: int, data: bytes, at: int) -> int:
        written.append(at)
        return really(file, data, at)

    monkeypatch.setattr(os, "pwrite", watched)
    ledger.of("pi-0007")[0] += 1
    for _ in range(2):
        ledger.keep()
    assert written == [8 * RECORD_BYTES]


@pytest.mark.parametrize(
    "damaged",
    [
        record("pi-1", 2**64 - 1, 2**64 - 1, 2**64 - 1, 0, 0, 0),
        record("pi-1", 5, 5, 2**53, 0, 0, 0),
        record("pi-1", 5, 6, 7, 5, 7, 7),
        record("pi-1", 5, 6, 7, 0, 0, 0).replace(b"\5", b"\4"),
        record("", 5, 6, 7, 0, 0, 0),
        bytes(RECORD_BYTES),
        record("pi-1", 5, 6, 7, 0, 0, 0)[:100],
    ],
    ids=["all ones", "too many", "more told than counted", "one bit", "no name", "zeros", "cut off"],
)
def test_a_damaged_record_counts_as_nothing_and_harms_no_other(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "wire"
    path.write_bytes(HEAD + record("pi-2", 8, 9, 1, 0, 0, 0) + damaged)
    assert counted(path, "pi-1", "pi-2", "pi-3") == [(0, 0, 0), (8, 9, 1), (0, 0, 0)]
    ledger = Ledger(path)
    for name, sent in (("pi-1", 3), ("pi-3", 4)):
        TrafficCounter(ledger.of(name)).sent_bytes += sent
    ledger.keep()
    assert counted(path, "pi-1", "pi-2", "pi-3") == [(3, 0, 0), (8, 9, 1), (4, 0, 0)]


def test_a_file_of_another_kind_is_kept_aside_and_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "wire"
    for foreign in (b"pi-1".ljust(4096, b"\0"), b"x"):
        path.write_bytes(foreign)
        ledger = Ledger(path)
        TrafficCounter(ledger.of("pi-1")).sent_bytes += 3
        ledger.keep()
        assert counted(path, "pi-1") == [(3, 0, 0)]
    assert [(tmp_path / f"wire.old{n}").stat().st_size for n in (1, 2)] == [4096, 1], "none is lost"
    assert caplog.text.count("kept as wire.old") == 2
    path.write_bytes(HEAD[:7])  # the disk was full when it was begun
    assert counted(path, "pi-1") == [(0, 0, 0)]
    assert len(list(tmp_path.iterdir())) == 3


def test_where_there_is_no_file_to_be_had_it_counts_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ledger in (Ledger(None), Ledger(tmp_path / "no" / "folder"), Ledger(tmp_path)):
        ledger.of("pi-1")[NUMBERS - 1] = 4
        ledger.keep()
        assert ledger.of("pi-1")[NUMBERS - 1] == 4
    assert caplog.text.count("not counted over a restart") == 2


def test_a_disk_that_takes_a_part_of_a_record_ends_the_keeping_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "wire"
    ledger = Ledger(path)
    ledger.of("pi-1")[0] = 5
    ledger.keep()
    with files_of_at_most(2 * RECORD_BYTES + 100):
        ledger.of("pi-2")[0] += 1
        ledger.keep()
    ledger.of("pi-1")[0] += 1
    ledger.keep()
    assert (ledger.of("pi-1")[0], ledger.of("pi-2")[0]) == (6, 1)
    assert caplog.text.count("not counted over a restart") == 1
    assert not path.exists(), "what it held would be told twice"


def test_a_file_that_is_cut_off_under_us_harms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "wire"
    ledger = Ledger(path)
    ledger.of("pi-1")[0] = 5
    ledger.keep()
    os.truncate(path, 0)
    ledger.of("pi-1")[0] += 1
    ledger.keep()
    assert ledger.of("pi-1")[0] == 6
    assert counted(path, "pi-1") == [(0, 0, 0)]
    path.unlink()
    ledger.of("pi-1")[0] += 1
    ledger.keep()
    assert ledger.of("pi-1")[0] == 7


@contextmanager
def files_of_at_most(length: int) -> Iterator[None]:
    """A limit as of a quota: what goes beyond is not written. Python ignores its signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
