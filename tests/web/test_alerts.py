"""Alerts: what is decided from a store, and what the dashboard shows of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import Open, axe, overflow
from tests.support.filled_store import new_run
from tests.support.serving import showing
from thinwire.core.owner_file import AlertSettings
from thinwire.reports.alerting import AlertContext, conditions, divergence
from thinwire.store import Condition, Store

DEFAULT = AlertSettings()
MINUTE_S, DAY_S = 60.0, 86_400.0


def kinds(store: Store, **around: Any) -> list[str]:
    found, _ = conditions(store, AlertContext(**{"now": time.time(), **around}), DEFAULT)
    return [one.kind for one in found]


def diverge(run: Told) -> None:
    run.open()
    for device in DEVICES[:3]:
        run.fail(device, 1.0, "non-finite", "the loss became NaN or infinity")
    for device in DEVICES[3:]:
        run.answer(device, 1.5)
    run.close("enough", 2.0)
    run.open()


def test_a_run_that_goes_on_has_no_alert(store: Store, run: Told):
    assert kinds(store, now=run.now + 29 * MINUTE_S, free_bytes=5 * 10**9) == []


def test_a_run_without_a_closed_round_for_half_an_hour_has_one(store: Store, run: Told):
    ((one,), unknown) = conditions(store, AlertContext(run.now + 31 * MINUTE_S), DEFAULT)
    assert (one.kind, one.subject, unknown) == ("no-progress", run.run_id, frozenset())
    assert "no round has closed for 31 min" in one.sentence
    run.status("paused", "paused by a person")  # nobody expects progress then
    assert kinds(store, now=run.now + 31 * MINUTE_S) == []


def test_a_run_that_goes_on_after_a_pause_is_quiet_since_then(store: Store, run: Told):
    run.status("paused", "paused by a person")
    run.now += 60 * MINUTE_S
    run.status("running", "")
    run.open()
    assert kinds(store, now=run.now + 29 * MINUTE_S) == []
    assert kinds(store, now=run.now + 31 * MINUTE_S) == ["no-progress"]


def test_a_run_that_waits_for_devices_or_closes_rounds_as_too_few_has_one(store: Store, run: Told):
    for _ in range(3):
        assert kinds(store, now=run.now) == []
        run.open()
        run.close("too-few", 2.6)
    assert kinds(store, now=run.now) == ["too-few-clients"]
    run.quiet_round()
    assert kinds(store, now=run.now) == []
    run.status("waiting", "waiting: 3 of 8 devices")
    assert kinds(store, now=run.now + 9 * MINUTE_S) == []
    assert kinds(store, now=run.now + 11 * MINUTE_S) == ["too-few-clients"]


def test_updates_that_are_not_finite_have_one_with_what_to_try(store: Store, run: Told):
    diverge(run)
    ((one,), _) = conditions(store, AlertContext(run.now), DEFAULT)
    assert (one.kind, one.subject) == ("not-finite", run.run_id)
    assert "3 updates of the last 2 rounds held NaN or infinity" in one.sentence
    assert "[local] lr" in one.hint


def test_a_first_round_that_is_not_finite_is_told_as_the_last_one(store: Store):
    run = new_run(store)
    diverge(run)
    assert "3 updates of the last round held NaN or infinity" in divergence(store, store.run(run.run_id))


def test_disk_certificate_and_aggregator_are_judged_by_their_numbers(store: Store):
    now = time.time()
    assert kinds(store, free_bytes=999 * 10**6) == ["disk"]
    assert kinds(store, certificate_until=now + 13 * DAY_S) == ["certificate"]
    assert kinds(store, certificate_until=now + 15 * DAY_S) == []
    assert kinds(store, down_since=now - 1 * MINUTE_S) == []
    assert kinds(store, down_since=now - 3 * MINUTE_S) == ["aggregator-offline"]


def test_while_the_aggregator_is_down_nobody_judges_its_runs(store: Store, run: Told):
    found, unknown = conditions(store, AlertContext(run.now + 60 * MINUTE_S, down_since=run.now), DEFAULT)
    assert [one.kind for one in found] == ["aggregator-offline"]
    assert unknown == {"no-progress", "too-few-clients", "not-finite"}


def test_alerts_are_read_and_acknowledged_through_the_api(page: TestClient, store: Store):
    store.alerts.update([Condition("disk", "", "the disk has 3 MB free")])
    assert [one["kind"] for one in page.get("/api/v1/alerts").json()] == ["disk"]
    origin = {"Origin": "http://127.0.0.1:8080"}
    assert page.post("/api/v1/alerts/1/acknowledge", headers=origin).json()["acknowledged_by"]
    assert page.post("/api/v1/alerts/9/acknowledge", headers=origin).status_code == 404
    assert page.get("/api/v1/alerts.csv").text.splitlines()[1].startswith("1,disk,")


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (420, "dark")])
def test_the_page_shows_what_is_wrong_and_takes_an_acknowledgement(store: Store, look: Open, width: int, scheme: Any):
    disk = Condition("disk", "", "the disk of the state directory has 3 MB free, which is little", "free some space")
    quiet = Condition("no-progress", "digits-1", "digits-1: no round has closed for 40 min", "runs show --why")
    for found in ([disk], [disk, quiet], [disk]):
        store.alerts.update(found)
    with showing(store.url, None) as shown:
        page = look(shown.url, "alerts", viewport={"width": width, "height": 900}, color_scheme=scheme)
        expect(page.get_by_role("link", name="Alerts")).to_contain_text("1 not acknowledged")
        expect(page.locator("#closed-alerts")).to_contain_text("digits-1")
        assert axe(page) == []
        assert overflow(page) == 0
        assert page.locator("#open-alerts .scroll").evaluate("(e) => e.scrollWidth - e.clientWidth") == 0
        page.get_by_role("button", name="Acknowledge: the disk").click()
        expect(page.locator("#open-alerts")).to_contain_text("machine")
        expect(page.get_by_role("link", name="Alerts")).not_to_contain_text("not acknowledged")
    assert store.alerts.counts()[:2] == (1, 0)


def test_a_message_is_being_sent_on_the_page_until_it_is_sent(store: Store, look: Open):
    store.alerts.update([Condition("disk", "", "the disk is full")])
    with showing(store.url, None) as shown:
        row = look(shown.url, "alerts").locator("#open-alerts tbody tr")
        expect(row).to_contain_text("being sent")
        store.alerts.not_sent(store.alerts.open()[0], "webhook: no answer", "")
        expect(row).to_contain_text("not sent: webhook: no answer")
        store.alerts.sent(store.alerts.open()[0], "opened")
        expect(row).not_to_contain_text("sent")


def test_the_headline_of_a_run_whose_training_diverges_says_so_with_what_to_try(store: Store, run: Told, look: Open):
    wanted = "Training diverges: 3 updates of the last 2 rounds held NaN or infinity; try a smaller [local] lr"
    diverge(run)
    with showing(store.url, None) as shown:
        page = look(shown.url, f"runs/{run.run_id}")
        expect(page.locator(".notice").first).to_contain_text(wanted)
        assert axe(page) == []
    run.status("done", "12 rounds")
    assert divergence(store, store.run(run.run_id)) == ""
    run.status("failed", "4 rounds in a row had too few replies", 6)
    assert divergence(store, store.run(run.run_id)).startswith(wanted.replace("diverges", "diverged"))


def test_a_loss_that_stays_over_that_of_the_first_model_is_told_with_what_to_try(store: Store, run: Told, monkeypatch):
    measured = run.measured
    losses = [2.3, 1.1, 2.0, 0.9, 1.0, 1.5, 1.4, 1.3]  # of the models 0 to 7
    monkeypatch.setattr(run, "measured", lambda version: replace(measured(version), metrics={"loss": losses[version]}))
    said = list[str]()
    for _ in losses[1:]:
        run.open()
        run.answer(DEVICES[0], 1.0)
        run.close("enough", 2.0)
        said.append(divergence(store, store.run(run.run_id)))
    assert said[:-1] == [""] * 6
    wanted = "Training diverges: the loss was 1.1000 after round 1, and is 1.3000 after round 7; try a smaller [local]"
    assert said[-1].startswith(wanted)
    monkeypatch.setattr(run, "measured", lambda version: replace(measured(version), metrics={}))
    for _ in range(3):  # with pipelined rounds the latest models are not evaluated yet
        run.open()
        run.answer(DEVICES[0], 1.0)
        run.close("enough", 2.0)
    assert divergence(store, store.run(run.run_id)).startswith(wanted)
