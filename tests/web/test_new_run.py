"""A new run in the dashboard: its plan is checked as one types, its cost is told, and the aggregator gets a command."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.core.test_plan_names import NAMED, OTHERS
from tests.support.api_answers import DEVICES, LAYOUT, REPORT
from tests.support.filled_store import add_devices, new_run, twelve_rounds
from tests.support.reasons import noted
from tests.web.test_roles import Visitors
from thinwire.core.events import RunNoted
from thinwire.core.fleet import Hello
from thinwire.core.plan import RunPlan
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import private_folder
from thinwire.store import ROLES, MeasureRow, Store
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
    place = private_folder(tmp_path / "aggregator")
    StartOptions({"listen": "0.0.0.0:9443"}).save(place)
    client = visit(lock=place / "lock")
    client.post("/login", data={"code": store.logins.new_code()})
    answer = client.post("/api/v1/runs", json={"plan": PLAN}, headers=HERE)
    assert (answer.status_code, answer.json()["detail"]) == (409, "no aggregator is running")
    assert answer.json()["try"] == f"thinwire aggregator start --listen 0.0.0.0:9443 --home {tmp_path}"
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
