"""What a person does with a run that is over: tags, archive, more rounds, deletion; by the API and on its page."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect
from starlette.testclient import TestClient

from tests.support.api_answers import Told
from tests.support.browsing import axe
from thinwire.core.events import RunStatusChanged
from thinwire.core.run_events import RunExtended

HERE = {"Origin": "http://127.0.0.1:8080"}


def post(page: TestClient, path: str, body: Any = None) -> Any:
    return page.post(f"/api/v1/{path}", headers=HERE, json=body)


def test_tags_are_set_and_invalid_ones_are_refused(page: TestClient, told: Told):
    answer = post(page, "runs/latest/tags", {"add": ["paper", "best"], "remove": ["old"]})
    assert answer.json() == {"run_id": told.run_id, "tags": ["best", "paper"], "archived": False}
    assert page.get("/api/v1/runs").json()[0]["tags"] == ["best", "paper"]
    many = [str(number) for number in range(17)]
    bodies: list[dict[str, list[str]]] = [{"add": ["Paper"]}, {"add": many}, {"tags": []}]
    for wrong in bodies:
        assert post(page, "runs/latest/tags", wrong).status_code == 422, wrong


def test_an_archived_run_leaves_the_list_and_can_be_read(page: TestClient, told: Told):
    assert post(page, f"runs/{told.run_id}/archive").json()["archived"] is True
    assert page.get("/api/v1/runs").json() == []
    assert page.get(f"/api/v1/runs/{told.run_id}").json()["archived_at"] > 0
    assert post(page, f"runs/{told.run_id}/unarchive").json()["archived"] is False
    assert len(page.get("/api/v1/runs").json()) == 1


def test_more_rounds_are_a_command_whose_result_can_be_read(page: TestClient, told: Told):
    answer = post(page, f"runs/{told.run_id}/extend", {"rounds": 5, "sets": {"local.lr": "0.1"}})
    assert answer.status_code == 202
    (command,) = told.store.commands.pending()
    assert (command.kind, command.args, command.who) == (
        "extend-run", {"rounds": 5, "sets": {"local.lr": "0.1"}}, "machine",
    )  # fmt: skip
    number = answer.json()["command"]
    assert page.get(f"/api/v1/commands/{number}").json()["done"] is None
    told.store.commands.answer(number, {"done": False, "error": "no", "why": "its budget is spent", "try": "another"})
    said = page.get(f"/api/v1/commands/{number}").json()
    assert (said["done"], said["detail"], said["why"], said["try"]) == (False, "no", "its budget is spent", "another")
    for wrong in ({"rounds": 0}, {"rounds": 1, "sets": {"lr": "1"}}, {}):
        assert post(page, f"runs/{told.run_id}/extend", wrong).status_code == 422, wrong


def test_what_to_try_after_a_refusal_names_the_state_directory(visit: Any, told: Told, tmp_path: Path):
    page = visit(lock=tmp_path / "aggregator" / "lock")
    page.post("/login", data={"code": told.store.logins.new_code()})
    number = told.store.commands.add("extend-run", told.run_id, {"rounds": 1, "sets": {}})
    told.store.commands.answer(number, {"done": False, "error": "no", "try": "thinwire privacy ledger"})
    hint = page.get(f"/api/v1/commands/{number}").json()["try"]
    assert hint == f"thinwire privacy ledger --home {tmp_path}"


def test_a_deletion_repeats_the_id_and_is_for_runs_that_are_over(page: TestClient, told: Told):
    refused = post(page, f"runs/{told.run_id}/delete", {"run_id": "digits-9"})
    assert (refused.status_code, refused.json()["why"]) == (409, "the body repeats 'digits-9'")
    answer = post(page, f"runs/{told.run_id}/delete", {"run_id": told.run_id})
    assert answer.status_code == 202
    assert post(page, f"runs/{told.run_id}/delete", {"run_id": told.run_id}).json() == answer.json(), "one command"
    (command,) = told.store.commands.pending()
    assert (command.kind, command.run_id) == ("delete-run", told.run_id)
    told.store.record(told.run_id, [RunStatusChanged(1.0, "running", "round 1")])
    assert post(page, f"runs/{told.run_id}/delete", {"run_id": told.run_id}).json()["why"] == "it is running"


def test_a_deleted_run_is_not_found(page: TestClient, told: Told):
    told.store.mark_deleted(told.run_id, "ann")
    said = page.get(f"/api/v1/runs/{told.run_id}").json()
    assert (said["status"], said["detail"]) == (404, f"{told.run_id} was deleted")
    assert said["why"].startswith("deleted by ann on ")


def test_a_run_is_stopped_after_its_round_by_the_verb(page: TestClient, told: Told):
    told.store.record(told.run_id, [RunStatusChanged(1.0, "running", "round 1")])
    assert post(page, f"runs/{told.run_id}/stop-after-round").status_code == 202
    assert [command.kind for command in told.store.commands.pending()] == ["stop-after-round"]


def test_the_menu_of_the_page_wants_the_name_before_it_deletes(told: Told, served: Any, look: Any):
    page = look(served.url, f"runs/{told.run_id}")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Delete…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Delete")).to_be_disabled()
    dialog.get_by_label("Repeat its name").fill(told.run_id)
    with page.expect_response(re.compile(r"/commands/\d+$")):
        dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("sent to the aggregator")).to_be_visible()
    (command,) = told.store.commands.pending()
    assert (command.kind, command.run_id) == ("delete-run", told.run_id)
    told.store.mark_deleted(told.run_id, "ann")
    page.wait_for_timeout(1000)  # a page that read the run again would get an error, which its console tells
    told.store.commands.answer(command.id, {"done": True})
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()


def test_the_menu_of_the_page_sets_tags_and_archives(told: Told, served: Any, look: Any):
    page = look(served.url, f"runs/{told.run_id}")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Tags…").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("paper best")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_text("tags: paper best")).to_be_visible()
    assert told.store.run(told.run_id).tags == ["best", "paper"]
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Archive").click()
    expect(page.get_by_role("status").filter(has_text="archived")).to_be_visible()
    assert told.store.run(told.run_id).archived_at


def test_the_dialog_of_more_rounds_takes_keys_to_change_as_the_command_does(told: Told, served: Any, look: Any):
    page = look(served.url, f"runs/{told.run_id}")
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name="Add rounds…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("More rounds").fill("5")
    dialog.get_by_label("Keys to change").fill('local.lr = 0.05\n\nrun.target={ metric = "loss", value = 1 }\n')
    assert axe(page) == []
    with page.expect_response(re.compile(r"/commands/\d+$")):
        dialog.get_by_role("button", name="Add rounds").click()
    (command,) = told.store.commands.pending()
    sets = {"local.lr": "0.05", "run.target": '{ metric = "loss", value = 1 }'}
    assert (command.kind, command.args) == ("extend-run", {"rounds": 5, "sets": sets})


def test_the_head_of_a_run_tells_its_name_its_tags_and_the_archive_as_they_change(told: Told, served: Any, look: Any):
    page = look(served.url, f"runs/{told.run_id}")
    head = page.locator(".head")
    told.store.tag_run(told.run_id, ["paper"], (), "ann")
    expect(head.locator(".tag")).to_have_text("paper")
    told.store.archive_run(told.run_id, True, "ann")
    expect(head.locator(".tag")).to_have_text(["paper", "archived"])
    page.get_by_text("More", exact=True).click()
    expect(page.get_by_role("button", name="Take out of the archive")).to_be_visible()
    page.get_by_role("button", name="Tags…").click()
    expect(page.get_by_role("dialog").get_by_role("textbox")).to_have_value("paper")


def test_an_open_page_gets_the_plan_of_more_rounds(told: Told, served: Any, look: Any):
    page = look(served.url, f"runs/{told.run_id}")
    expect(page.locator("#plan")).to_contain_text("rounds12")
    row, now = told.store.run(told.run_id), time.time()
    plan = {**row.plan, "run": {**row.plan["run"], "rounds": 40}}
    told.store.record(
        told.run_id, [RunExtended(now, 40, 12, row.version, 13, plan), RunStatusChanged(now, "queued", "")]
    )
    expect(page.locator("#plan")).to_contain_text("rounds40")
    expect(page.get_by_role("progressbar", name="Rounds made")).to_have_attribute("aria-valuemax", "40")


def test_a_command_that_did_not_get_through_can_be_sent_again(told: Told, served: Any, look: Any):
    told.store.record(told.run_id, [RunStatusChanged(1.0, "running", "round 1")])
    page, cut = look(served.url, f"runs/{told.run_id}"), 0

    def away(route: Any) -> None:
        nonlocal cut
        cut += 1
        route.abort("connectionfailed") if cut == 1 else route.fallback()

    page.route(re.compile(r"/runs/[^/]+/stop$"), away)
    for _ in range(2):
        page.get_by_role("button", name="Stop", exact=True).click()
        expect(page.get_by_role("button", name="Keep")).to_be_focused()
        page.get_by_role("button", name="Stop", exact=True).click()
        if cut == 1:
            expect(page.get_by_role("alert").filter(has_text="is not reachable")).to_contain_text("Try: once more")
    expect(page.get_by_text("command to stop sent")).to_be_visible()
    assert [command.kind for command in told.store.commands.pending()] == ["stop-run"]
