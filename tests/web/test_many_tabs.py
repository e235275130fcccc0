"""One stream of news for all tabs of a browser, so that eight of them work over six connections."""

from __future__ import annotations

import time
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.api_answers import DEVICES
from tests.support.browsing import Open
from tests.support.filled_store import add_devices, new_run
from tests.support.serving import showing
from thinwire.store import Store
from thinwire.web import app
from thinwire.web.routes import Live


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[Live]:
    """The event streams of the dashboards that are started."""
    made: list[Live] = []

    def kept(*given: Any) -> Live:
        made.append(Live(*given))
        return made[-1]

    monkeypatch.setattr(app, "Live", kept)
    return made


def test_eight_tabs_are_live_over_one_stream(store: Store, live: list[Live], look: Open):
    add_devices(store, DEVICES, time.time())
    run = new_run(store, at=time.time() - 60)
    run.quiet_round()
    with showing(store.url, None) as shown:
        first = look(shown.url, f"runs/{run.run_id}")
        tabs = [first, *(first.context.new_page() for _ in range(7))]
        for tab in tabs[1:]:
            tab.goto(f"{shown.url}/runs/{run.run_id}")
        for tab in tabs:
            expect(tab.locator("h1")).to_have_text(run.run_id)
        assert len(live[0].tabs) == 1
        run.status("paused", "paused by a person")
        for tab in tabs:
            expect(tab.locator(".status").first).to_contain_text("paused")
        for tab in tabs[1:]:
            tab.close()
        run.status("running", "goes on")
        expect(first.locator(".status").first).to_contain_text("running")
        assert len(live[0].tabs) == 1


def test_a_tab_without_shared_workers_has_a_stream_of_its_own(store: Store, live: list[Live], look: Open):
    add_devices(store, DEVICES, time.time())
    run = new_run(store, at=time.time() - 60)
    run.quiet_round()
    with showing(store.url, None) as shown:
        page = look(shown.url)
        page.context.add_init_script("delete window.SharedWorker")
        page.goto(f"{shown.url}/runs/{run.run_id}")
        expect(page.locator(".beat")).to_have_text("live")
        run.status("paused", "paused by a person")
        expect(page.locator(".status").first).to_contain_text("paused")
