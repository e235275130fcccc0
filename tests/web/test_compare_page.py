"""Runs side by side: the same numbers on the page, in the API and on the command line."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from tests.support.browsing import Open, axe_in_both, overflow
from tests.support.filled_store import finish, new_run
from tests.support.serving import Shown
from tests.web.test_run_list import some
from thinwire.cli.main import main
from thinwire.core.formatting import size
from thinwire.core.statedir import AggregatorHome
from thinwire.store import Store


def two(store: Store) -> tuple[str, str]:
    """Two done runs with other codecs."""
    made = []
    for codec, rounds in (("fp16", 3), ("int8", 5)):
        run = new_run(store, rounds=rounds, more=f'[uplink]\ncodec = "{codec}"\n')
        for _ in range(rounds):
            run.quiet_round()
        finish(run)
        made.append(run.run_id)
    return made[0], made[1]


def test_the_api_and_the_command_line_tell_the_same(
    visit: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    home = AggregatorHome.under(tmp_path)
    with Store.open(home.database) as store:
        ids = some(store)[:3]
    main(["runs", "compare", *ids, "--json", "--home", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    with Store.open(home.database) as store:
        client = of_store(store)
        told = client.get(f"/api/v1/compare?runs={','.join(ids)}").json()
        rows = {row["run"]: row for row in (*told["rows"], *told["apart"])}
        assert [row["run"] for row in told["apart"]] == [ids[1]]
        for run_id in ids:
            shown = store.run(run_id)
            assert (rows[run_id]["payload_up"], rows[run_id]["wire_down"]) == (shown.payload_up, shown.wire_down)
    assert printed.pop("group") is None
    told.pop("curves")
    assert told == printed


def test_what_both_say_of_a_run_has_the_same_value_in_the_api_and_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = AggregatorHome.under(tmp_path)
    with Store.open(home.database) as store:
        ids = some(store)

    def printed(*words: str) -> Any:
        main(["runs", *words, "--json", "--home", str(tmp_path)])
        return json.loads(capsys.readouterr().out)

    pairs = [(printed("show", run_id), f"runs/{run_id}") for run_id in ids]
    listed = {row["run_id"]: row for row in printed("list")}
    with Store.open(home.database) as store:
        client = of_store(store)
        rows = [(shown, client.get(f"/api/v1/{path}").json()) for shown, path in pairs]
        rows += [(listed[row["run_id"]], row) for row in client.get("/api/v1/runs").json()]
    for shown, told in rows:
        both = shown.keys() & told.keys()
        assert {"metrics", "payload_up", "wire_up", "rounds_closed", "status_text", "failed"} <= both
        assert {key: shown[key] for key in both} == {key: told[key] for key in both}


def test_a_run_is_as_far_and_has_sent_as_much_on_each_page_and_the_command_line(
    told: Told, store: Store, served: Shown, look: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve rounds closed, of which one made no step."""
    row = store.run(told.run_id)
    assert (row.rounds_total, row.rounds_closed, row.version) == (12, 12, 11)
    home = AggregatorHome.under(tmp_path / "home")
    shutil.copy(store.url.removeprefix("sqlite:///"), home.database)
    main(["runs", "list", "--home", str(home.root.parent)])
    assert {"11/12", size(row.payload_up).replace(" ", "")} <= {*capsys.readouterr().out.replace(" kB", "kB").split()}
    made, page = re.compile(r"^11 / 12\s*1 without a step$"), look(served.url)
    for address in ("", f"compare?runs={row.run_id}"):
        page.goto(f"{served.url}/{address}")
        line = page.get_by_role("row").filter(has=page.get_by_role("link", name=row.run_id))
        expect(line.locator("td[data-label=Rounds]")).to_have_text(made)
        expect(line.locator("td[data-label='Payload up']")).to_have_text(size(row.payload_up))
    page.goto(f"{served.url}/runs/{row.run_id}")
    expect(page.locator(".figures div").filter(has_text="rounds").locator("dd")).to_have_text(made)
    expect(page.locator("#bytes .way").first.locator(".value").nth(1)).to_have_text(size(row.payload_up))
    expect(page.locator(".sentence")).to_contain_text("Done: 11 rounds")


def of_store(store: Store) -> TestClient:
    from thinwire.web.app import create_app
    from thinwire.web.settings import Settings

    client = TestClient(create_app(Settings(store.url, port=8080), store), base_url="http://127.0.0.1:8080")
    client.post("/login", data={"code": store.logins.new_code()})
    return client


def test_a_target_tells_when_each_run_reached_it(page: TestClient, store: Store):
    one, other = two(store)
    found = page.get(f"/api/v1/compare?runs={one},{other}&metric=accuracy&target=0.5").json()
    rounds = {row["run"]: row["rounds_to"] for row in found["rows"]}
    assert rounds[one] == rounds[other]
    assert rounds[one] is not None
    assert found["differs"]["uplink.codec"] == {one: "fp16", other: "int8"}
    assert [len(curve["points"]) for curve in found["curves"]] == [4, 6], "with the first model"
    for curve in found["curves"]:
        for axis in ("round", "seconds", "bytes"):
            values = [point[axis] for point in curve["points"]]
            assert values == sorted({*values}), f"{axis} rises"
    lines = csv.DictReader(page.get(f"/api/v1/compare.csv?runs={one},{other}&metric=accuracy").text.splitlines())
    told = [(line["run"], float(line["value"]), int(float(line["payload_up"]))) for line in lines]
    assert told == [(row["run"], row["value"], row["payload_up"]) for row in found["rows"]]


@pytest.mark.parametrize(
    ("runs", "status"), [("nothing-1", 404), (",".join(f"r-{n}" for n in range(9)), 422), ("", 422)]
)
def test_what_cannot_be_compared_is_refused(page: TestClient, runs: str, status: int):
    answer = page.get(f"/api/v1/compare?runs={runs}")
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_the_page_shows_curves_figures_and_what_differs(store: Store, served: Shown, look: Open):
    one, other = two(store)
    page = look(served.url, "compare")
    page.goto(f"{served.url}/compare?runs={one},{other}")
    expect(page.locator(".readings")).to_contain_text(one)
    page.get_by_label("Metric").select_option("accuracy")
    expect(page.locator("#figures thead")).to_contain_text("accuracy")
    page.get_by_role("radio", name="seconds").check(force=True)
    expect(page.get_by_role("img", name="accuracy of 2 runs over seconds")).to_be_visible()
    page.get_by_role("radio", name="bytes").check(force=True)
    page.get_by_role("button", name="Zoom in").click()
    expect(page.locator(".zoom [role=status]")).to_contain_text(" to ")
    page.get_by_role("button", name="Later").click()
    page.get_by_role("button", name="All").click()
    page.locator("#curves").get_by_role("button", name="Table").click()
    expect(page.get_by_role("region", name="accuracy of each run by round").get_by_role("row")).to_have_count(7)
    page.reload()
    expect(page.get_by_role("radio", name="bytes")).to_be_checked()
    expect(page.get_by_label("Metric")).to_have_value("accuracy")
    expect(page.locator("#differs")).to_contain_text("uplink.codec")
    page.get_by_role("button", name=f"Leave {other} out").click()
    expect(page.locator(".compared li")).to_have_count(1)
    expect(page.locator("#differs")).to_contain_text("their plans are equal")


def test_a_part_of_the_curves_is_chosen_by_dragging(store: Store, served: Shown, look: Open):
    one, other = two(store)
    page = look(served.url, "compare")
    page.goto(f"{served.url}/compare?runs={one},{other}")
    box = page.locator(".run-chart .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60, steps=5)
    page.mouse.up()
    expect(page.locator(".zoom [role=status]")).to_contain_text("2 to 4")


def test_stopped_runs_stand_apart_and_all_can_use_the_page(store: Store, served: Shown, look: Open):
    done, stopped, running, _ = some(store)
    page = look(served.url, "compare")
    page.goto(f"{served.url}/compare?runs={done},{stopped},{running}&log=1")
    expect(page.get_by_role("region", name="Figures of the stopped and failed runs")).to_contain_text(stopped)
    expect(page.get_by_role("region", name="Figures of the runs")).not_to_contain_text(stopped)
    assert axe_in_both(page) == []
    for width in (400, 1000, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
    page.goto(f"{served.url}/compare")
    expect(page.get_by_role("heading", name="Nothing to compare")).to_be_visible()
    assert axe_in_both(page) == []
