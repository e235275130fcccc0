"""What the API says of devices, and what a person's word does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.filled_fleet import a_fleet, come, fingerprint, hello, measured, there
from tests.support.filled_store import twelve_rounds
from tests.support.reasons import noted
from tests.web.test_api import get
from tests.web.test_device_api_refusals import Visit
from thinwire.core.events import DeviceOffline, DeviceOnline, RunNoted
from thinwire.core.statedir import hold
from thinwire.store import Invited, Store

OURS = {"Origin": "http://127.0.0.1:8080"}
AT = time.time() - 60
GOOD = "an owl in the 7th tower"


def post(page: TestClient, path: str, body: Any = None, status: int = 200) -> Any:
    answer = page.post(f"/api/v1/{path}", json=body, headers=OURS)
    assert answer.status_code == status, answer.text
    return answer.json()


def decide(page: TestClient, name: str, what: str, status: int = 200) -> Any:
    return post(page, f"devices/{name}/{what}", {"fingerprint": fingerprint(name)}, status)


@pytest.fixture
def fleet(store: Store) -> Store:
    a_fleet(store, AT)
    return store


def by_name(page: TestClient) -> dict[str, Any]:
    return {device["device"]: device for device in get(page, "devices")}


# Who is there.


def test_each_device_says_why_it_may_or_may_not_take_part(page: TestClient, fleet: Store):
    said = {name: (device["standing"], device["sentence"]) for name, device in by_name(page).items()}
    assert said["ward-4"] == ("pending", "It joined with invitation 1, which needs approval by hand.")
    assert said["cam-01"] == ("approved", "Approved by the invitation that it joined with.")
    assert said["old-box"] == ("revoked", "Revoked by ann.")
    assert said["bench"] == ("revoked", "It left by itself.")


def test_who_came_over_loopback_waits_once_the_device_api_is_open_to_others(visit: Visit, store: Store, tmp_path: Path):
    store.roster.enrol("bench", fingerprint("bench"), b"key", "loopback")
    lock = tmp_path / "lock"
    client = visit(lock=lock)
    client.post("/login", data={"code": store.logins.new_code()})
    with hold(lock, {"listen": "127.0.0.1:9090", "pin": None, "urls": ["http://127.0.0.1:9090"]}):
        assert by_name(client)["bench"]["standing"] == "approved"
        assert get(client, "service")["tls"] is False
    with hold(lock, {"listen": "0.0.0.0:9090", "pin": "ab" * 32, "urls": ["https://agg.example:9090"]}):
        assert get(client, "service")["urls"] == ["https://agg.example:9090"]
        device = by_name(client)["bench"]
        assert (device["standing"], device["state"]) == ("pending", "approved")
        assert "open to other machines" in device["sentence"]
        decide(client, "bench", "approve")
        assert by_name(client)["bench"]["standing"] == "approved"


def test_since_when_and_why_a_device_is_offline(page: TestClient, store: Store):
    a_fleet(store, AT)
    device = by_name(page)["cam-02"]
    assert (device["online"], device["disconnected_at"]) == (False, AT - 1260)
    assert device["disconnect_reason"] == "no request for 360 s"
    store.record_device(DeviceOnline(AT, "cam-02"))
    assert by_name(page)["cam-02"]["disconnected_at"] is None
    store.record_device(DeviceOffline(AT + 1, "cam-02", "connection lost"))
    assert by_name(page)["cam-02"]["disconnect_reason"] == "connection lost"


def test_digests_that_are_not_the_newest_runs_are_said_to_differ(page: TestClient, fleet: Store):
    assert by_name(page)["cam-01"]["tasks"][0]["differs"] == []  # no run to compare with
    twelve_rounds(fleet)
    devices = by_name(page)
    assert devices["cam-01"]["tasks"][0]["differs"] == ["its code is not that of digits-1"]
    assert devices["pi-01"]["tasks"][0]["differs"] == []
    assert devices["jetson-1"]["tasks"][0]["differs"] == []  # it has no model's digest to compare
    assert len(devices["cam-01"]["tasks"][0]["source_digest"]) == 64


def test_the_link_is_what_the_device_measured_and_what_its_answers_took(page: TestClient, store: Store):
    run = twelve_rounds(store)
    store.roster.seen(hello("pi-01", link={"rtt_s": 0.2, "skew_s": -3.5}), AT)
    store.record(run.run_id, [RunNoted(AT, noted("measured"))], measured("pi-01", AT))
    link = by_name(page)["pi-01"]["link"]
    assert (link["rtt_s"], link["skew_s"]) == (0.2, -3.5)
    assert link["up"] == {"p50": 2.1e6, "p90": 1.4e6, "samples": 3, "least": False}
    assert link["rtt"] == {"p50": 0.048, "p90": 0.061, "samples": 3, "least": False}
    assert link["down"] == {"p50": None, "p90": None, "samples": 3, "least": False}, "too fast to be seen"
    assert by_name(page)["pi-08"]["link"] == {"rtt": None, "up": None, "down": None, "rtt_s": None, "skew_s": None}


def test_a_rate_of_nothing_but_small_updates_is_the_least_that_it_may_be(page: TestClient, store: Store):
    run = twelve_rounds(store)
    small = [replace(one, samples=[[370.0, 0.05]] * 3) for one in measured("pi-01", AT)]
    store.record(run.run_id, [RunNoted(AT, noted("measured"))], small)
    link = by_name(page)["pi-01"]["link"]
    assert (link["up"]["p50"], link["up"]["least"], link["rtt"]["least"]) == (2.1e6, True, False)


def test_a_device_is_shown_with_its_deeds_its_last_assignments_and_where_it_stays(page: TestClient, store: Store):
    run = twelve_rounds(store)
    run.fail("pi-08", 1.0, "declined", "rounds_a_day: 24 of 24 rounds of today are made")
    found = get(page, "devices/pi-08")
    assert found["declined"]["rule"] == "rounds_a_day: 24 of 24 rounds of today are made"
    assert (found["declined"]["run_id"], found["declined"]["round"]) == (run.run_id, 12)
    assert [a["sentence"] for a in found["actions"]] == ["came: loopback, approved"]
    assert found["assignments"][0]["round"] == 12
    assert found["stays_text"] == "digits-1 rounds 1–6, 8–11"
    assert get(page, "devices/pi-01")["declined"] is None


def test_a_device_that_is_not_there_is_not_found(page: TestClient):
    assert page.get("/api/v1/devices/pi-01").status_code == 404
    assert page.get("/api/v1/devices/Pi_01").status_code == 422


# A person's word.


def test_an_approval_counts_from_the_next_call_on_and_is_on_record(page: TestClient, fleet: Store):
    said = decide(page, "ward-4", "approve")
    assert said["sentence"] == "ward-4 is approved: it has access at its next call."
    assert fleet.roster.by_fingerprint(fingerprint("ward-4")).state == "approved"  # type: ignore[union-attr]  # it is there
    assert (fleet.audit.actions("ward-4")[0].who, fleet.audit.actions("ward-4")[0].what) == ("machine", "approve")
    assert get(page, "devices/ward-4")["sentence"] == "Approved by machine."


def test_a_revocation_counts_at_once_and_the_aggregator_says_when_all_is_cleared(page: TestClient, store: Store):
    twelve_rounds(store)
    row = next(row for row in store.roster.rows() if row.name == "pi-02")
    said = post(page, "devices/pi-02/revoke", {"fingerprint": row.fingerprint})
    assert (said["standing"], said["confirmed"]) == ("revoked", None)
    assert said["stays_text"] == "digits-1 rounds 1–6, 8, 10–12"
    assert [row.state for row in store.roster.rows() if row.name == "pi-02"] == ["revoked"]
    (command,) = store.commands.pending()
    assert (command.id, command.kind, command.who) == (said["command"], "revoke", "machine")
    assert command.args == {"device": "pi-02", "fingerprint": row.fingerprint}
    assert get(page, f"devices/pi-02/revocations/{command.id}")["confirmed"] is None
    store.commands.answer(command.id, {"done": True, "rounds": {"digits-1": [1, 2]}})
    later = get(page, f"devices/pi-02/revocations/{command.id}")
    assert (later["confirmed"], later["stays_text"]) == (True, "digits-1 rounds 1–2")
    assert later["sentence"].startswith("pi-02 is revoked, and what was open is cleared")
    assert page.get("/api/v1/devices/pi-02/revocations/99").status_code == 404


def test_without_an_aggregator_the_row_is_enough(visit: Visit, fleet: Store, tmp_path: Path):
    client = visit(lock=tmp_path / "lock")
    client.post("/login", data={"code": fleet.logins.new_code()})
    said = decide(client, "cam-01", "revoke")
    assert "the next one applies it before its device API opens" in said["sentence"]
    assert said["command"] is None
    assert fleet.commands.pending() == []
    assert "when an aggregator is running again" in decide(client, "cam-01", "approve")["sentence"]


def test_an_approval_takes_back_a_revocation_that_nobody_has_carried_out(page: TestClient, fleet: Store):
    command = decide(page, "cam-01", "revoke")["command"]
    decide(page, "cam-01", "approve")
    later = get(page, f"devices/cam-01/revocations/{command}")
    assert later["sentence"] == "cam-01 was approved again before the aggregator had carried that out."


def test_an_operator_approves_who_waits_and_no_revoked_device(page: TestClient, visit: Visit, fleet: Store):
    fleet.users.add("bert", "operator", GOOD, "root")
    bert = visit()
    assert bert.post("/login", data={"name": "bert", "password": GOOD}).status_code == 303
    decide(bert, "ward-4", "approve")
    command = decide(page, "cam-01", "revoke")["command"]
    assert decide(bert, "cam-01", "approve", 409)["detail"] == "cam-01 was revoked"
    assert by_name(page)["cam-01"]["standing"] == "revoked"
    assert [pending.id for pending in fleet.commands.pending()] == [command]
    token = fleet.tokens.make("nightly", "bert", "operator").secret
    body, headers = {"fingerprint": fingerprint("cam-02")}, {"Authorization": f"Bearer {token}"}
    assert visit().post("/api/v1/devices/cam-02/approve", json=body, headers=headers).status_code == 403
    decide(page, "cam-01", "approve")


def test_a_decision_about_another_key_than_the_one_that_was_shown_is_refused(page: TestClient, fleet: Store):
    wrong = {"fingerprint": fingerprint("cam-02")}
    for what in ("approve", "revoke"):
        said = post(page, f"devices/cam-01/{what}", wrong, 409)
        assert said["detail"] == "cam-01 has another key than the one that was shown"
        post(page, f"devices/cam-01/{what}", {"fingerprint": "ab"}, 422)
        post(page, f"devices/cam-01/{what}", None, 422)
        post(page, f"devices/nobody/{what}", wrong, 404)
    assert by_name(page)["cam-01"]["standing"] == "approved"
    assert fleet.commands.pending() == []


@pytest.mark.parametrize("path", ["devices/cam-01/approve", "devices/cam-01/revoke", "invitations/8/withdraw"])
def test_only_our_own_page_may_give_such_commands(page: TestClient, visit: Visit, fleet: Store, path: str):
    body = {"fingerprint": fingerprint("cam-01")}
    before = fleet.audit.last()
    assert visit().post(f"/api/v1/{path}", json=body, headers=OURS).status_code == 401
    for headers in ({}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site"}):
        assert page.post(f"/api/v1/{path}", json=body, headers=headers).status_code == 403, headers
    assert page.get(f"/api/v1/{path}").status_code == 405
    assert fleet.audit.last() == before
    assert page.post(f"/api/v1/{path}", json=body, headers=OURS).status_code == 200


# Invitations, and who was refused.


def test_invitations_say_the_outcome_of_them_and_never_their_secret(page: TestClient, fleet: Store):
    (made,) = fleet.invitations.invite(who="ann")
    answer = page.get("/api/v1/invitations")
    assert made.secret not in answer.text
    found = {one["id"]: (one["state"], one["sentence"]) for one in answer.json()}
    assert found[1] == ("used", "used by ward-4")
    assert found[7] == ("withdrawn", "withdrawn before anybody used it")
    assert found[9] == ("expired", "expired unused")
    assert found[8][0] == "open"
    assert [one["state"] for one in answer.json()][:3] == ["open", "open", "expired"]


def test_an_invitation_is_withdrawn_and_a_used_one_is_not(page: TestClient, fleet: Store):
    assert "nobody can join" in post(page, "invitations/8/withdraw")["sentence"]
    said = post(page, "invitations/1/withdraw", status=409)
    assert said["detail"] == "invitation 1 was used by ward-4"
    post(page, "invitations/77/withdraw", status=404)
    assert fleet.audit.actions()[0].who == "machine"


def test_the_operator_reads_the_reason_that_the_outside_does_not_learn(page: TestClient, fleet: Store):
    newest, *others = get(page, "refusals")
    assert newest["kind"] == "name"
    assert newest["told"] == newest["why"]
    assert {one["told"] for one in others} == {"no invitation that can be used"}
    assert [one["why"] for one in others] == ["unknown", "used by cam-01 (invitation 3)"]


def test_invitations_are_made_shown_once_and_enroll(visit: Visit, store: Store, tmp_path: Path):
    client = visit(lock=tmp_path / "lock")
    client.post("/login", data={"code": store.logins.new_code()})
    refused = post(client, "invitations", {}, status=404)
    assert "no device API to invite to" in refused["detail"]
    assert "aggregator start" in refused["try"]
    assert store.invitations.all() == []
    (tmp_path / "tls").mkdir()
    said = {"pin": "ab" * 32, "urls": ["https://agg.example:9090"]}
    (tmp_path / "tls" / "invite.json").write_text(json.dumps(said))
    one, two = post(client, "invitations", {"names": ["ward-1", "ward-2"], "approve_manually": True}, status=201)
    assert one["command"] == "thinwire client join https://agg.example:9090 - --name ward-1"
    word, pin, secret = two["invitation"].split(".")
    assert (word, pin) == ("tw1", "ab" * 32)
    come(store, "ward-2", Invited(two["id"], secret, "ward-2", 0.0))
    assert {row.name: row.state for row in store.roster.rows()} == {"ward-2": "pending"}
    assert secret not in client.get("/api/v1/invitations").text
    assert [one.who for one in store.audit.actions() if one.what == "invite"] == ["machine"]
    assert len(post(client, "invitations", {"count": 3, "expires_s": 60}, status=201)) == 3
    for wrong in ({"count": 0}, {"count": 1001}, {"names": ["Ward 1"]}, {"names": ["a", "a"]}, {"expires_s": -1}):
        post(client, "invitations", wrong, status=422)
    assert len(store.invitations.all()) == 5


def test_a_dashboard_that_does_not_know_the_device_api_makes_no_invitation(page: TestClient, store: Store):
    assert "thinwire devices invite" in post(page, "invitations", {}, status=409)["try"]


def test_devices_are_renamed_and_tagged_and_the_audit_has_who(page: TestClient, fleet: Store):
    assert post(page, "devices/cam-01/tags", {"add": ["ward", "arm"]}) == {"device": "cam-01", "tags": ["arm", "ward"]}
    assert post(page, "devices/cam-01/tags", {"add": ["lab"], "remove": ["arm"]})["tags"] == ["lab", "ward"]
    assert post(page, "devices/cam-01/rename", {"name": "cam-9"}) == {"device": "cam-9", "was": "cam-01"}
    assert (by_name(page)["cam-9"]["tags"], "cam-01" in by_name(page)) == (["lab", "ward"], False)
    assert [one["sentence"] for one in get(page, "devices/cam-9")["actions"]][:3] == [
        "was renamed: it was cam-01", "got other tags: +lab -arm", "got other tags: +arm +ward",
    ]  # fmt: skip
    assert post(page, "devices/cam-9/rename", {"name": "cam-02"}, status=409)["detail"].startswith("there is a device")
    post(page, "devices/cam-9/rename", {"name": "<b>"}, status=422)
    post(page, "devices/cam-9/tags", {"add": ["<b>"]}, status=422)
    post(page, "devices/cam-77/tags", {"add": ["lab"]}, status=404)


def test_renamed_devices_keep_what_was_measured_of_them(page: TestClient, store: Store):
    run = twelve_rounds(store)
    store.record(run.run_id, [RunNoted(AT, noted("measured"))], measured("pi-01", AT))
    run.status("done", "done")
    before = by_name(page)["pi-01"]["link"]
    store.roster.rename("pi-01", "attic")
    assert by_name(page)["attic"]["link"] == before


def test_the_list_of_devices_is_read_for_hundreds_of_them(page: TestClient, store: Store):
    invited = store.invitations.invite(300)
    for number, one in enumerate(invited):
        come(store, f"meter-{number}", one)
    there(store, hello("meter-7"), AT)
    devices = get(page, "devices")
    assert len(devices) == 300
    assert sum(device["online"] for device in devices) == 1
