"""News for the tabs, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.core.clock import DOWN_SINCE
from thinwire.core.errors import DataLost
from thinwire.core.statedir import hold
from thinwire.web import connections
from thinwire.web.live import TABS_OF_ONE, Live, News
from thinwire.web.settings import aggregator, lock_beside


class Journal:
    """A store of which only the newest number is selected."""

    def __init__(self) -> None:
        self.seq, self.looks, self.broken = 1, 0, False

    def look(self) -> News:
        self.looks += 1
        if self.broken:
            raise DataLost("cannot use the database")
        return News(self.seq, "running")


def said(message: str) -> Any:
    return json.loads(message.split("data: ")[1])


@contextlib.asynccontextmanager
async def looking(live: Live) -> AsyncIterator[None]:
    task = asyncio.create_task(live.run())
    yield
    live.close()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_a_tab_hears_of_the_state_at_once_and_of_each_change():
    async def scene() -> None:
        journal = Journal()
        live = Live(journal.look)
        async with looking(live):
            tab = live.stream(lambda: True)
            assert said(await anext(tab))["seq"] == 1
            journal.seq = 2
            assert said(await asyncio.wait_for(anext(tab), 5))["seq"] == 2
            journal.broken = True
            assert "cannot use" in said(await asyncio.wait_for(anext(tab), 5))["store"]
            journal.broken = False
            assert said(await asyncio.wait_for(anext(tab), 5))["store"] == ""

    asyncio.run(scene())


def test_a_slow_tab_gets_the_newest_state_only_and_holds_nobody_up():
    async def scene() -> None:
        journal = Journal()
        live = Live(journal.look)
        async with looking(live):
            slow, quick = live.stream(lambda: True), live.stream(lambda: True)
            await anext(slow)
            await anext(quick)
            for journal.seq in (2, 3, 4):
                assert said(await asyncio.wait_for(anext(quick), 5))["seq"] == journal.seq
            assert said(await anext(slow))["seq"] == 4

    asyncio.run(scene())


def test_the_store_is_looked_at_for_all_tabs_together_and_not_without_one():
    async def scene() -> None:
        journal = Journal()
        live = Live(journal.look)
        tabs = [live.stream(lambda: True, f"user-{number}") for number in range(20)]
        async with looking(live):
            for _ in range(3):
                await asyncio.sleep(0)
            assert journal.looks == 0
            for tab in tabs:
                await anext(tab)
            looks = journal.looks
            journal.seq = 2
            for tab in tabs:
                assert said(await asyncio.wait_for(anext(tab), 5))["seq"] == 2
            assert journal.looks - looks <= 3  # and not once a tab

    asyncio.run(scene())


def test_the_stream_of_a_tab_that_always_gets_news_ends_with_its_session(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scene() -> None:
        journal, known = Journal(), [True]
        live = Live(journal.look)
        tab = live.stream(lambda: known[0])
        await anext(tab)
        for journal.seq in (2, 3):
            await live._refresh()
            assert said(await anext(tab))["seq"] == journal.seq
        known[0], now[0], journal.seq = False, connections.HEARTBEAT_S, 4
        await live._refresh()
        assert [message async for message in tab] == []
        assert not live.tabs

    asyncio.run(scene())


def test_one_user_has_so_many_tabs_and_no_more():
    async def scene() -> None:
        live = Live(Journal().look)
        tabs = [live.stream(lambda: True, "eve") for _ in range(TABS_OF_ONE)]
        for tab in tabs:
            await anext(tab)
        assert (refused := live.places.refusal("eve"))
        assert refused.status_code == 503
        assert live.places.refusal("anna") is None
        assert [message async for message in live.stream(lambda: True, "eve")] == []
        assert len(live.tabs) == TABS_OF_ONE
        for tab in tabs:
            await tab.aclose()
        assert live.places.refusal("eve") is None

    asyncio.run(scene())


def test_streams_end_when_the_server_does():
    async def scene() -> None:
        ending = False
        live = Live(Journal().look, lambda: ending)
        async with looking(live):
            tab = live.stream(lambda: True)
            await anext(tab)
            ending = True
            left = [message async for message in tab]
            assert left == []
            assert not live.tabs

    asyncio.run(scene())


def test_the_aggregator_is_there_while_it_holds_its_lock(tmp_path: Path):
    lock = tmp_path / "lock"
    assert aggregator(None) == ("unknown", {})
    assert aggregator(lock)[0] == "gone"
    with hold(lock, {"listen": "127.0.0.1:9090"}):
        assert aggregator(lock) == ("running", {"pid": os.getpid(), "listen": "127.0.0.1:9090"})
    with hold(lock, {DOWN_SINCE: 1000.0}):
        assert aggregator(lock) == ("gone", {}), "it does not serve yet"
    assert aggregator(lock)[0] == "gone"
    lock.write_text('{"pid": 4194305}')  # beyond the largest there can be
    assert aggregator(lock)[0] == "gone"
    lock.write_text("not json")
    assert aggregator(lock)[0] == "gone"


def test_the_lock_is_found_beside_the_database(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    assert lock_beside(url) is None
    (tmp_path / "lock").write_text("{}")
    assert lock_beside(url) == tmp_path / "lock"
    assert lock_beside("postgresql+psycopg://host/name") is None
