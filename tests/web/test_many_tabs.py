"""One stream of news for all tabs of a browser, so that eight of them work over six connections."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import Open
from tests.support.filled_store import add_devices, new_run
from tests.support.serving import Shown, showing
from thinwire.core.signals import until
from thinwire.store import Store
from thinwire.web import app
from thinwire.web.live import Live

TURNED = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
READS = """() => performance.getEntriesByType("resource").filter(({ name }) => name.includes("/view"))
  .map((one) => one.startTime)"""

SHIFTS = """() => { window.shifts = []; new PerformanceObserver((list) => {
  for (const one of list.getEntries()) window.shifts.push([one.value, one.sources.map(({ node }) => node?.outerHTML)]);
}).observe({ type: "layout-shift" }); }"""


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
        first.evaluate(TURNED, True)
        assert until(lambda: not live[0].tabs, 10.0), "all tabs are hidden"
        run.status("paused", "paused again")
        first.evaluate(TURNED, False)
        expect(first.locator(".status").first).to_contain_text("paused")


def test_tabs_of_different_pages_share_one_stream(run: Told, live: list[Live], look: Open):
    with showing(run.store.url, None) as shown:
        runs = look(shown.url)
        page = runs.context.new_page()
        for path in (f"runs/{run.run_id}", "devices", f"devices/{DEVICES[0]}", f"runs/{run.run_id}"):
            page.goto(f"{shown.url}/{path}")
            expect(page.locator(".head h1")).to_be_visible()
        run.status("paused", "paused by a person")
        for tab in (runs, page):
            expect(tab.locator(".status").first).to_contain_text("paused")
        assert len(live[0].tabs) == 1


SHOWN_AFTER = """() => { window.shown = {}; new MutationObserver(() => {
  const said = document.querySelector(".sentence")?.textContent;
  window.shown[said] ??= Date.now() / 1000;
}).observe(document.body, { childList: true, subtree: true, characterData: true }); }"""


def test_what_happens_is_shown_within_a_second_also_after_a_reload_in_the_middle_of_a_round(
    run: Told, served: Shown, look: Open
):
    run.open()
    page, delays = look(served.url, f"runs/{run.run_id}"), list[float]()
    for answered in range(1, 7):
        if answered == 4:
            page.reload()
        expect(page.locator(".sentence")).to_contain_text(f"{answered - 1} of 8 devices")
        page.evaluate(SHOWN_AFTER)
        before = time.time()
        run.answer(DEVICES[answered - 1], 0.1)
        expect(page.locator(".sentence")).to_contain_text(f"{answered} of 8 devices")
        shown = page.evaluate("window.shown")
        took = [at - before for said, at in shown.items() if f"{answered} of 8" in said]
        delays.append(took[0])
    assert median(delays) < 1.0, delays


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
        assert len(live[0].tabs) == 1
        page.evaluate(TURNED, True)
        assert until(lambda: not live[0].tabs, 10.0), "a hidden tab has no stream"
        for number in range(4):
            run.status("paused", f"behind {number}")
        page.evaluate(TURNED, False)
        expect(page.locator(".sentence")).to_contain_text("Behind 3")
        for number in range(4):
            run.status("paused", f"seen {number}")
            expect(page.locator(".sentence")).to_contain_text(f"Seen {number}")
        reads = page.evaluate(READS)
        assert len(reads) > 4
        assert min(later - begun for begun, later in pairwise(reads)) > 240, "at most four redraws a second"


@pytest.mark.parametrize("width", [400, 1300])
def test_a_round_that_ends_moves_nothing_that_a_person_reads(store: Store, look: Open, width: int):
    add_devices(store, DEVICES, time.time())
    run = new_run(store, at=time.time() - 60)
    for _ in range(3):
        run.quiet_round()
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator(".figures")).to_contain_text("3 / ")
        page.evaluate(SHIFTS)
        run.quiet_round()
        expect(page.locator(".figures")).to_contain_text("4 / ")
        assert sum(value for value, _ in page.evaluate("window.shifts")) < 0.01, page.evaluate("window.shifts")
