"""A run's clients in the order that a person chooses, and its slowest rounds."""

from __future__ import annotations

import csv
import itertools
import re
from pathlib import Path
from typing import Any, get_args

from playwright.sync_api import Page, expect
from starlette.testclient import TestClient

from benchmarks.page.recipe import Recipe, fill
from tests.server import test_sampled_rounds as sampled
from tests.support.api_answers import DEVICES, Told
from tests.support.browsing import Open, axe, overflow
from tests.support.crashes import Fate
from tests.support.serving import Shown
from tests.web.test_api import get
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store
from thinwire.web.client_queries import ShownKey
from thinwire.web.run_queries import Reader

FIELDS = {
    "aggregated": lambda one: one["aggregated_count"] + one["late"],
    "examples": lambda one: one["examples"] or None,
}


def test_each_column_sorts_the_clients_in_both_directions(page: TestClient, told: Told):
    keys = [key for part in get_args(ShownKey) for key in get_args(part) or [part]]
    assert len(keys) == 14
    for key, down in itertools.product(keys, (False, True)):
        _sorted(page, told, key, down)


def _sorted(page: TestClient, told: Told, key: str, down: bool) -> None:
    query = f"sort={key}&descending={str(down).lower()}"
    shown = get(page, f"runs/{told.run_id}/clients?{query}")["clients"]
    assert sorted(one["device"] for one in shown) == DEVICES
    found = [FIELDS.get(key, lambda one: one[key])(one) for one in shown]
    known = [value for value in found if value is not None]
    assert known == sorted(known, reverse=down)
    assert found[: len(known)] == known, "those without the value come last"
    pages = [get(page, f"runs/{told.run_id}/clients?{query}&client={first}&count=3") for first in (0, 3, 6)]
    assert [one for part in pages for one in part["clients"]] == shown
    assert {part["total"] for part in pages} == {len(DEVICES)}
    view = get(page, f"runs/{told.run_id}/view?client=3&{query}")
    assert [one["device"] for one in view["clients"]["clients"]] == [one["device"] for one in shown[3:]]
    text = page.get(f"/api/v1/runs/{told.run_id}/clients.csv?{query}").text
    assert [line["device"] for line in csv.DictReader(text.splitlines())] == [one["device"] for one in shown]


def test_only_a_column_sorts(page: TestClient, told: Told):
    for route in ("clients", "view", "clients.csv"):
        assert page.get(f"/api/v1/runs/{told.run_id}/{route}?sort=run_id").status_code == 422


def test_the_slowest_rounds_are_named_with_whom_they_waited_for(page: TestClient, told: Told):
    view = get(page, f"runs/{told.run_id}/view")
    closed = {one["round"]: one["seconds"] for one in view["rounds"] if one["seconds"]}
    slowest = sorted(closed, key=lambda number: (-closed[number], -number))[:5]
    assert [(one["round"], one["seconds"]) for one in view["worst"]] == [(number, closed[number]) for number in slowest]
    first = view["worst"][0]
    assert (first["round"], first["waited_for"], first["waited_count"]) == (4, ["pi-07"], 1)
    assert first["slowest"] == get(page, f"runs/{told.run_id}/rounds/4")["slowest"] != ""


def test_a_run_with_a_secret_sample_has_no_slowest_rounds(tmp_path: Path):
    with sampled.of_coins("a", "b", "c"):
        assert sampled.World(tmp_path, Fate()).live().status == "done"
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert len(store.slowest_rounds("toy-1", 5)) == 3
        assert Reader(store).view("toy-1").worst == []


def names(page: Page) -> Any:
    return page.locator("#clients tbody th")


def test_a_person_sorts_the_clients_and_the_address_keeps_it(store: Store, served: Shown, look: Open):
    run = fill(store, Recipe("wide", 3, 60, 60))
    page = look(served.url, f"runs/{run.run_id}")
    expect(names(page)).to_have_count(50)
    heading = page.get_by_role("columnheader", name="Client", exact=True)
    expect(heading).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("button", name="Client", exact=True).click()
    expect(heading).to_have_attribute("aria-sort", "descending")
    expect(names(page).first).to_have_text("pi-0060")
    page.get_by_role("button", name="After", exact=True).click()
    expect(names(page)).to_have_text([f"pi-{number:04d}" for number in range(10, 0, -1)])
    page.reload()
    expect(names(page).first).to_have_text("pi-0010")
    failed = page.get_by_role("button", name="Failed", exact=True)
    failed.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("columnheader", name="Failed", exact=True)).to_have_attribute("aria-sort", "descending")
    expect(names(page)).to_have_count(50)
    expect(names(page).first.get_by_role("link")).to_have_attribute("href", re.compile(r"^\.\./devices/pi-\d{4}$"))
    assert {"clients=failed"} == {part for part in page.url.partition("?")[2].split("&") if "round" not in part}


def test_a_slow_round_is_opened_by_its_link(told: Told, served: Shown, look: Open):
    page = look(served.url, f"runs/{told.run_id}", viewport={"width": 400, "height": 900})
    slow = page.get_by_role("list", name="Slowest rounds")
    expect(slow.get_by_role("listitem")).to_have_count(5)
    expect(slow).to_contain_text("Round 4 4.0 s, waited for pi-07")
    slow.get_by_role("link", name="Round 4").click()
    expect(page.get_by_role("heading", name="Round 4", exact=True)).to_be_in_viewport()
    assert "round=4" in page.url
    assert overflow(page) <= 0
    assert axe(page) == []
