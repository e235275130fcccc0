"""The health of a device over time, and its next step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.browsing import Open, axe
from tests.support.filled_fleet import a_fleet, fingerprint, hello, there
from tests.support.filled_store import twelve_rounds
from tests.support.private_story import PrivateStory
from tests.support.secure_story import SecureStory
from tests.support.serving import Shown
from tests.web.test_api import get
from thinwire.core.events import DeviceOffline, DeviceOnline
from thinwire.reports.secure_rounds import MASKED, PRIVATE
from thinwire.store import Store, UpdateRow
from thinwire.web import device_health

HOUR_S = 3600.0


def sums(found: Any, name: str) -> float:
    return sum(row[name] or 0 for row in found["rows"])


def test_figures_come_from_the_replies_of_each_hour(page: TestClient, store: Store):
    at = time.time() // HOUR_S * HOUR_S - HOUR_S + 60  # in the hour before, which is over
    run = twelve_rounds(store, at=at)
    run.fail("pi-08", 1.0, "declined", "rounds_a_day: 24 of 24 rounds of today are made")
    found = get(page, "devices/pi-08/health")
    assert (found["span"], len(found["rows"]), found["read_since"]) == ("day", 24, None)
    row = found["rows"][-2]
    own = [one for one in store.updates(run.run_id) if one.device == "pi-08"]
    assert row["assignments"] == sums(found, "assignments") == len(own) > 10
    assert row["failures"] == sum(one.outcome in ("failed", "dropped") for one in own) >= 1
    steps = [one.train_s / 50 for one in own if one.train_s]
    assert min(steps) <= row["step_s"] <= max(steps)
    assert row["down_bits_s"] > 0
    assert row["up_bits_s"] is None, "its updates are too small to measure a rate"
    assert row["outside_s"] > 0
    assert {key: found["rows"][0][key] for key in ("online", "step_s", "failures")} == dict.fromkeys(
        ("online", "step_s", "failures")
    )
    week = get(page, "devices/pi-08/health?span=week")
    assert (len(week["rows"]), sums(week, "assignments")) == (28, len(own))
    assert sums(get(page, f"devices/pi-08/health?until={at - 60}"), "assignments") == 0
    lines = page.get("/api/v1/devices/pi-08/health.csv").text.splitlines()
    assert (lines[0].split(",")[2], len(lines)) == ("online", 25)
    assert page.get("/api/v1/devices/pi-99/health").status_code == 404
    store.roster.enrol("attic", fingerprint("attic"), b"key", "manual")
    never = get(page, "devices/attic/health")
    assert {row["online"] for row in never["rows"]} == {None}, "it has never connected"


def test_of_too_many_assignments_the_earlier_ones_are_not_read(
    page: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
):
    run = twelve_rounds(store)
    monkeypatch.setattr("thinwire.web.device_queries.MAX_READ", 5)
    found = get(page, "devices/pi-01/health")
    assigned = sorted(one.assigned_at or 0.0 for one in store.updates(run.run_id) if one.device == "pi-01")
    assert (sums(found, "assignments"), found["read_since"]) == (5, assigned[-5])
    assert found["rows"][0]["assignments"] is None


def test_the_share_online_follows_a_device_through_its_rename(page: TestClient, store: Store):
    begin = time.time() // HOUR_S * HOUR_S - 2 * HOUR_S
    store.roster.enrol("ward-4", fingerprint("ward-4"), b"key", "loopback")
    there(store, hello("ward-4"), begin)
    store.record_device(DeviceOffline(begin + 1200, "ward-4", "no request for 300 s", begin + 900))
    store.record_device(DeviceOnline(begin + 1800, "ward-4"))
    store.roster.rename("ward-4", "ward-5")
    shares = [row["online"] for row in get(page, "devices/ward-5/health")["rows"]]
    assert shares[-4:-1] == [None, 0.75, 1.0]


def test_each_reason_why_figures_are_not_known_is_named_once(page: TestClient, store: Store):
    twelve_rounds(store)
    for story in (PrivateStory(store), SecureStory(store), SecureStory(store)):
        story.play()
    assert get(page, "devices/pi-01/health?until=1700000100")["not_known"] == f"{MASKED}; {PRIVATE}"


def test_a_rate_is_measured_by_large_transfers_only():
    row = UpdateRow(
        run_id="r", round=1, device="a", assignment_id="", update_id="", outcome="aggregated", reason="",
        aggregated_round=1, staleness=0, assigned_at=0.0, pulled_at=0.0, began_at=10.0, arrived_at=12.0,
        download_s=1.0, queue_s=0.0, evaluate_s=0.0, train_s=8.5, encode_s=0.2, load_s=0.0, commit_s=0.0, examples=1,
        steps=17, norm=None, residual_norm=None, requests=1, metrics={}, payload_up=100_000, payload_down=50_000,
        wire_up=None, wire_down=None,
    )  # fmt: skip
    assert device_health.up_bits_s(row) == 400_000
    assert device_health.down_bits_s(row) == 400_000
    assert device_health.step_s(row) == 0.5
    assert device_health.outside_s(row) == pytest.approx(0.3)
    assert device_health.up_bits_s(replace(row, payload_up=1000)) is None
    assert device_health.outside_s(replace(row, train_s=None)) is None, "a private reply does not tell the work"


def test_a_failure_of_a_run_that_is_over_needs_nothing(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.fail("pi-08", 1.0, "declined", "hours: outside of 22:00-06:00")
    device = get(page, "devices/pi-08")
    assert device["next_step"].startswith(f"Read why its last assignment in {run.run_id} failed: declined")
    assert device["declined"]["run_id"] == run.run_id
    run.status("stopped", "stopped by ann")
    device = get(page, "devices/pi-08")
    assert (device["last_run"], device["last_is_over"], device["next_step"]) == (run.run_id, True, "")
    assert (device["declined"], device["last_outcome"][:16]) == (None, "failed: declined")


def test_the_most_urgent_step_stands_alone(page: TestClient, store: Store):
    twelve_rounds(store)
    a_fleet(store, time.time())
    steps = {one["device"]: one["next_step"] for one in get(page, "devices")}
    assert steps["ward-4"].startswith("Compare its fingerprint")
    assert steps["jetson-1"].startswith("Fix its task digits: thinwire client doctor --name jetson-1 on the device")
    assert steps["cam-02"].startswith("Start its client again")
    assert steps["cam-01"].startswith("Install the code of digits"), "its clock is wrong too"
    assert steps["old-box"] == steps["pi-01"] == ""


def test_the_health_of_a_device_is_drawn_and_tabled_with_its_state_in_the_address(
    store: Store, served: Shown, look: Open
):
    twelve_rounds(store)
    page = look(served.url, "devices/pi-01")
    health = page.locator("#health")
    expect(health.get_by_role("img", name="Seconds a step over 24 hours")).to_be_visible()
    expect(health.locator("figure", has_text="Upload")).to_contain_text("not known yet")
    assert axe(page) == []
    health.get_by_role("button", name="Table").click()
    health.get_by_role("radio", name="7 days").check(force=True)
    expect(health.get_by_role("row")).to_have_count(29)
    health.get_by_role("button", name="Earlier").click()
    expect(health.get_by_role("button", name="Later")).to_be_enabled()
    page.reload()
    expect(health.get_by_role("row")).to_have_count(29)
    assert {"health=table", "span=week"} <= set(page.url.partition("?")[2].split("&"))
    a_fleet(store, time.time())
    page.goto(f"{served.url}/devices/old-box")
    expect(health.locator("figure", has_text="Online").locator(".value")).to_have_text("0 %")
