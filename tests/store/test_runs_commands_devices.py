from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.store_story import accepted, closed, dropped, header, new_run, opened, status
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.events import DeviceOffline, DeviceOnline
from thinwire.core.fleet import DeviceRow, Hello, TaskReport
from thinwire.store import Store, device_registry
from thinwire.store.device_registry import REGISTRY_READ_S, UNAPPROVED_READ_S
from thinwire.store.queries import device_row

KEYS = {name: (name[-1] * 64, f"key of {name}".encode()) for name in ("pi-01", "pi-02", "pi-03")}


def enrol(store: Store, name: str) -> None:
    store.roster.enrol(name, *KEYS[name], how="loopback")


# Runs.


def test_runs_are_numbered_by_task_and_listed_newest_first(store: Store) -> None:
    assert [new_run(store), new_run(store, "ecg"), new_run(store), new_run(store, "ecg-1")] == [
        "digits-1", "ecg-1", "digits-2", "ecg-1-1",
    ]  # fmt: skip
    assert [run.run_id for run in store.runs()] == ["ecg-1-1", "digits-2", "ecg-1", "digits-1"]


def test_a_run_is_found_by_id_by_a_beginning_that_only_it_has_and_as_the_latest(store: Store) -> None:
    for task in ("digits", "digits", "ecg"):
        new_run(store, task)
    assert store.run("digits-1").run_id == "digits-1"
    assert store.run("e").run_id == store.run("latest").run_id == "ecg-1"
    assert store.run("ecg-1").task_report == TaskReport("ecg", codecs=("int8",))


def test_a_run_that_is_not_there_is_answered_with_near_ones(store: Store) -> None:
    with pytest.raises(NotFound, match="latest") as nothing:
        store.run("latest")
    assert "thinwire run" in nothing.value.hint
    for task in ("digits", "digits", "ecg"):
        new_run(store, task)
    with pytest.raises(NotFound) as wrong:
        store.run("digit-2")
    assert (wrong.value.exit_code, "digits-2" in wrong.value.hint) == (9, True)
    with pytest.raises(NotFound, match="2 runs"):
        store.run("dig")
    with pytest.raises(NotFound):
        store.run("")


def test_a_begun_run_is_served_before_the_oldest_in_the_queue(store: Store) -> None:
    assert not store.run_queue()
    first, second, sim = new_run(store), new_run(store), new_run(store, source="sim")
    store.record(sim, [status("running")])
    assert store.run_queue()[0] == store.run(first)
    store.record(second, [status("running")])
    assert store.run_queue()[0] == store.run(second)
    store.record(second, [status("done")])
    store.record(first, [status("stopped")])
    assert not store.run_queue()


def test_a_run_that_is_still_being_handed_over_is_not_served(store: Store) -> None:
    run = store.run(new_run(store))
    other = new_run(store)
    store.record(other, [status("preparing")])
    assert store.run("latest") == run
    store.record(run.run_id, [status("preparing")])
    assert not store.run_queue()
    assert store.run(other[:-1] + "2").run_id == other


# Commands.


def test_a_command_waits_until_it_is_answered_and_the_first_answer_stays(store: Store, clock: VirtualClock) -> None:
    stop = store.commands.add("stop-run", "digits-1", who="ann")
    code = store.commands.add("login-code", args={"valid_s": 60})
    assert [(o.id, o.kind, o.run_id, o.args, o.who, o.at) for o in store.commands.pending()] == [
        (stop, "stop-run", "digits-1", {}, "ann", clock.wall()),
        (code, "login-code", "", {"valid_s": 60}, "operator", clock.wall()),
    ]
    assert store.commands.result(stop) is None
    store.commands.answer(stop, {"ok": True})
    store.commands.answer(stop, {"ok": False})
    assert store.commands.result(stop) == {"ok": True}
    assert [command.id for command in store.commands.pending()] == [code]
    with pytest.raises(NotFound):
        store.commands.answer(999, {})
    with pytest.raises(NotFound):
        store.commands.result(999)


# The roster.


def test_the_first_key_of_a_name_keeps_it(store: Store) -> None:
    enrol(store, "pi-01")
    assert store.roster.enrol("pi-01", *KEYS["pi-01"], how="manual").state == "approved"
    with pytest.raises(Refused, match="another key") as refused:
        store.roster.enrol("pi-01", *KEYS["pi-02"], how="loopback")
    assert refused.value.exit_code == 5
    with pytest.raises(Refused, match="pi-01"):
        store.roster.enrol("pi-09", *KEYS["pi-01"], how="loopback")
    with pytest.raises(UsageError):
        store.roster.enrol("Pi 1", *KEYS["pi-03"], how="loopback")
    assert [row.name for row in store.roster.rows()] == ["pi-01"]


def test_only_loopback_and_invitation_approve_at_once(store: Store) -> None:
    enrol(store, "pi-01")
    store.roster.enrol("pi-02", *KEYS["pi-02"], how="manual")
    assert [row.state for row in store.roster.rows()] == ["approved", "pending"]
    store.roster.approve("pi-02")
    found = store.roster.by_fingerprint(KEYS["pi-02"][0])
    assert found is not None
    assert (found.state, found.public_key, found.how) == ("approved", KEYS["pi-02"][1], "manual")
    assert store.roster.by_fingerprint("e" * 64) is None
    with pytest.raises(NotFound, match="pi-77"):
        store.roster.approve("pi-77")


def test_a_revocation_by_another_process_counts_within_a_second_and_at_once_after_its_command_was_read(
    store: Store, address: str, clock: VirtualClock
) -> None:
    def state() -> str:
        found = store.roster.by_fingerprint(KEYS["pi-01"][0])
        assert found is not None
        return found.state

    enrol(store, "pi-01")
    assert UNAPPROVED_READ_S < REGISTRY_READ_S, "whoever waits for approval is looked for more often"
    assert (state(), sorted(store.roster.revoked())) == ("approved", [])
    with Store.open(address) as another:
        another.roster.revoke("pi-01")
        assert store.roster.enrol("pi-01", *KEYS["pi-01"], how="loopback").state == "revoked"
        assert (state(), sorted(store.roster.revoked())) == ("revoked", ["pi-01"])
        another.roster.approve("pi-01")
        assert state() == "revoked", "the database was looked at a moment ago"
        clock.advance(UNAPPROVED_READ_S + 0.01)
        assert (state(), sorted(store.roster.revoked())) == ("approved", [])
        another.roster.revoke("pi-01")
        clock.advance(REGISTRY_READ_S - 0.01)
        assert state() == "approved", "the database was looked at less than a second ago"
        clock.advance(0.02)
        assert (state(), sorted(store.roster.revoked())) == ("revoked", ["pi-01"])
        another.roster.approve("pi-01")
        clock.advance(UNAPPROVED_READ_S + 0.01)
        assert state() == "approved"
        another.roster.revoke("pi-01")
        store.roster.refresh()
        assert (state(), sorted(store.roster.revoked())) == ("revoked", ["pi-01"])


def test_a_change_during_a_look_is_seen_by_the_next_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads the devices, then another one revokes one, and only then the first one keeps what it read."""
    enrol(store, "pi-01")
    revoking = threading.Thread(target=store.roster.revoke, args=("pi-01",))

    def slow(found: Mapping[str, Any]) -> DeviceRow:
        if not revoking.ident:
            revoking.start()
            until = time.monotonic() + 10.0
            while store.audit.last() < 2 and time.monotonic() < until:  # the enrolment and the revocation
                time.sleep(0.005)
        return device_row(found)

    monkeypatch.setattr(device_registry, "device_row", slow)
    assert store.roster.revoked() == set()
    revoking.join()
    assert store.roster.revoked() == {"pi-01"}


def test_a_device_goes_on_above_the_highest_sequence_of_runs_that_go_on(store: Store) -> None:
    run_id, over = new_run(store), new_run(store)
    for run in (run_id, over):
        store.record(run, opened(run, 1))
        store.record(run, [accepted(header(run, 1, "pi-01", sequence=7), 1)])
    store.record(run_id, [dropped(header(run_id, 1, "pi-01", sequence=9), 1, "duplicate")])
    store.record(over, [closed(1, []), status("done")])
    assert store.roster.sequences("pi-01") == {run_id: 9}
    assert store.roster.sequences("pi-02") == {}


def test_nobody_can_tell_a_runs_identity_from_its_id_and_the_time(tmp_path: Path) -> None:
    """Ids are counted: a new state directory's first run has the id of another's, and clocks can be set."""
    found = []
    for name in "ab":
        with Store.open(tmp_path / name, clock=VirtualClock(origin=5.0)) as opened:
            row = opened.run(new_run(opened))
        with Store.open(tmp_path / name, read_only=True) as again:
            assert again.run(row.run_id).identity == row.identity
        found.append((row.run_id, row.created_at, row.identity))
    (one, other), told = zip(*((row[:2], row[2]) for row in found), strict=True)
    assert one == other
    assert len({*told, ""}) == 3


def test_devices_hear_the_identities_of_runs_on_devices_that_have_begun_and_are_not_over(store: Store) -> None:
    begun, waits, over, queued, simulated = (new_run(store, source=source) for source in [*["devices"] * 4, "sim"])
    for run, statuses in {begun: ["running"], waits: ["running", "waiting"], over: ["running", "done"],
                          queued: ["queued"], simulated: ["running"]}.items():  # fmt: skip
        store.record(run, [status(one) for one in statuses])
    found = store.roster.runs()
    assert found == {run: store.run(run).identity for run in (begun, waits)}
    assert all(len(identity) == 16 for identity in found.values())
    assert len(set(found.values())) == 2
    assert store.run(simulated).identity == ""
    kept = {run: store.run(run).identity for run in (begun, waits, over, queued)}
    assert store.roster.ended({**kept, simulated: ""}) == (over,)
    assert store.roster.ended({over: "b" * 16}) == store.roster.ended({over: ""}) == ()


# Devices as they are shown.


def test_a_device_is_shown_with_what_it_says_and_what_it_did(store: Store) -> None:
    enrol(store, "pi-01")
    enrol(store, "pi-02")
    store.roster.seen(Hello("pi-01", "p1", (TaskReport("digits", "2"),), {"python": "3.11"}), at=50.0)
    store.record_device(DeviceOnline(51.0, "pi-01"))
    run_id, sim = new_run(store), new_run(store, source="sim")
    for run in (run_id, sim):
        store.record(run, [*opened(run, 1), accepted(header(run, 1, "pi-01"), 1), closed(1, [f"{run}/pi-01/1"])])
    one, two = store.devices()
    assert (one.row.name, one.online, one.seen_at, one.hello["versions"]) == ("pi-01", True, 51.0, {"python": "3.11"})
    assert one.tasks[0]["version"] == "2"
    assert (one.updates, one.payload_up, one.last_outcome) == (1, 101, "aggregated")
    assert (two.online, two.updates, two.last_outcome, two.tasks) == (
        False,
        0,
        "selected",
        [],
    ) or two.last_outcome == ""


def test_who_comes_and_goes_is_journalled_with_no_run(store: Store) -> None:
    enrol(store, "pi-01")
    enrol(store, "pi-02")
    for name in ("pi-01", "pi-02", "unknown"):
        store.record_device(DeviceOnline(1.0, name))
    store.record_device(DeviceOffline(2.0, "pi-01", "no word for 60 s"))
    assert [d.online for d in store.devices()] == [False, True]
    store.record_restart(3.0, 0.0)
    assert [d.online for d in store.devices()] == [False, False]
    events = [event for _, event in store.events(None)]
    assert events[:4] == [
        *(DeviceOnline(1.0, n) for n in ("pi-01", "pi-02", "unknown")),
        DeviceOffline(2.0, "pi-01", "no word for 60 s"),
    ]
    assert [event.device for event in events[4:] if isinstance(event, DeviceOffline)] == ["pi-02"]
    assert store.last_seq() == store.events(None)[-1][0]
