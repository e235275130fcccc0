"""What the API says of a run in which much went wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.api_answers import DENSE, DEVICES, LAYOUT, Told
from tests.support.filled_store import add_devices, finish, new_run, twelve_rounds
from tests.support.reasons import noted
from thinwire.core.events import (
    AssignmentDelivered,
    ClientReconnected,
    DeviceOffline,
    Evaluated,
    RoundResumed,
    RunNoted,
    RunStatusChanged,
)
from thinwire.store import MeasureRow, Store


def get(page: TestClient, path: str) -> Any:
    answer = page.get(f"/api/v1/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_empty_store_has_no_runs_and_no_devices(page: TestClient):
    assert get(page, "runs") == []
    assert get(page, "devices") == []
    assert get(page, "service")["aggregator"] == "unknown"


@pytest.mark.parametrize("path", ["/nothing", "/nothing/<b>", "/runs/a!b", "/devices/a!b"])
def test_a_browser_gets_a_page_at_an_address_that_has_none(page: TestClient, path: str):
    answer = page.get(path, headers={"Accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "<h1>There is no page at this address</h1>" in answer.text
    assert f'<a href="{"../" * (path.count("/") - 1) or "./"}">All runs</a>' in answer.text
    assert "<b>" not in answer.text


@pytest.mark.parametrize(("path", "accept"), [("/api/v1/nothing", "text/html"), ("/nothing", "*/*")])
def test_a_program_gets_a_problem_document_there(page: TestClient, path: str, accept: str):
    answer = page.get(path, headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert (answer.json()["why"], answer.json()["try"][:4]) == ("no route has this address with this method", "GET ")


@pytest.mark.parametrize("path", ["runs/none", "devices/none"])
def test_what_is_not_there_is_refused_with_something_to_try(page: TestClient, path: str):
    answer = page.get(f"/api/v1/{path}")
    assert answer.status_code == 404
    assert answer.json()["why"]
    assert answer.json()["try"]


def test_runs_come_newest_first_each_with_its_state_in_a_sentence(page: TestClient, told: Told):
    waiting = new_run(told.store)
    waiting.status("waiting", "waiting: 3 of 8 devices (missing pi-04; pi-07 has no task 'ecg')")
    newest, older = get(page, "runs")
    assert newest["sentence"] == "Waiting: 3 of 8 devices (missing pi-04; pi-07 has no task 'ecg')."
    assert older["run_id"] == told.run_id
    assert re.match(r"Done: 11 rounds, \S+ \S+ from start to end", older["sentence"])
    assert re.search(r"accuracy 0\.9\d+, 15\d times less sent up than dense float32\.$", older["sentence"])


def test_a_run_of_the_queue_says_behind_which_run_it_waits(page: TestClient, store: Store):
    first, second = twelve_rounds(store), new_run(store)
    new_run(store, source="sim")
    waits = f"Waiting in the queue behind {first.run_id}, which is running."
    assert [run["sentence"] for run in get(page, "runs")[:2]] == ["Queued: it has not begun yet.", waits]
    assert get(page, f"runs/{second.run_id}")["sentence"] == waits
    finish(first)
    assert get(page, f"runs/{second.run_id}")["sentence"] == "Queued: it has not begun yet."


def test_an_open_round_says_how_many_have_answered(page: TestClient, store: Store):
    run = twelve_rounds(store)
    sentence = get(page, f"runs/{run.run_id}")["sentence"]
    accuracy = f"{store.run(run.run_id).decisive['accuracy']:.4f}"  # as in each table of the command line
    said = f"Round 12 of 13 (1 round made no step): 5 of 8 devices have answered; accuracy {accuracy} so far."
    assert sentence == said


def test_who_has_answered_counts_before_it_is_written_that_it_was_aggregated(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.accept("pi-06", 1.4)
    assert "6 of 8 devices have answered; " in get(page, f"runs/{run.run_id}")["sentence"]
    assert get(page, f"runs/{run.run_id}/rounds/12")["why"].endswith("6 of 8 have answered, 8 are enough.")


def test_who_failed_has_not_answered_and_who_is_back_is_at_work(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.fail("pi-06", 1.4, "offline", "its connection is closed")
    assert "5 of 8 devices have answered, 1 failed; " in get(page, f"runs/{run.run_id}")["sentence"]
    assert get(page, f"runs/{run.run_id}/rounds/12")["why"].endswith("5 of 8 have answered, 1 failed; 8 are enough.")
    run.say(ClientReconnected(run.opened_at + 1.6, 12, "pi-06", run.assignments["pi-06"], run.elapsed))
    shown = get(page, f"runs/{run.run_id}")
    assert "5 of 8 devices have answered; " in shown["sentence"]
    assert [(c["state"], c["state_text"]) for c in shown["clients"] if c["device"] == "pi-06"] == [
        ("working", "in round 12")
    ]
    assert [u["outcome"] for u in get(page, f"runs/{run.run_id}/rounds/12")["updates"] if u["device"] == "pi-06"] == [
        "selected"
    ]


def test_a_device_that_got_an_assignment_is_known_to_have(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.say(AssignmentDelivered(run.opened_at + 0.5, 12, "pi-06", run.assignments["pi-06"]))
    shown = {u["device"]: u["pulled_at"] for u in get(page, f"runs/{run.run_id}/rounds/12")["updates"]}
    assert (shown["pi-06"], shown["pi-07"]) == (run.opened_at + 0.5, None)


def test_an_absence_of_the_aggregator_stands_beside_its_round(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.say(RoundResumed(run.opened_at + 42.0, 12, run.opened_at + 2.0, run.elapsed))
    assert get(page, f"runs/{run.run_id}/rounds/12")["missed_s"] == pytest.approx(40.0), "of an older journal"
    run.say(RoundResumed(run.opened_at + 50.0, 12, run.opened_at + 50.0, run.elapsed, 41.5))
    shown = get(page, f"runs/{run.run_id}/rounds/12")
    assert shown["missed_s"] == 41.5
    assert shown["downtimes"][0] == {"begin_s": 2.0, "end_s": 42.0}
    assert shown["why"].endswith("8 are enough; the aggregator was offline for 40 s.")


@pytest.mark.parametrize("set_by_s", [1e8, -1e6])
def test_an_open_round_over_which_the_wall_clock_was_set_reports_that_and_draws_no_stage(
    page: TestClient, store: Store, set_by_s: float
):
    run = twelve_rounds(store)
    run.say(RoundResumed(run.opened_at + 8.0 + set_by_s, 12, run.opened_at + 8.0, run.elapsed, 2.0))
    shown = get(page, f"runs/{run.run_id}/rounds/12")
    assert (shown["downtimes"], shown["missed_s"]) == ([], 2.0)
    assert not any(update["stretches"] for update in shown["updates"])
    assert shown["why"].endswith("8 are enough; the aggregator was offline for an unknown time: the clock was set.")


def test_each_round_says_why_it_closed_and_why_it_took_so_long(page: TestClient, told: Told):
    rounds = {r["round"]: r for r in get(page, f"runs/{told.run_id}/rounds")}
    assert [rounds[n]["reason"] for n in (3, 4, 6, 7)] == ["all", "deadline", "enough", "too-few"]
    assert rounds[3]["closing"] == "everybody selected has answered"
    assert " s for pi-07, which trained 50 steps in " in rounds[3]["why"]
    assert rounds[4]["closing"] == "the deadline passed: 1 of 8 devices had not replied"
    assert rounds[4]["why"].startswith(
        "Round 4 took 4.0 s: 1 of 8 had not replied when its deadline of 4.0 s passed; pi-07 took 5.6 s and trained"
    )
    assert rounds[6]["closing"] == "all that could answer did; 1 device failed"
    assert rounds[7]["closing"] == "too few answered: 3 of at least 4; the model stays as it was"


def test_a_run_says_in_all_where_its_time_went(page: TestClient, told: Told, store: Store):
    run = get(page, f"runs/{told.run_id}")
    assert run["why"].startswith("12 rounds took ")
    assert "% of it in the stage train; pi-07 was the slowest in " in run["why"]
    assert run["stages"]["train"] > run["stages"]["upload"] > 0
    assert (run["requests"], run["rtt_s"], run["trips_s"], run["uncounted"]) == (24, None, None, {})


def test_a_round_keeps_the_round_trip_that_was_measured_when_it_closed(page: TestClient, store: Store):
    run = new_run(store)
    for seconds in (0.05, 0.2):
        link = MeasureRow("pi-07", "rtt", "", [[1.0, seconds]], seconds, seconds, run.now)
        store.record(run.run_id, [RunNoted(run.now, noted(""))], [link])
        run.quiet_round()
    first, second = (get(page, f"runs/{run.run_id}/rounds/{number}") for number in (1, 2))
    assert (first["requests"], first["rtt_s"], first["trips_s"]) == (2, 0.05, 0.1)
    assert (second["rtt_s"], second["trips_s"]) == (0.2, 0.4)
    assert get(page, f"runs/{run.run_id}")["trips_s"] == pytest.approx(0.5)


def test_the_reasons_of_a_run_follow_it_round_by_round(page: TestClient, store: Store):
    run = new_run(store)
    for number in range(1, 7):
        run.quiet_round()
        assert get(page, f"runs/{run.run_id}")["why"].startswith(f"{number} round")
        whole = [one["why"] for one in get(page, f"runs/{run.run_id}/rounds")]
        assert whole == [get(page, f"runs/{run.run_id}/rounds/{n}")["why"] for n in range(1, number + 1)]


def test_a_round_without_a_wire_claims_no_requests_and_no_share_of_a_clock_that_stood_still(
    page: TestClient, store: Store
):
    run = new_run(store, source="sim")
    run.quiet_round(0.05)
    shown = get(page, f"runs/{run.run_id}/rounds/1")
    assert (shown["requests"], shown["trips_s"]) == (0, None)
    assert shown["uncounted"] == {"aggregate": 0.01, "step": 0.004, "store": 0.02}
    assert "which a simulation's clock does not count" in shown["why"]
    assert {s["stage"] for u in shown["updates"] for s in u["stretches"]} >= {"unaccounted", "upload"}


def test_sums_run_on_over_the_rounds_and_end_at_the_runs_own(page: TestClient, told: Told):
    rounds, run = get(page, f"runs/{told.run_id}/rounds"), get(page, f"runs/{told.run_id}")
    assert rounds[-1]["until_payload"] == run["payload_up"] + run["payload_down"]
    assert rounds[-1]["until_wire"] == run["wire_up"] + run["wire_down"]
    assert rounds[-1]["until_s"] == pytest.approx(run["seconds"])
    tail = get(page, f"runs/{told.run_id}/rounds?from=11")
    assert tail == rounds[10:]


def test_a_round_shows_what_each_client_did_when(page: TestClient, told: Told):
    found = get(page, f"runs/{told.run_id}/rounds/4")
    clients = {u["device"]: u for u in found["updates"]}
    assert list(clients) == DEVICES
    stages = [s["stage"] for s in clients["pi-01"]["stretches"]]
    assert stages == ["delivery", "download", "queue", "evaluate", "train", "encode", "unaccounted", "upload"]
    assert clients["pi-07"]["outcome"] == "aggregated-late"
    assert clients["pi-07"]["aggregated_round"] == 5
    assert clients["pi-07"]["stretches"][-1]["end_s"] > found["seconds"]


def test_a_late_answer_shows_also_in_the_round_that_took_it(page: TestClient, told: Told):
    found = get(page, f"runs/{told.run_id}/rounds/5")
    assert [(u["device"], u["round"]) for u in found["late_aggregated"]] == [("pi-07", 4)]
    assert found["not_selected"] == {"pi-07": "busy with round 4"}
    assert found["late_aggregated"][0]["stretches"][0]["begin_s"] < 0


def test_failures_and_drops_carry_their_reason(page: TestClient, told: Told):
    failed = next(u for u in get(page, f"runs/{told.run_id}/updates?round=6") if u["device"] == "pi-03")
    assert (failed["outcome"], failed["reason"]) == ("failed", "task-error: RuntimeError at task.py:41")
    assert failed["stretches"] == []
    dropped = next(u for u in get(page, f"runs/{told.run_id}/updates?round=9") if u["device"] == "pi-02")
    assert (dropped["outcome"], dropped["reason"]) == ("dropped", "bad-payload")


def test_clients_say_what_they_do_now(page: TestClient, store: Store):
    run = twelve_rounds(store)
    clients = {c["device"]: c for c in get(page, f"runs/{run.run_id}")["clients"]}
    assert clients["pi-01"]["state_text"] == "idle"
    assert clients["pi-08"]["state_text"] == "in round 12"
    assert clients["pi-03"]["examples"] == 162
    assert clients["pi-07"]["late"] == 1


def test_who_is_busy_with_an_earlier_round_is_at_work_in_it(page: TestClient, store: Store):
    run = new_run(store)
    run.open()
    for device in [name for name in run.assignments if name != "pi-07"]:
        run.answer(device, 2.0)
    run.close("deadline", 4.0, ["pi-07"])
    run.open(without={"pi-07": "busy with round 1"})
    clients = {c["device"]: c["state_text"] for c in get(page, f"runs/{run.run_id}")["clients"]}
    assert (clients["pi-07"], clients["pi-01"]) == ("in round 1", "in round 2")


def test_a_device_that_was_online_and_not_sampled_is_shown_with_that_reason(page: TestClient, store: Store):
    run = new_run(store)
    add_devices(store, ["pi-21", "pi-22"], run.now - 5)
    store.record_device(DeviceOffline(run.now - 4, "pi-22", "connection lost"))
    run.open(considered=len(run.devices) + 1)
    clients = {c["device"]: c for c in get(page, f"runs/{run.run_id}")["clients"]}
    assert clients["pi-21"]["state_text"] == "not selected: not sampled"
    counts = ("selected", "arrived", "aggregated_count", "late", "dropped", "failed", "payload_up", "payload_down")
    assert {clients["pi-21"][name] for name in counts} == {0}
    assert "pi-22" not in clients, "it is offline"
    assert get(page, f"runs/{run.run_id}/rounds/1")["not_sampled"] == 1


def test_dense_bytes_stand_beside_payload_and_wire(page: TestClient, told: Told):
    run = get(page, f"runs/{told.run_id}")
    assert run["size"] == LAYOUT.size
    assert run["dense_up"] % DENSE == 0
    assert run["dense_up"] / run["payload_up"] > 100 > run["dense_up"] / run["wire_up"] > 10


def test_a_simulation_has_no_wire(page: TestClient, store: Store):
    run = new_run(store, source="sim")
    run.quiet_round()
    found = get(page, "runs/latest")
    assert (found["source"], found["wire_up"], found["wire_down"]) == ("sim", None, None)
    assert get(page, "runs/latest/rounds")[0]["until_wire"] is None


def test_what_is_not_a_number_is_null(page: TestClient, told: Told):
    told.say(Evaluated(told.now, 1, 1, {"loss": float("nan"), "accuracy": 0.5}, {"loss": [0.1, float("inf")]}, 9, 1))
    found = get(page, f"runs/{told.run_id}/rounds")[0]
    assert found["metrics"] == {"loss": None, "accuracy": 0.5}
    assert found["spread"]["loss"] == [0.1, None]
    assert get(page, f"runs/{told.run_id}")["metrics"]["loss"] is None


def test_a_wrong_name_is_refused_with_near_ones(page: TestClient, told: Told):
    answer = page.get("/api/v1/runs/digit-1")
    assert answer.status_code == 404
    assert answer.json()["try"] == told.run_id
    assert page.get(f"/api/v1/runs/{told.run_id}/rounds/99").status_code == 404
    assert page.get("/api/v1/runs/a%20b").status_code == 422
    assert page.get("/api/v1/nothing").json()["detail"] == "not found"


def test_a_run_is_found_by_its_beginning_and_as_the_latest(page: TestClient, told: Told):
    assert get(page, "runs/latest")["run_id"] == get(page, "runs/digits")["run_id"] == told.run_id


def test_a_run_is_paused_and_resumed_by_commands_and_what_makes_no_sense_is_refused(page: TestClient, told: Told):
    here = {"Origin": "http://127.0.0.1:8080"}
    told.store.record(told.run_id, [RunStatusChanged(0.5, "running", "round 2, step 2 of 3")])
    refused = page.post(f"/api/v1/runs/{told.run_id}/resume", headers=here)
    assert (refused.status_code, refused.json()["detail"]) == (409, f"{told.run_id} is not paused")
    assert page.post(f"/api/v1/runs/{told.run_id}/pause", headers=here).status_code == 202
    told.store.record(told.run_id, [RunStatusChanged(1.0, "paused", "paused by a person after 1 of 3 rounds")])
    assert get(page, f"runs/{told.run_id}")["sentence"] == "Paused by a person after 1 of 3 rounds."
    assert page.post(f"/api/v1/runs/{told.run_id}/resume", headers=here).status_code == 202
    assert [(command.kind, command.who) for command in told.store.commands.pending()] == [
        ("pause-run", "machine"), ("resume-run", "machine"),
    ]  # fmt: skip
    told.store.record(told.run_id, [RunStatusChanged(2.0, "done", "3 rounds")])
    assert page.post(f"/api/v1/runs/{told.run_id}/pause", headers=here).json()["why"] == "it is done"
    assert page.post(f"/api/v1/runs/{told.run_id}/burn", headers=here).status_code == 422


def test_stopping_a_run_leaves_a_command_in_the_store(page: TestClient, told: Told):
    answer = page.post("/api/v1/runs/latest/stop", headers={"Origin": "http://127.0.0.1:8080"})
    assert answer.status_code == 202
    (command,) = told.store.commands.pending()
    assert (command.id, command.kind, command.run_id, command.who) == (
        answer.json()["command"],
        "stop-run",
        told.run_id,
        "machine",
    )
