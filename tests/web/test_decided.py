"""What was decided for single devices, and why, as the API says it and a browser shows it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support import decided_store
from tests.support.browsing import Open, axe, axe_in_both, overflow
from tests.support.decided_store import ahead, buffered, laddered
from tests.support.serving import Shown
from tests.web.test_api import get
from thinwire.reports.reason_text import deadline_sentence, sentence
from thinwire.store import Store

DEADLINE, DRAWN = deadline_sentence(9.0, decided_store.DEADLINE), sentence(decided_store.DRAWN)
SLOW, QUICK = sentence(decided_store.SLOW), sentence(decided_store.QUICK)
NOTE, WORK = sentence(decided_store.NOTE), sentence(decided_store.WORK)


def test_a_round_says_why_its_deadline_and_each_clients_codec_and_work(page: TestClient, store: Store):
    run = laddered(store)
    found = get(page, f"runs/{run.run_id}/rounds/2")
    assert (found["deadline_reason"], found["sampling"]) == (DEADLINE, DRAWN)
    assert found["codecs"] == [["fp16", 7], ["topk(0.01) > int8", 2]]
    of = {one["device"]: one for one in found["updates"]}
    assert (of["pi-01"]["codec"], of["pi-01"]["codec_reason"]) == ("fp16", QUICK)
    assert (of["pi-09"]["codec_reason"], of["pi-09"]["work_reason"]) == (SLOW, WORK)
    assert (of["pi-09"]["instead_of"], of["pi-01"]["instead_of"]) == ("pi-03", "")
    assert of["pi-09"]["stretches"][0]["begin_s"] == pytest.approx(0.9)
    assert "(selected after 900 ms instead of pi-03)" in found["why"]


def test_an_answer_of_a_device_that_began_again_says_what_it_had_found(page: TestClient, store: Store):
    run = laddered(store)
    said = {u["device"]: u["state_lost"] for u in get(page, f"runs/{run.run_id}/rounds/2")["updates"]}
    assert (said["pi-05"], said["pi-01"]) == ("older", "")
    assert get(page, "devices/pi-05")["assignments"][0]["state_lost"] == "older"


def test_each_client_has_the_size_of_what_it_did_not_send_beside_its_change(page: TestClient, store: Store):
    run = laddered(store)
    (last,) = [u for u in get(page, f"runs/{run.run_id}/updates?round=2") if u["device"] == "pi-09"]
    clients = {one["device"]: one["residual_ratio"] for one in get(page, f"runs/{run.run_id}")["clients"]}
    assert clients["pi-09"] == last["residual_ratio"] > 0


def test_a_run_says_what_its_plan_comes_to_here(page: TestClient, store: Store):
    assert get(page, f"runs/{laddered(store).run_id}")["notes"] == [NOTE]


def test_a_full_buffer_shows_what_of_it_was_requested_before(page: TestClient, store: Store):
    run = buffered(store)
    found = get(page, f"runs/{run.run_id}/rounds/2")
    assert [(one["device"], one["round"]) for one in found["late_aggregated"]] == [("pi-03", 1)]
    assert "its buffer was full with 2 updates, 1 of them assigned before it opened (pi-03's 1 version" in found["why"]
    assert found["slowest"] == "pi-03"


def test_an_open_buffer_shows_who_is_at_work_since_when(page: TestClient, store: Store):
    run = buffered(store)
    found = get(page, f"runs/{run.run_id}/rounds/3")
    assert found["why"] == "Round 3 is open: its buffer holds 1 of 2 updates, and 4 devices are at work."
    assert {(one["device"], one["round"]) for one in found["late_aggregated"]} == {("pi-02", 2), ("pi-04", 1)}
    assert "waits for a buffer of 2" in get(page, f"runs/{run.run_id}")["sentence"]


def test_a_round_that_was_requested_ahead_counts_from_its_turn(page: TestClient, store: Store):
    run = ahead(store)
    first, second, third, fourth = (get(page, f"runs/{run.run_id}/rounds/{n}") for n in (1, 2, 3, 4))
    assert first["turn_at"] == first["opened_at"] == second["opened_at"]
    assert second["turn_at"] == pytest.approx(first["closed_at"], abs=0.05)
    assert third["turn_at"] == pytest.approx(second["closed_at"], abs=0.05)
    assert sum(second["stages"].values()) == pytest.approx(1.0, abs=0.05)
    assert second["why"].startswith("Round 2 took 1.0 s: waited ")
    assert "have answered" in third["why"]
    waits = "8 were selected ahead, and it takes answers when round 3 has closed"
    assert fourth["why"] == f"Round 4 waits for its turn: {waits}."
    assert get(page, f"runs/{run.run_id}")["sentence"].startswith("Round 3 of 12")


def test_a_round_that_waits_for_devices_before_its_turn_has_none_yet(page: TestClient, store: Store):
    run = ahead(store, waits=True)
    third = get(page, f"runs/{run.run_id}/rounds/3")
    assert third["turn_at"] is None
    waits = "8 were selected ahead, and it takes answers when enough devices are there"
    assert third["why"] == f"Round 3 waits for its turn: {waits}."
    assert get(page, f"runs/{run.run_id}")["sentence"] == "Waiting: 4 of 8 devices."


def test_what_a_device_has_is_said_and_what_it_did_not_say_is_not_made_up(page: TestClient, store: Store):
    laddered(store)
    has = get(page, "devices/pi-09")["has"]
    assert has["sentence"] == "4 cores, 2.5 of 4.0 GiB free, battery, metered"
    assert get(page, "devices/pi-01")["has"] == {**dict.fromkeys(has), "sentence": ""}
    (assigned,) = get(page, "devices/pi-09")["assignments"]
    assert assigned["work_reason"] == WORK


def test_the_reasons_are_shown_to_all_and_at_every_width(store: Store, served: Shown, look: Open):
    run = laddered(store)
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".notice.said")).to_have_text(NOTE)
    expect(page.locator(".closing")).to_contain_text(f"Codecs fp16 (7), topk(0.01) > int8 (2). Deadline {DEADLINE}.")
    expect(page.locator(".closing")).to_contain_text(f"S{DRAWN[1:]}.")
    expect(page.locator(".gantt li", has_text="pi-05")).to_contain_text("aggregated, restarted (state older)")
    page.get_by_text("The assignment of each, and why").click()
    row = page.get_by_label("Assignments of the clients of round 2").get_by_role("row", name="pi-09")
    expect(row).to_contain_text("after 900 ms instead of pi-03: 7 of 8 replies could still come")
    for said in (SLOW, WORK):
        expect(row).to_contain_text(said)
    for path, waited in ((f"runs/{run.run_id}", ".closing"), ("devices/pi-09", "#has"), ("devices", "#known")):
        page.goto(f"{served.url}/{path}")
        page.wait_for_selector(waited)
        for summary in page.locator("main summary").all():
            summary.click()
        for width in (390, 1000, 1600):
            page.set_viewport_size({"width": width, "height": 900})
            assert overflow(page) <= 0, (path, width)
            assert width == 1000 or (axe(page) if width == 390 else axe_in_both(page)) == [], (path, width)


def test_an_open_buffer_is_told_as_one(store: Store, served: Shown, look: Open):
    page = look(served.url, f"runs/{buffered(store).run_id}")
    expect(page.locator("#rounds .why")).to_contain_text("its buffer holds 1 of 2 updates, and 4 devices are at work")
    expect(page.locator(".gantt li.gantt-row")).to_have_count(5)
    expect(page.locator(".progress")).not_to_contain_text("deadline")


def test_the_round_that_takes_answers_is_followed_and_those_behind_it_can_be_looked_at(
    store: Store, served: Shown, look: Open
):
    page = look(served.url, f"runs/{ahead(store).run_id}")
    expect(page.locator("#rounds h2")).to_have_text("Round 3")
    expect(page.locator(".progress")).to_contain_text("round 3: 0 of 8 answered")
    page.get_by_role("button", name="Round after").click()
    expect(page.locator("#rounds .why")).to_contain_text("Round 4 waits for its turn")
    page.get_by_role("button", name="Newest").click()
    expect(page.locator("#rounds h2")).to_have_text("Round 3")
