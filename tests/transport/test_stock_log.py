"""What foreign apps print is kept, within two files of a bound."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.fleet_words import until
from thinwire.core.log_file import MAX_LOG_BYTES
from thinwire.flower import stock_gateway
from thinwire.flower.stock_gateway import SuperExec

PRINTS = f"""
import sys
for number in range(5):
    print(chr(97 + number) * ({MAX_LOG_BYTES} // 2), file=(sys.stdout, sys.stderr)[number % 2], flush=True)
"""


def test_an_app_that_prints_for_ever_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "stock.log"
    monkeypatch.setattr(stock_gateway, "_command", lambda _: [sys.executable, "-c", PRINTS])

    async def until_all_is_kept() -> None:
        async with SuperExec(log).running("127.0.0.1:1"):
            await asyncio.to_thread(until, lambda: log.exists() and log.read_bytes().endswith(b"e\n"))

    asyncio.run(asyncio.wait_for(until_all_is_kept(), 60))
    kept = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert kept.keys() == {"stock.log", "stock.log.1"}
    assert max(one.st_size for one in kept.values()) <= MAX_LOG_BYTES
    assert {one.st_mode & 0o777 for one in kept.values()} == {0o600}
    assert b"d" * 1000 in log.read_bytes() + (tmp_path / "stock.log.1").read_bytes()
