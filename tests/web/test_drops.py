"""The dashboard says in a sentence why an update was dropped, wherever it shows the outcome, with the code as title."""

from __future__ import annotations

from typing import get_args

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import DEVICES, Told
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


@pytest.mark.parametrize(
    ("reason", "replies", "said"),
    [
        ("deadline", 5, "the deadline passed: 2 of 8 devices had not replied"),
        ("enough", 5, "enough answered (5); 2 more were still at work"),
        ("too-few", 3, "too few answered: 3 of at least 4; the model stays as it was"),
    ],
)
def test_a_closed_round_says_the_same_whatever_comes_after_its_end(
    page: TestClient, run: Told, reason: CloseReason, replies: int, said: str
):
    """One device had failed before the end and replies after it; of the silent ones one replies and one is lost."""
    run.open(4.0, target_updates=5)
    for device in DEVICES[:replies]:
        run.answer(device, 1.0)
    failed, replied, lost, *_ = DEVICES[replies:]
    run.fail(failed, 2.0, "offline", "")
    run.close(reason, 4.0, [*DEVICES[replies + 1 :]])

    def shown() -> dict[str, str]:
        found: dict[str, str] = page.get(f"/api/v1/runs/{run.run_id}/rounds/{run.round}").json()
        return found

    assert shown()["closing"] == said
    for device in (failed, replied):
        run.drop(device, 5.0, "late")
    run.fail(lost, 5.0, "offline", "")
    assert shown()["closing"] == said
    if reason == "deadline":
        assert "2 of 8 had not replied when its deadline of 4.0 s passed" in shown()["why"], "as the explanation says"


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
