"""Rounds of more than 200 clients as a heat map: what its bins hold, and how a round is chosen from it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect
from starlette.testclient import TestClient

from benchmarks.page.recipe import Recipe, Teller, fill
from tests.support.browsing import Open, axe, overflow
from tests.support.serving import Shown
from tests.web.test_api import get
from thinwire.store import Store, WorkRow
from thinwire.web.client_queries import HEAT_ROWS, OUTCOMES, heat_map


def test_a_bin_of_a_heat_map_has_its_worst_outcome_and_its_longest_time():
    names = [f"pi-{number:03d}" for number in range(HEAT_ROWS + 1)]
    work = [WorkRow(3, name, "aggregated", 0.0, 1.0, 1, None) for name in names]
    work[1] = WorkRow(3, names[1], "failed", 0.0, None, 1, None)
    work.append(WorkRow(4, names[0], "aggregated-late", 10.0, 16.0, 1, None))
    found = heat_map([3, 4], {3: 2.0, 4: 4.0}, work)
    assert (found.clients, len(found.rows)) == (HEAT_ROWS + 1, HEAT_ROWS // 2 + 1)
    first, last = found.rows[0], found.rows[-1]
    assert (first.label, first.clients, first.shares) == ("pi-000 to pi-001", 2, [0.5, 1.5])
    assert [OUTCOMES[int(digit)] for digit in first.outcomes] == ["failed", "aggregated-late"]
    assert (last.label, last.outcomes[1], last.shares) == (names[-1], ".", [0.5, None])


@pytest.fixture
def wide(store: Store) -> Teller:
    return fill(store, Recipe("wide", 3, 210, 210))


def test_a_heat_map_has_the_newest_rounds_that_are_asked_for(page: TestClient, wide: Teller):
    assert get(page, f"runs/{wide.run_id}/heat")["rounds"] == [1, 2, 3, 4]
    found = get(page, f"runs/{wide.run_id}/heat?from=2&to=3")
    assert found["rounds"] == [2, 3]
    assert {len(row["outcomes"]) for row in found["rows"]} == {2}
    assert sum(row["clients"] for row in found["rows"]) == found["clients"] == 210


def test_more_than_200_clients_are_a_heat_map_from_which_a_round_is_chosen(wide: Teller, served: Shown, look: Open):
    page = look(served.url, f"runs/{wide.run_id}", viewport={"width": 1000, "height": 1000})
    picture = page.get_by_role("img", name="Heat map of rounds 1 to 4 by 210 clients")
    expect(picture).to_be_visible()
    expect(page.locator("#rounds")).to_contain_text("40 are drawn")
    expect(page.get_by_role("button", name="All 210 clients")).to_have_count(0)
    picture.hover(position={"x": 5, "y": 1})
    expect(page.locator(".heat .reading")).to_contain_text("Round 1, pi-0001 to pi-0002: at worst")
    picture.click(position={"x": 5, "y": 1})
    expect(page.get_by_role("heading", name="Round 1", exact=True)).to_be_visible()
    page.get_by_role("radio", name="time").check(force=True)
    assert "heat=time" in page.url
    expect(page.get_by_label("Colours of the heat map")).to_contain_text("after the round")
    assert axe(page) == []
    page.set_viewport_size({"width": 400, "height": 900})
    assert overflow(page) <= 0


def test_a_map_that_has_fewer_rows_when_it_is_read_again_keeps_the_page(wide: Teller, served: Shown, look: Open):
    page, most = look(served.url), HEAT_ROWS

    def cut(route: Route) -> None:
        """Of more clients a row has more, so that there are fewer rows."""
        answer = route.fetch()
        found = answer.json()
        route.fulfill(response=answer, json={**found, "rows": found["rows"][:most]})

    page.route(re.compile(r"/heat\?"), cut)
    page.goto(f"{served.url}/runs/{wide.run_id}")
    picture = page.get_by_role("img", name="Heat map of rounds 1 to 4 by 210 clients")
    picture.hover(position={"x": 5, "y": 210})
    reading = page.locator(".heat .reading")
    expect(reading).to_contain_text("Round 1, pi-01")
    most = 1
    wide.close()
    expect(reading).not_to_contain_text("pi-01")
    expect(page.locator("#rounds .closing")).to_contain_text("Closed because")


def test_a_map_that_cannot_be_read_says_so_in_its_place(wide: Teller, served: Shown, look: Open):
    page = look(served.url)
    page.route(re.compile(r"/heat\?"), lambda route: route.abort("connectionfailed"))
    page.goto(f"{served.url}/runs/{wide.run_id}")
    expect(page.locator("#rounds").get_by_role("alert")).to_contain_text("is not reachable")
    expect(page.locator("#rounds .gantt")).to_be_visible()
