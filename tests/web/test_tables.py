"""Tables of the dashboard: behind each are its numbers as JSON, where it may be long as CSV, and it fits any screen."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Open, overflow
from tests.support.filled_fleet import a_fleet
from tests.support.filled_store import finish, new_run, twelve_rounds
from tests.support.serving import Shown
from thinwire.store import Condition, Store

HOSTILE = "<img src=x onerror=alert(1)>"
LONG = {"runs", "rounds", "clients", "learning", "bytes", "figures", "known", "health", "open-alerts", "log"}
TABLES = """() => [...document.querySelectorAll("section.block")].filter((one) => one.querySelector("table"))
  .map((one) => [one.id, ...[...one.querySelectorAll("header a.tool")].map((link) => [link.textContent, link.href])])"""


@pytest.fixture
def filled(store: Store) -> str:
    """A run that is over and one that goes on, devices in every state, alerts, users and tokens."""
    run = twelve_rounds(store)
    finish(run)
    new_run(store, rounds=5, name=HOSTILE).quiet_round()
    a_fleet(store, time.time())
    store.roster.revoke("pi-08")
    store.roster.note("join", "203.0.113.9:50000", "unknown", "attic")
    store.alerts.update([Condition("disk", "", "the disk has 3 MB free", "free some space")])
    store.users.add("anna", "admin", "an owl in the 7th tower", "root")
    store.tokens.make("nightly", "anna", "viewer")
    return run.run_id


@pytest.mark.parametrize(
    ("path", "sections"),
    [
        ("", {"runs", "devices"}),
        ("runs/digits-1?learning=table&bytes=table&gantt=table",
         {"learning", "bytes", "rounds", "clients", "journal"}),
        ("compare?runs=digits-1,digits-2&curves=table", {"curves", "figures", "differs"}),
        ("devices", {"known", "out", "invitations", "refusals"}),
        ("devices/pi-01?health=table", {"health", "assignments", "deeds"}),
        ("alerts", {"open-alerts", "closed-alerts"}),
        ("users", {"users", "tokens"}),
        ("audit", {"log"}),
    ],
)  # fmt: skip
def test_each_table_has_its_numbers_as_json_and_a_long_one_as_csv(
    filled: str, served: Shown, look: Open, path: str, sections: set[str]
) -> None:
    page = look(served.url, path)
    for name in sections:
        page.locator(f"#{name}").evaluate(
            "(section) => section.querySelectorAll('details').forEach((d) => d.open = true)"
        )
        expect(page.locator(f"#{name} table").first).to_be_visible()
    if "runs" in sections:
        expect(page.get_by_role("row", name="digits-2")).to_contain_text(HOSTILE)
    assert page.locator("img[src=x]").count() == 0
    for width in (400, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
    found = page.evaluate(TABLES)
    assert {name for name, *_ in found} >= sections
    for name, *links in found:
        ways = dict(links)
        assert "JSON" in ways, name
        assert name not in LONG or "CSV" in ways, name
        for way, address in ways.items():
            answer = page.request.get(address)
            assert (answer.status, way.lower() in answer.headers["content-type"]) == (200, True), address
