"""The dashboard says in a sentence why an update was dropped, wherever it shows the outcome, with the code as title."""

from __future__ import annotations

from typing import get_args

from playwright.sync_api import expect

from tests.support.api_answers import Told
from tests.support.browsing import Open, axe, overflow
from tests.support.serving import Shown
from thinwire.client.errors import WORK
from thinwire.core.events import CloseReason, DropReason
from thinwire.privacy.participant import Reason
from thinwire.reports.reason_text import CLOSED, DROP_TEXTS, LEFT

SAID = DROP_TEXTS["bad-payload"]


def test_each_reason_of_a_drop_and_of_a_round_s_end_has_a_sentence():
    assert set(DROP_TEXTS) == set(get_args(DropReason))
    assert set(LEFT) == {*get_args(Reason), "lattice", WORK}, "the words that a client under masks tells of a failure"
    assert set(CLOSED) == set(get_args(CloseReason))


def test_a_dropped_update_says_why_in_its_round_at_its_client_and_in_the_journal(run: Told, served: Shown, look: Open):
    run.open()
    run.drop("pi-02", 1.9, "bad-payload")
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".gantt .note")).to_have_text(f"bad-payload: {SAID}.")
    expect(page.locator("#clients tbody tr", has_text="pi-02")).to_contain_text(f"dropped: {SAID}")
    expect(page.locator("#clients").get_by_title("bad-payload")).to_have_count(1)
    page.locator("#rounds").get_by_role("button", name="Table").click()
    expect(page.locator("#rounds tbody tr", has_text="pi-02")).to_contain_text(f"dropped: {SAID}")
    page.get_by_text("Every decision of this run").click()
    page.locator("#journal select").select_option("UpdateDropped")
    expect(page.locator("#journal tbody")).to_contain_text(SAID)
    page.locator("#journal select").select_option("RoundClosed")
    expect(page.locator("#journal tbody")).to_contain_text(CLOSED["all"])
    assert axe(page) == []
    page.set_viewport_size({"width": 420, "height": 900})
    assert overflow(page) <= 0
    page.goto(f"{served.url}/devices/pi-02")
    expect(page.locator("#assignments")).to_contain_text(f"dropped: {SAID}")
    expect(page.locator(".notice")).to_have_text(f"Read why its last assignment in {run.run_id} was dropped: {SAID}.")
