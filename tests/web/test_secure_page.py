"""Secure runs on the dashboard: phases, what is protected, and nothing of a single client but presence and bytes."""

from __future__ import annotations

import csv
import io
import time
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.browsing import Open, axe_in_both, overflow
from tests.support.filled_store import add_devices
from tests.support.secure_story import ABORTED, DEVICES, SECURE, SecureStory, four_rounds
from tests.support.serving import Shown
from thinwire.reports.secure_rounds import MASKED
from thinwire.store import Store


@pytest.fixture
def story(store: Store) -> SecureStory:
    """Four rounds, the last of which is open in its phase `masked`."""
    add_devices(store, list(DEVICES), time.time() - 90)
    return four_rounds(store, at=time.time() - 75)


def test_a_round_shows_its_phases_who_dropped_out_and_the_sum(story: SecureStory, served: Shown, look: Open):
    page = look(served.url)
    page.goto(f"{served.url}/runs/{story.run_id}?round=2")
    expect(page.locator("#rounds .why")).to_contain_text("the phase masked lasted 5.2 s, waiting for masked vectors")
    table = page.get_by_role("region", name="Phases of round 2")
    expect(table.get_by_role("rowheader")).to_contain_text(["advertise", "share", "masked", "agree", "unmask"])
    share, agree = (table.get_by_role("row", name=name) for name in ("share shares", "agree"))
    expect(share).to_contain_text("700 ms")
    expect(share).to_contain_text("29.8 kB")
    expect(share).to_contain_text("pi-03 (withdrew: policy)")
    expect(agree).to_contain_text("pi-09")
    expect(page.locator("#rounds .phases")).to_contain_text("The sum has the updates of 8 clients, with the weight 8")
    expect(page.locator("#rounds .breakdown")).to_contain_text("masked 5.2 s")
    expect(page.locator("#rounds")).not_to_contain_text("in no measured stage")
    page.get_by_role("button", name="Round after").click()
    expect(page.locator(".closing").first).to_contain_text("too few clients were left for a sum, which needs 6")


def test_a_phase_that_closes_appears_without_a_reload(store: Store, served: Shown, look: Open):
    story = SecureStory(store, at=time.time() - 10)
    batches = story._round({"pi-02": "share"}, "masked", "all", 6)
    story.store.record(story.run_id, next(batches))
    page = look(served.url, f"runs/{story.run_id}")
    expect(page.locator("#rounds .why")).to_contain_text("the phase advertise waits for keys")
    table = page.get_by_role("region", name="Phases of round 1")
    expect(table.get_by_role("rowheader")).to_have_count(1)
    page.evaluate("window.stays = true")
    for rows, batch in enumerate([next(batches), *batches]):
        store.record(story.run_id, batch)
        if rows == 3:  # the drop-out of `share` and its end are recorded
            expect(table.get_by_role("row", name="share shares")).to_contain_text("pi-02 (withdrew: policy)")
            expect(page.locator("#rounds .why")).to_contain_text("the phase masked waits for masked vectors")
    expect(page.locator("#rounds .why")).to_contain_text("the phase agree waits for signatures of the survivors")
    assert page.evaluate("window.stays"), "the page was not loaded again"


def test_a_secure_run_is_usable_by_all_and_at_every_width(story: SecureStory, served: Shown, look: Open) -> None:
    page = look(served.url, f"runs/{story.run_id}")
    expect(page.locator("#protection")).to_contain_text(
        "protects the updates of one round against an honest-but-curious aggregator "
        "with up to 3 of 10 clients colluding"
    )
    expect(page.locator("#bytes .note")).to_contain_text(
        "Payload: the masked updates, with keys, shares and signatures."
    )
    expect(page.locator("#protection")).to_contain_text("docs/explain/secure-aggregation.md")
    expect(page.locator("#learning")).to_contain_text(
        "Version 2 has no metrics yet: evaluated by the next round's sum."
    )
    for query in ("", "?round=2", "?round=2&gantt=table"):
        page.goto(f"{served.url}/runs/{story.run_id}{query}")
        page.wait_for_selector("#rounds .phases")
        assert axe_in_both(page) == [], query
        for width in (390, 1000, 1600):
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) <= 0, (query, width)


def test_facts_of_a_single_client_are_not_known_and_the_reason_is_shown(story: SecureStory, served: Shown, look: Open):
    page = look(served.url)
    page.goto(f"{served.url}/runs/{story.run_id}?round=1&gantt=table")
    row = page.get_by_role("region", name="Assignments of round 1").get_by_role("row", name="pi-01")
    for column in ("Examples", "Steps", "Norm", "train", "encode", "evaluate", "Residual ÷ update"):
        expect(row.locator(f"[data-label='{column}']")).to_have_text("–")
    expect(page.locator("#rounds")).to_contain_text(f"Norm and Residual means {MASKED}.")
    expect(page.locator("#clients")).to_contain_text(f"A dash under Examples means {MASKED}.")
    page.goto(f"{served.url}/devices/pi-01")
    expect(page.locator("#assignments")).to_contain_text(f"A dash under Examples and Steps means {MASKED}.")


def test_documents_and_files_have_null_and_empty_cells_in_place_of_zeros(story: SecureStory, page: Any):
    run = f"/api/v1/runs/{story.run_id}"
    unknown = ("examples", "steps", "norm", "residual_norm", "residual_ratio")
    for update in page.get(f"{run}/rounds/1").json()["updates"]:
        assert [update[name] for name in unknown] == [None] * 5
        assert (update["metrics"], update["not_known"]) == ({}, MASKED)
        assert {one["stage"] for one in update["stretches"]} == {"delivery", "work", "upload"}
    assert {client["examples"] for client in page.get(run).json()["clients"]} == {None}
    rows = list(csv.DictReader(io.StringIO(page.get(f"{run}/updates.csv").text)))
    assert {row[name] for row in rows for name in unknown} == {""}
    assert page.get(f"{run}/rounds").json()[0]["secure_sum"]["survivors"] == 10
    assert page.get("/api/v1/devices/pi-01").json()["assignments"][0]["not_known"] == MASKED


def test_the_smallest_round_decides_the_protection_of_a_run_and_each_round_its_own_sum(store: Store, page: Any):
    story = SecureStory(store)
    story.play()
    story.devices = DEVICES[:6]
    story.play(least=4)
    story.devices = DEVICES
    story.play()
    run = f"/api/v1/runs/{story.run_id}"
    assert "up to 1 of 6 clients colluding; a sum holds at least 4" in page.get(run).json()["protection"]["sentence"]
    assert [one["min_updates"] for one in page.get(f"{run}/rounds").json()] == [6, 5, 6]


def test_the_reason_of_an_aborted_round_is_said(store: Store, page: Any):
    story = SecureStory(store)
    story.play(reason="aborted")
    said = page.get(f"/api/v1/runs/{story.run_id}/rounds/1").json()["closing"]
    assert said == f"there is no sum: {ABORTED}; the model stays as it was"


def test_a_run_in_the_clear_shows_neither_phases_nor_a_protection(store: Store, page: Any):
    plain = SecureStory(store, plan=SECURE.replace("enabled = true", "enabled = false"))
    plain.play()
    run = f"/api/v1/runs/{plain.run_id}"
    assert (page.get(run).json()["protection"], page.get(run).json()["not_evaluated"]) == (None, "")
    assert page.get(f"{run}/rounds/1").json()["phases"] == []
