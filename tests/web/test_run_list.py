"""The table of runs: searched, filtered, sorted, paged, with its state in the address."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import event, insert
from starlette.testclient import TestClient

from tests.support.api_answers import LAYOUT
from tests.support.browsing import Open, axe, axe_in_both, overflow
from tests.support.filled_store import finish, new_run
from tests.support.serving import Shown, serving
from thinwire.core.events import RunStatusChanged
from thinwire.core.plan import RunPlan
from thinwire.store import Store
from thinwire.store.tables import Run


def listed(page: TestClient, query: str = "") -> Any:
    answer = page.get(f"/api/v1/run-list?{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def some(store: Store) -> list[str]:
    """A done, a stopped, a running and a queued run; the newest last."""
    done, stopped, running, queued = (
        new_run(store, rounds=n) if n else new_run(store, source="sim") for n in (3, 5, 4, 0)
    )
    for run, count in ((done, 3), (stopped, 2), (running, 1)):
        for _ in range(count):
            run.quiet_round()
    finish(done)
    stopped.status("stopped", "stopped by a person after 2 rounds", 10)
    return [one.run_id for one in (done, stopped, running, queued)]


def test_a_page_of_runs_has_their_figures_and_counts_by_status(page: TestClient, store: Store):
    done, stopped, running, queued = some(store)
    found = listed(page)
    assert [run["run_id"] for run in found["runs"]] == [queued, running, stopped, done]
    assert (found["total"], found["statuses"]) == (4, {"done": 1, "stopped": 1, "running": 1, "queued": 1})
    line, row = found["runs"][3], store.run(done)
    assert (line["metric"], line["best"], line["disk_bytes"]) == ("loss", row.best_value, None)
    assert line["payload_up"] + line["payload_down"] == row.payload_up + row.payload_down
    assert line["seconds"] == pytest.approx((row.finished_at or 0) - (row.started_at or 0))
    assert line["sentence"].startswith("Done: ")


@pytest.mark.parametrize(
    ("query", "places"),
    [
        ("q=digits-2", [1]),
        ("q=DIGITS stopped", [1]),
        ("q=100%25", []),
        ("q=_", []),
        ("status=done&status=queued", [3, 0]),
        ("sort=rounds", [0, 1, 2, 3]),
        ("sort=rounds&descending=false", [3, 2, 1, 0]),
        ("sort=run_id&descending=false", [0, 1, 2, 3]),
        ("sort=payload_up&count=2&first=1", [1, 2]),
        ("sort=best&descending=false", [0, 1, 2, 3]),
        ("sort=seconds&descending=false&count=2&status=done&status=running", [0, 2]),
    ],
)
def test_runs_are_searched_filtered_sorted_and_paged(page: TestClient, store: Store, query: str, places: list[int]):
    ids = some(store)
    assert [run["run_id"] for run in listed(page, query)["runs"]] == [ids[place] for place in places]


@pytest.mark.parametrize("query", ["sort=layout", "count=0", "count=201", "first=-1", f"q={'x' * 101}"])
def test_what_no_list_has_is_refused(page: TestClient, query: str):
    assert page.get(f"/api/v1/run-list?{query}").status_code == 422


def test_the_csv_has_all_that_match(page: TestClient, store: Store):
    some(store)
    text = page.get("/api/v1/run-list.csv?status=done").text.splitlines()
    assert text[0].startswith("run_id,name,tags,status,sentence,task")
    assert [line.split(",")[0] for line in text[1:]] == ["digits-1"]


def test_the_disk_of_a_run_is_counted_and_sorted_by(visit: Any, store: Store, tmp_path: Path):
    ids = some(store)
    lock = tmp_path / "aggregator" / "lock"
    for size, run_id in enumerate(ids[:3]):
        folder = lock.parent / "runs" / run_id / "deep"
        folder.mkdir(parents=True)
        (folder / "v.model").write_bytes(b"x" * (100 * (size + 1)))
    lock.touch()
    client = visit(lock=lock)
    client.post("/login", data={"code": store.logins.new_code()})
    found = listed(client, "sort=disk")["runs"]
    assert [(run["run_id"], run["disk_bytes"]) for run in found] == [
        (ids[2], 300),
        (ids[1], 200),
        (ids[0], 100),
        (ids[3], 0),
    ]


def test_a_page_of_five_thousand_runs_reads_only_its_own(page: TestClient, store: Store):
    new_run(store)
    plan = RunPlan.parse('[run]\ntask = "digits"\n[local]\nlr = 0.5').to_json()
    row = {
        "task": "many", "source": "devices", "status": "done", "plan": plan, "layout": LAYOUT.to_json(), "size": 1,
        "task_report": {"name": "many", "codecs": []}, "created_at": 1.0, "rounds_total": 9,
    }  # fmt: skip
    with store._database.writing() as connection:
        connection.execute(insert(Run), [{**row, "run_id": f"many-{n}", "task_number": n} for n in range(5000)])
    reads = list[int]()

    def counted(*given: Any) -> None:
        reads.append(1)

    event.listen(store._database.engine, "before_cursor_execute", counted)
    listed(page)  # warm
    reads.clear()
    began = time.perf_counter()
    found = listed(page, "first=4000&sort=task&descending=false")
    took = time.perf_counter() - began
    assert (found["total"], len(found["runs"])) == (5001, 50)
    assert len(reads) < 12
    assert took < 1.0, "loading every run takes longer than this"


def rows(page: Page) -> Any:
    return page.locator(".runs-table tbody th a")


def test_a_person_finds_sorts_and_filters_runs_and_the_address_keeps_it(store: Store, served: Shown, look: Open):
    done, stopped, running, queued = some(store)
    page = look(served.url)
    expect(rows(page)).to_have_text([queued, running, stopped, done])
    page.get_by_role("button", name="Rounds").click()
    expect(rows(page)).to_have_text([done, stopped, running, queued])
    expect(page.get_by_role("columnheader", name="Rounds")).to_have_attribute("aria-sort", "descending")
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_text([queued, running, stopped, done])
    page.get_by_role("checkbox", name="stopped").check(force=True)
    expect(rows(page)).to_have_text([stopped])
    page.reload()
    expect(rows(page)).to_have_text([stopped])
    assert {"sort=rounds", "up=1", "status=stopped"} <= set(page.url.partition("?")[2].split("&"))
    page.get_by_role("checkbox", name="stopped").uncheck(force=True)
    page.get_by_role("searchbox").fill("nothing like it")
    expect(page.get_by_text("no run matches", exact=True).first).to_be_visible()
    page.get_by_role("searchbox").fill("digits-3")
    expect(rows(page)).to_have_text([running])


def test_picked_runs_go_to_the_comparison(store: Store, served: Shown, look: Open):
    done, stopped, *_ = some(store)
    page = look(served.url)
    expect(page.get_by_role("button", name="Compare", exact=True)).to_be_disabled()
    page.get_by_role("checkbox", name=f"Compare {stopped}").check()
    expect(page.get_by_role("button", name="Pick one more")).to_be_disabled()
    page.get_by_role("checkbox", name=f"Compare {done}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.locator("h1")).to_have_text("Compare")
    expect(page.locator(".compared li a")).to_have_text([stopped, done])


def test_the_table_is_usable_by_all_at_every_width_and_does_not_move(store: Store, served: Shown, look: Open):
    ids = some(store)
    page = look(served.url)
    expect(rows(page)).to_have_count(4)
    assert axe_in_both(page) == []
    for width in (400, 760, 1300, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
    table = page.locator(".runs-table")
    before = table.bounding_box()
    page.get_by_role("checkbox", name=f"Compare {ids[0]}").check()
    expect(page.get_by_role("button", name="Pick one more")).to_be_visible()
    store.record(ids[2], [RunStatusChanged(1.0, "done", "4 rounds")])
    expect(page.get_by_role("row", name=re.compile(ids[2]))).to_contain_text("done")
    after = table.bounding_box()
    assert before is not None
    assert after is not None
    assert (before["x"], before["y"]) == (after["x"], after["y"])
    page.set_viewport_size({"width": 400, "height": 900})
    assert axe_in_both(page) == []


def test_the_next_page_is_reached_by_a_button(store: Store, tmp_path: Path, look: Open):
    for _ in range(52):
        new_run(store)
    with serving(store.url, "127.0.0.1:0") as served:
        page = look(served.url)
        expect(rows(page)).to_have_count(50)
        page.get_by_role("button", name="Next").click()
        expect(rows(page)).to_have_text(["digits-2", "digits-1"])
        assert "page=2" in page.url


def test_deleted_runs_are_in_no_list_and_archived_ones_in_that_of_the_archive(page: TestClient, store: Store):
    done, stopped, *going = some(store)
    store.tag_run(done, ["paper"])
    store.archive_run(stopped, True)
    assert {run["run_id"] for run in listed(page)["runs"]} == {done, *going}
    assert listed(page)["statuses"] == {"done": 1, "running": 1, "queued": 1}
    (hidden,) = listed(page, "archived=true")["runs"]
    assert hidden["run_id"] == stopped
    (tagged,) = listed(page, "q=paper")["runs"]
    assert (tagged["run_id"], tagged["tags"]) == (done, ["paper"])
    store.mark_deleted(done, "ann")
    assert {run["run_id"] for run in listed(page)["runs"]} == set(going)


def test_the_archive_is_a_click_away_and_tags_stand_beside_their_run(store: Store, look: Open):
    done, stopped, *_ = some(store)
    store.tag_run(done, ["paper"])
    store.archive_run(stopped, True)
    with serving(store.url) as shown:
        runs = look(shown.url)
        expect(runs.get_by_role("row", name=done)).to_contain_text("paper")
        expect(runs.get_by_role("row", name=stopped)).to_have_count(0)
        runs.get_by_label("archive").check()
        expect(runs.get_by_role("row", name=stopped)).to_have_count(1)
        assert axe(runs) == []
        runs.set_viewport_size({"width": 420, "height": 900})
        assert overflow(runs) == 0
