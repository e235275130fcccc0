"""Counts in a file, which outlive the process that counted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.flower.door.account import Account
from thinwire.flower.door.ledger import NUMBERS, PAGE_BYTES, Ledger

DIES = """
import os, signal, sys
from pathlib import Path
from thinwire.flower.door.account import Account
from thinwire.flower.door.ledger import Ledger

account = Account(Ledger(Path(sys.argv[1])).of("pi-1"))
account.sent_bytes += 1000
account.untold()
account.durable()
account.sent_bytes += 7
account.received_bytes += 5
account.untold()  # for an answer that never became durable
account.requests += 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_had_counted_and_not_told_is_there_for_the_next(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "wire")], check=False)
    assert died.returncode == -signal.SIGKILL
    for _ in range(2):
        account = Account(Ledger(tmp_path / "wire").of("pi-1"))
        assert account.untold() == (7, 5, 1)
    account.durable()
    assert Account(Ledger(tmp_path / "wire").of("pi-1")).untold() == (0, 0, 0)


def test_as_many_devices_as_there_are_have_numbers_of_their_own(tmp_path: Path) -> None:
    names = [f"pi-{number:04d}" for number in range(300)]
    first = Ledger(tmp_path / "wire")
    for number, name in enumerate(names):
        first.of(name)[0] = number
    again = Ledger(tmp_path / "wire")
    assert [again.of(name)[0] for name in names] == list(range(300))
    again.of("another")[1] = 9
    assert (Ledger(tmp_path / "wire").of("another")[1], Ledger(tmp_path / "wire").of("pi-0299")[0]) == (9, 299)
    assert (tmp_path / "wire").stat().st_size % PAGE_BYTES == 0


def test_where_there_is_no_file_to_be_had_it_counts_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ledger in (Ledger(None), Ledger(tmp_path / "no" / "folder")):
        ledger.of("pi-1")[NUMBERS - 1] = 4
        assert ledger.of("pi-1")[NUMBERS - 1] == 4
    assert "not counted over a restart" in caplog.text
