"""A new run in the dashboard: its plan is checked as one types, its cost is told, and the aggregator gets a command."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from starlette.testclient import TestClient

from tests.core.test_plan_names import NAMED, OTHERS
from tests.support.api_answers import DEVICES, LAYOUT, REPORT
from tests.support.browsing import Open, axe_in_both, overflow
from tests.support.filled_store import add_devices, finish, new_run, twelve_rounds
from tests.support.reasons import noted
from tests.support.serving import Shown, serving
from tests.web.test_roles import Visitors
from thinwire.core.events import RunNoted, RunStatusChanged
from thinwire.core.fleet import Hello
from thinwire.core.plan import RunPlan
from thinwire.core.run_events import RunExtended
from thinwire.core.statedir import hold
from thinwire.store import ROLES, CommandRow, MeasureRow, Store
from thinwire.store.device_profiles import work_key
from thinwire.store.work_queue import MAX_WAITING_RUNS
from thinwire.web.access import LEAST

HERE = {"Origin": "http://127.0.0.1:8080"}
PLAN: dict[str, dict[str, Any]] = {"run": {"task": "digits", "rounds": 3}, "local": {"lr": 0.5, "steps": 50}}
TEXT = '[run]\ntask = "digits"\nrounds = 3\n\n[local]\nlr = 0.5\nsteps = 50\n'


def checked(page: TestClient, **given: Any) -> Any:
    answer = page.post("/api/v1/plans/check", json=given, headers=HERE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def with_key(place: str, value: Any) -> dict[str, Any]:
    section, key = place.split(".")
    return {**PLAN, section: {**PLAN.get(section, {}), key: value}}


def measured(store: Store, seconds: float) -> None:
    """Each device has a link of 1 MB/s, and makes a step in so many seconds."""
    key = work_key(RunPlan.from_json(PLAN), LAYOUT)
    rows = []
    for name in DEVICES:
        rows += [MeasureRow(name, kind, "", [[1e6, 1.0]], 8e6, 8e6, 1.0) for kind in ("down", "up")]
        rows.append(MeasureRow(name, "step", key, [[1.0, seconds]], seconds, seconds, 1.0))
    run = new_run(store)
    store.record(run.run_id, [RunNoted(9.0, noted(""))], rows)


def test_a_plan_as_text_and_as_values_is_the_same(page: TestClient):
    by_text, by_values = checked(page, text=TEXT), checked(page, plan=PLAN)
    assert by_text["ok"]
    assert by_text["given"] == by_values["given"] == PLAN
    assert by_values["toml"] == TEXT
    assert by_text["digest"] == by_values["digest"] == RunPlan.parse(TEXT).digest
    whole = RunPlan.parse(TEXT).to_json()
    assert checked(page, plan=whole)["given"] == PLAN, "only what differs from a default"


@pytest.mark.parametrize(
    ("plan", "place", "what"),
    [
        (with_key("run.rounds", "ten"), ["run", "rounds"], "[run] rounds = 'ten' is not valid"),
        ({"run": {"task": "digits"}}, ["local"], "[local] is missing"),
        (with_key("uplink.codecc", "fp16"), ["uplink", "codecc"], "unknown key [uplink] codecc"),
        (with_key("local.epochs", 2), ["local", "steps"], "[local] steps and epochs are both given"),
        (with_key("uplink.codec", "tpok(0.1)"), ["uplink", "codec"], "[uplink] codec = 'tpok(0.1)': no codec 'tpok'"),
        (with_key("run.target", {"metric": "loss"}), ["run", "target", "value"], "[run] target.value is missing"),
        ({**PLAN, "secure": {"enabled": True}, "cohort": {"clients": 2}}, ["secure"], "clients"),
    ],
)
def test_what_is_wrong_stands_at_its_key(page: TestClient, plan: Any, place: list[str], what: str):
    found = checked(page, plan=plan)
    assert not found["ok"]
    assert found["cost"] is None
    one = next(one for one in found["problems"] if what in one["what"])
    assert one["place"][: len(place)] == place or not one["place"]
    assert one["why"]
    assert one["hint"]


@pytest.mark.parametrize("text", ["[run", "task = ", "x" * 50_000])
def test_text_that_is_no_toml_is_told_as_one_problem_of_the_whole(page: TestClient, text: str):
    found = checked(page, text=text)
    assert [one["place"] for one in found["problems"]] == [[]]
    assert found["toml"] == text


def test_a_check_has_no_side_effects(page: TestClient, store: Store):
    twelve_rounds(store)
    before = store.changes(), store.audit.last(), len(store.runs())
    assert checked(page, text=TEXT)["ok"]
    assert (store.changes(), store.audit.last(), len(store.runs())) == before
    assert store.commands.pending() == []


def test_the_cost_follows_from_the_layout_and_the_measured_links(page: TestClient, store: Store):
    cost = checked(page, plan=PLAN)["cost"]
    assert (cost["up_bytes"], cost["round_s"]) == (None, None)
    assert "no device has reported the task digits" in cost["unknown"]
    add_devices(store, DEVICES, 1.0)
    new_run(store)
    other = checked(page, plan={**PLAN, "run": {**PLAN["run"], "task": "other"}})["cost"]
    assert other["up_bytes"] is None
    cost = checked(page, plan=PLAN)["cost"]
    assert cost["parameters"] == LAYOUT.size
    assert cost["up_bytes"] == pytest.approx(LAYOUT.size / 8, rel=0.06), "eden(1): a bit each, with header and scales"
    assert cost["down_bytes"] == cost["dense_bytes"] == 4 * LAYOUT.size
    assert (cost["round_s"], cost["run_s"], cost["measured"]) == (None, None, 0)
    assert cost["unknown"].startswith("never measured with this model: pi-01, pi-02, pi-03 and 5 more")


def test_a_number_of_clients_is_told_only_if_the_plan_or_devices_decide_it(page: TestClient, store: Store):
    new_run(store)  # by which the layout is known; no device has the task
    cost = checked(page, plan=PLAN)["cost"]
    assert (cost["clients"], cost["up_bytes"] > 0) == (0, True)
    assert checked(page, plan={**PLAN, "cohort": {"clients": 3}})["cost"]["clients"] == 3


def test_seconds_are_those_of_the_slowest_measured_device(page: TestClient, store: Store):
    add_devices(store, DEVICES, 1.0)
    measured(store, 0.1)
    cost = checked(page, plan=PLAN)["cost"]
    one = cost["devices"][0]
    assert one["train_s"] == pytest.approx(5.0)
    assert one["down_s"] == pytest.approx(4 * LAYOUT.size / 1e6, rel=0.6)
    assert cost["round_s"] == pytest.approx(one["round_s"])
    assert cost["run_s"] == pytest.approx(3 * cost["round_s"])
    assert cost["unknown"] == ""


def test_what_would_keep_a_run_waiting_is_told(page: TestClient, store: Store):
    add_devices(store, DEVICES[:2], 1.0)
    new_run(store)
    notes = checked(page, plan={**PLAN, "cohort": {"clients": 5}})["notes"]
    assert notes == ["The plan wants 5 devices, and 2 have the task: the run would wait for more."]
    store.roster.seen(Hello("pi-01", "p", (replace(REPORT, tensors=LAYOUT.text),)), 2.0)
    assert checked(page, plan=PLAN)["cost"]["layout_from"] in ("of the run digits-1", "reported by 1 device")


def test_so_many_runs_wait_and_no_further_one_is_accepted(page: TestClient, store: Store):
    for _ in range(MAX_WAITING_RUNS):
        assert page.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE).status_code == 202
    refused = page.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE)
    assert refused.status_code == 409
    assert refused.json()["detail"] == f"{MAX_WAITING_RUNS} runs wait in the queue"
    assert refused.json()["why"]
    assert refused.json()["try"]
    store.commands.answer(store.commands.pending()[0].id, {"done": False, "error": "no"})
    assert page.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE).status_code == 202
    store.commands.answer(store.commands.pending()[0].id, {"done": True, "run_id": "digits-1"})
    run = new_run(store)
    run.status("queued", "in the queue")
    assert page.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE).status_code == 409


def test_a_command_to_start_is_a_row_with_the_plan_and_what_it_was_expected_to_cost(page: TestClient, store: Store):
    answer = page.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE)
    assert answer.status_code == 202
    [command] = store.commands.pending()
    assert (command.kind, command.id) == ("start-run", answer.json()["command"])
    assert command.args["plan"] == RunPlan.from_json(PLAN).to_json()
    assert command.args["estimate"]["rounds"] == 3
    assert page.get(f"/api/v1/commands/{command.id}").json() == {
        "command": command.id, "done": None, "run_id": "", "detail": "", "why": "", "try": ""
    }  # fmt: skip
    store.commands.answer(command.id, {"done": False, "error": "no", "why": "because", "try": "yes"})
    assert page.get(f"/api/v1/commands/{command.id}").json()["try"] == "yes"
    assert page.get("/api/v1/commands/99").status_code == 404


def test_a_plan_that_cannot_run_is_not_accepted(page: TestClient, store: Store):
    answer = page.post("/api/v1/runs", json={"plan": with_key("local.epochs", 2)}, headers=HERE)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "[local] steps and epochs are both given"
    assert store.commands.pending() == []


def deep(levels: int) -> Any:
    return 1 if levels == 0 else {"a": deep(levels - 1)}


@pytest.mark.parametrize(
    "given",
    [
        {"plan": with_key("uplink.codec", "1" * 16_000)},
        {"plan": with_key("uplink.codec", "1:" * 8_000)},
        {"plan": with_key("run.init", "upload:" + "a" * 5_000)},
        {"plan": with_key("run.init", "upload:" + "a" * 500)},
        {"plan": {**PLAN, "local": deep(500)}},
        {"text": "a." * 10_000 + "b = 1"},
        {"text": "[" + "a." * 10_000 + "b]"},
        {"text": "".join(f"[a{number}]\n" for number in range(6_000))},
    ],
)
def test_a_plan_made_to_keep_the_dashboard_busy_has_its_problems_soon(page: TestClient, given: dict[str, Any]):
    began = time.perf_counter()
    found = checked(page, **given)
    assert time.perf_counter() - began < 5
    assert not found["ok"]
    assert 1 <= len(found["problems"]) <= 100


def test_nothing_is_started_while_no_aggregator_runs(visit: Any, store: Store, tmp_path: Path):
    client = visit(lock=tmp_path / "lock")
    client.post("/login", data={"code": store.logins.new_code()})
    answer = client.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE)
    assert (answer.status_code, answer.json()["detail"]) == (409, "no aggregator is running")
    assert store.commands.pending() == []


WAYS = ("/api/v1/plans/check", "/api/v1/runs")
KEYS = [(key, value) for key, values in NAMED.items() for value in values]


@pytest.mark.parametrize("who", ["anonymous", *ROLES])
def test_no_plan_of_the_api_names_what_is_not_allowed_whoever_sends_it(
    visit: Any, store: Store, monkeypatch: pytest.MonkeyPatch, who: str
):
    from thinwire.reports import plan_check

    monkeypatch.setattr(plan_check, "installed", lambda: OTHERS)
    client = visit()
    headers = HERE if who == "anonymous" else Visitors(store, client).session(who)
    for key, value in KEYS:
        checked, begun = (client.post(path, json={"plan": with_key(key, value)}, headers=headers) for path in WAYS)
        assert store.commands.pending() == [], (key, value)
        refused = {"anonymous": (401, 401), "viewer": (200, 403)}.get(who, (200, 422))
        assert (checked.status_code, begun.status_code) == refused, (key, value)
        if who == "anonymous":
            continue
        problems = checked.json()["problems"]
        assert {".".join(one["place"]) for one in problems} == {key}, (key, value)
        assert all("aggregator.toml does not allow it" in one["why"] for one in problems), (key, value)
        assert who == "viewer" or "names" in begun.json()["detail"], (key, value)


def test_who_may_start_a_run_is_an_operator_and_who_may_look_a_viewer():
    assert LEAST["POST /api/v1/runs"] == "operator"
    assert {LEAST[f"GET {path}"] for path in ("/new", "/compare", "/api/v1/run-list", "/api/v1/compare")} == {ROLES[0]}


@pytest.fixture
def running(store: Store, tmp_path: Path) -> Any:
    """The dashboard beside an aggregator's lock that is held."""
    lock = tmp_path / "aggregator" / "lock"
    lock.parent.mkdir()
    with hold(lock, {}), serving(store.url, "127.0.0.1:0", "--lock", str(lock)) as served:
        yield served


def toml(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Plan as TOML")


def started(page: Page, store: Store) -> CommandRow:
    """The command that a click on the button leaves."""
    with page.expect_response(re.compile(r"/commands/\d+$")):
        page.get_by_role("button", name="Start the run").click()
    [command] = store.commands.pending()
    return command


def fill(page: Page, place: str, value: str) -> None:
    page.locator(f"#f-{place.replace('.', '-')}").fill(value)


def test_a_person_makes_a_plan_in_the_form_and_starts_it(store: Store, running: Shown, look: Open):
    twelve_rounds(store)
    page = look(running.url, "new")
    expect(page.locator(".plan-state")).to_contain_text("The plan still needs:")
    expect(page.get_by_role("button", name="Start the run")).to_be_disabled()
    expect(page.locator("#f-local-lr-wrong-0")).to_contain_text("Every plan needs it. Try: [local] lr = 0.1")
    assert page.locator("#f-local-lr").get_attribute("aria-invalid") != "true", "nothing was filled in wrong"
    fill(page, "local.lr", "much")
    expect(page.locator(".plan-state")).to_contain_text("1 problem: this plan cannot run.")
    assert page.locator("#f-local-lr").get_attribute("aria-invalid") == "true"
    fill(page, "local.lr", "0.")
    fill(page, "local.lr", "0.5")
    fill(page, "run.rounds", "3")
    expect(page.locator(".plan-state")).to_contain_text("This plan can run.")
    expect(toml(page)).to_have_value('[run]\ntask = "digits"\nrounds = 3\n\n[local]\nlr = 0.5\n')
    expect(page.locator("#cost")).to_contain_text("1.26 kB a client and round")
    expect(page.locator("#cost")).to_contain_text("not known yet")
    command = started(page, store)
    run = new_run(store)
    store.commands.answer(command.id, {"done": True, "run_id": run.run_id}, run.run_id)
    expect(page.locator("h1")).to_have_text(run.run_id)


def test_a_refusal_of_the_aggregator_is_shown(store: Store, running: Shown, look: Open):
    page = look(running.url, "new")
    fill(page, "run.task", "digits")
    fill(page, "local.lr", "0.5")
    command = started(page, store)
    refusal = {"done": False, "error": "nothing is known", "why": "no device", "try": "connect one"}
    store.commands.answer(command.id, refusal)
    expect(page.get_by_role("alert")).to_contain_text("Try: connect one")


def test_the_form_and_the_text_are_two_views_of_one_plan(store: Store, served: Shown, look: Open):
    twelve_rounds(store)
    page = look(served.url, "new")
    text = toml(page)
    text.fill(TEXT + '\n[uplink]\ncodec = "int8"\nlayers = {"*.bias" = "fp16"}\n')
    expect(page.locator("#f-run-rounds")).to_have_value("3")
    page.locator("#s-uplink > summary").click()
    expect(page.locator("#f-uplink-codec")).to_have_value("int8")
    expect(page.locator("#f-uplink-layers")).to_have_value("*.bias = fp16")
    fill(page, "uplink.codec", "topk(0.1)")
    expect(text).to_have_value(TEXT + '\n[uplink]\ncodec = "topk(0.1)"\nlayers = { "*.bias" = "fp16" }\n')
    fill(page, "uplink.codec", "")
    expect(text).to_have_value(TEXT + '\n[uplink]\nlayers = { "*.bias" = "fp16" }\n')
    text.fill("[run")
    expect(page.locator(".plan-state")).to_contain_text("the plan is not TOML")
    expect(page.locator("#f-run-rounds")).to_have_value("3")  # what is no TOML empties no form


DROPPED = """(text) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], "dropped.toml"));
    const dropped = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
    document.querySelector(".drop").dispatchEvent(dropped);
}"""


def test_a_plan_file_is_read_in_the_browser(store: Store, served: Shown, look: Open, tmp_path: Path):
    file = tmp_path / "plan.toml"
    file.write_text(TEXT)
    page = look(served.url, "new")
    page.locator(".drop input").set_input_files(file)
    expect(page.locator("#f-run-rounds")).to_have_value("3")
    expect(page.locator(".plan-state")).to_contain_text("This plan can run")
    expect(page.locator(".drop [role=status]")).to_have_text("plan.toml was read")
    toml(page).fill("")
    page.evaluate(DROPPED, TEXT)
    expect(page.locator(".drop [role=status]")).to_have_text("dropped.toml was read")
    expect(page.locator("#f-run-rounds")).to_have_value("3")


def test_a_clone_begins_with_the_plan_of_its_run(store: Store, served: Shown, look: Open):
    run = new_run(store, more='[uplink]\ncodec = "fp16"\n')
    run.quiet_round()
    finish(run)
    page = look(served.url, f"runs/{run.run_id}")
    page.get_by_role("link", name="Clone").click()
    expect(page.locator(".head")).to_contain_text(f"A clone of {run.run_id}")
    expect(toml(page)).to_have_value(
        f'[run]\ntask = "digits"\nrounds = 12\ninit = "run:{run.run_id}@0"\n\n'
        '[local]\nlr = 0.5\nsteps = 50\n\n[uplink]\ncodec = "fp16"\n'
    )
    expect(page.locator(".plan-state")).to_contain_text(f"First model: model 0 of {run.run_id}.")
    fill(page, "run.init", f"run:{run.run_id}")
    expect(page.locator(".plan-state")).to_contain_text(f"First model: the last model of {run.run_id}.")


def test_a_clone_of_an_extended_run_has_the_plan_of_its_start_and_says_so(store: Store, served: Shown, look: Open):
    run = new_run(store)
    run.quiet_round()
    finish(run)
    row, now = store.run(run.run_id), time.time()
    plan = {**row.plan, "run": {**row.plan["run"], "rounds": 40}, "local": {**row.plan["local"], "lr": 0.1}}
    before = {"run.rounds": 12, "local.lr": 0.5}
    more = RunExtended(now, 40, 12, row.version, row.rounds_closed + 1, plan, before=before)
    store.record(run.run_id, [more, RunStatusChanged(now, "queued", ""), RunStatusChanged(now, "done", "40 rounds")])
    page = look(served.url, f"runs/{run.run_id}")
    expect(page.locator(".sentence")).to_contain_text("from its first start to its last end")
    expect(page.locator(".figures")).to_contain_text("first start to last end")
    page.get_by_role("link", name="Clone").click()
    expect(page.locator(".head")).to_contain_text("what its extension changed is left out")
    expect(toml(page)).to_have_value(re.compile(r"rounds = 12\n.*lr = 0\.5\n", re.DOTALL))


def show_all(page: Page) -> None:
    more = page.get_by_role("button", name=re.compile("more keys?$"))
    for left in range(more.count(), 0, -1):
        expect(more).to_have_count(left)
        more.first.click()


def test_the_form_is_usable_by_all_and_at_every_width(store: Store, served: Shown, look: Open):
    twelve_rounds(store)
    page = look(served.url, "new")
    expect(page.locator(".plan-state")).to_contain_text("The plan still needs:")
    for section in ("cohort", "uplink", "downlink", "server", "secure", "privacy"):
        page.locator(f"#s-{section} > summary").focus()
        page.keyboard.press("Enter")
    show_all(page)
    assert axe_in_both(page) == []
    for width in (400, 1000, 1300, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert overflow(page) <= 0, width
        told = page.locator("#s-privacy > summary")
        heading, about = (told.locator(part).bounding_box() for part in ("h2", ".faint"))
        assert heading and about
        assert abs(heading["y"] - about["y"]) < 10, f"the heading's text stands beside it at {width}"
    page.locator(".wrongs a").click()
    expect(page.locator("#f-local-lr")).to_be_focused()


def test_every_key_of_a_plan_has_a_field(store: Store, served: Shown, look: Open):
    page = look(served.url, "new")
    assert page.request.get(f"{served.url}/api/v1/plans/schema").json() == RunPlan.model_json_schema()
    for section in ("cohort", "uplink", "downlink", "server", "secure", "privacy"):
        page.locator(f"#s-{section} > summary").click()
    show_all(page)
    missing = page.evaluate(
        """(keys) => keys.filter((id) => !document.getElementById(id))""",
        [f"f-{section}-{key}" for section, table in RunPlan.parse(TEXT).to_json().items() if isinstance(table, dict)
         for key in table],
    )  # fmt: skip
    assert missing == []
