"""`thinwire devices`: approving, revoking, another name; what is kept of it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.store.test_privacy_ledger import reserve
from tests.support.cli_story import KEY, T, told
from tests.support.private_story import PRIVATE
from tests.support.reasons import noted
from tests.support.store_story import LAYOUT, new_run, status
from thinwire.cli.console import moment
from thinwire.cli.local_state import operator
from thinwire.core.clock import DOWN_SINCE, HEARD
from thinwire.core.equipment import Equipment
from thinwire.core.events import DeviceOffline, DeviceOnline, RunNoted
from thinwire.core.fleet import Hello, TaskReport, population_key
from thinwire.core.link_state import SUSPECT_S
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome, hold
from thinwire.privacy.pinned_roster import write_roster
from thinwire.store import MeasureRow
from thinwire.web.device_queries import Devices
from thinwire.web.settings import may_serve

PIN = "ab" * 32


# Approving.


def test_approving_says_the_fingerprint_that_both_ends_compare(thinwire, home, store, device):
    store.roster.revoke("pi-01")
    said = thinwire("devices", "approve", "pi-01", "--home", home)
    assert (said.code, KEY in said.out.replace(" ", "")) == (0, True)
    assert store.roster.rows()[0].state == "approved"
    assert thinwire("devices", "approve", "pi-77", "--home", home).code == 9


def test_a_stock_node_is_approved_by_its_public_key(thinwire, home, tmp_path, store):
    key = ec.generate_private_key(ec.SECP384R1())
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "node.pub").write_bytes(line + b" ann@laptop\n")
    words = ["--key", tmp_path / "node.pub", "--name", "node-1"]
    said = thinwire("devices", "approve", *words, "--json", "--home", home)
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert said.document["fingerprint"] == hashlib.sha256(der).hexdigest()
    (row,) = store.roster.rows()
    assert (row.name, row.how, row.state, row.public_key) == ("node-1", "stock", "approved", der)


def test_a_file_that_holds_no_such_key_is_refused(thinwire, home, tmp_path, store):
    private = ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    short = ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    for data, why in (
        (private, "private key"),
        (other, "ecdsa-sha2-nistp384"),
        (short, "nistp384"),
        (b"\0" * 99, "OpenSSH"),
    ):
        (tmp_path / "key").write_bytes(data)
        said = thinwire("devices", "approve", "--key", tmp_path / "key", "--name", "node-1", "--home", home)
        assert said.code == 2
        assert why in said.err
        assert "try:" in said.err
    assert store.roster.rows() == []


@pytest.mark.parametrize("words", [[], ["pi-01", "--name", "pi-02"], ["--key", "x.pub"], ["pi-01", "--key", "x.pub"]])
def test_an_approval_of_nobody_in_particular_is_2(thinwire, home, store, words):
    assert thinwire("devices", "approve", *words, "--home", home).code == 2


# Shutting out.


def test_with_the_aggregator_down_a_device_is_revoked_by_its_row(thinwire, home, tmp_path, store):
    told(home)
    store.roster.enrol("pi-01", KEY, b"key", "loopback")
    said = thinwire("devices", "revoke", "pi-01", "--home", home)
    assert said.code == 0
    assert "its aggregated updates stay in: toy-1 rounds 1–2" in said.out
    assert "before its device API opens" in said.err
    assert store.roster.rows()[0].state == "revoked"
    assert store.commands.pending() == []
    assert thinwire("devices", "revoke", "pi-77", "--home", home).code == 9
    store.roster.enrol("pi-09", b"another", b"key", "loopback")
    assert "no update of it is in a model" in thinwire("devices", "revoke", "pi-09", "--home", home).out


def test_a_running_aggregator_confirms_that_a_device_is_revoked(thinwire, home, store, device):
    def serve() -> dict[str, object]:
        while not (commands := store.commands.pending()):
            threading.Event().wait(0.01)
        store.commands.answer(commands[0].id, {"done": True, "rounds": {"digits-1": [3]}})
        return {"kind": commands[0].kind, "who": commands[0].who, **commands[0].args}

    with hold(AggregatorHome.under(home).lock, {"pid": os.getpid()}), ThreadPoolExecutor(1) as threads:
        command = threads.submit(serve)
        said = thinwire("devices", "revoke", "pi-01", "--json", "--home", home)
        assert command.result() == {"kind": "revoke", "who": operator(), "device": "pi-01", "fingerprint": KEY}
    assert said.document == {"name": "pi-01", "state": "revoked", "confirmed": True, "rounds": {"digits-1": [3]}}
    assert said.err == ""


def test_an_aggregator_that_does_not_confirm_is_said(thinwire, home, store, device, monkeypatch):
    monkeypatch.setattr("thinwire.cli.devices.commands.CONFIRMED_S", 0.0)
    with hold(AggregatorHome.under(home).lock, {"pid": os.getpid()}):
        said = thinwire("devices", "revoke", "pi-01", "--home", home)
    assert (said.code, "has not confirmed" in said.err) == (124, True)
    assert store.roster.rows()[0].state == "revoked"


def test_an_aggregator_that_is_starting_gets_the_command_too(thinwire, home, store, device, monkeypatch):
    """It may listen already."""
    monkeypatch.setattr("thinwire.cli.devices.commands.CONFIRMED_S", 0.0)
    lock = AggregatorHome.under(home).lock
    with hold(lock, {"pid": os.getpid(), DOWN_SINCE: 0.0}):
        assert may_serve(lock)
        said = thinwire("devices", "revoke", "pi-01", "--home", home)
    assert (said.code, "has not confirmed" in said.err) == (124, True)
    assert [command.args for command in store.commands.pending()] == [{"device": "pi-01", "fingerprint": KEY}]
    assert not may_serve(lock)


# Another name; the list; the log.


def test_a_device_gets_another_name(thinwire, home, store, device):
    assert thinwire("devices", "rename", "pi-01", "ward-3", "--home", home).code == 0
    assert [row.name for row in store.roster.rows()] == ["ward-3"]
    assert thinwire("devices", "rename", "pi-01", "ward-4", "--home", home).code == 9
    assert thinwire("devices", "rename", "ward-3", "Ward 3", "--home", home).code == 2


def test_the_list_shows_how_a_device_came_and_its_fingerprint(thinwire, home, store, device):
    said = thinwire("devices", "list", "--home", home)
    assert "loopback" in said.out
    assert KEY[:16] in said.out
    assert KEY not in said.out
    (document,) = thinwire("devices", "list", "--json", "--home", home).document
    assert (document["fingerprint"], document["how"], document["state"]) == (KEY, "loopback", "approved")


def test_a_device_is_shown_with_what_it_has_and_what_nobody_knows_is_called_unknown(thinwire, home, store, device):
    has = Equipment(4, 4 * 2**30, 2**30, mains=True)
    store.roster.seen(Hello("pi-01", "p1", versions={"python": "3.11"}, has=has), at=50.0)
    assert "4 cores, 1.0 of 4.0 GiB free, mains" in thinwire("devices", "list", "--home", home).out
    said = thinwire("devices", "show", "pi-01", "--home", home).out
    for name, value in (("cores", "4"), ("memory free", "1.0 GiB of 4.0 GiB"), ("power", "mains"), ("link", "unknown")):
        assert f"  {name:<12} {value}\n" in said
    document = thinwire("devices", "show", "pi-01", "--json", "--home", home).document
    assert document["has"] == {
        "cores": 4, "memory_bytes": 4 * 2**30, "free_bytes": 2**30, "mains": True, "metered": None,
    }  # fmt: skip
    assert document["versions"] == {"python": "3.11"}
    assert thinwire("devices", "show", "pi-02", "--home", home).code == 9


def test_a_device_is_shown_with_what_was_measured_of_its_link(thinwire, home, store, device):
    shown = thinwire("devices", "show", "pi-01", "--home", home).out
    assert all(f"  {name:<12} not measured\n" in shown for name in ("round trip", "upload", "download"))
    seen = [("rtt", 0.048, 0.061), ("up", 2.1e6, 1.4e6), ("down", None, None), ("step", 0.1, 0.2)]
    rows = [MeasureRow("pi-01", kind, "", [[40_000.0, 0.05]] * 3, p50, p90, 9.0) for kind, p50, p90 in seen]
    store.record(told(home), [RunNoted(9.0, noted(""))], [*rows, replace(rows[1], device="pi-02", p50=1.0)])
    shown = thinwire("devices", "show", "pi-01", "--home", home).out
    assert "  round trip   48 ms, nine of ten at most 61 ms (of the last 3)\n" in shown
    assert "  upload       2.1 Mb/s, nine of ten at least 1.4 Mb/s (of the last 3)\n" in shown
    assert "  download     too fast to be measured\n" in shown
    measured = thinwire("devices", "show", "pi-01", "--json", "--home", home).document["measured"]
    assert measured["up"] == {"p50": 2.1e6, "p90": 1.4e6, "samples": 3}
    assert set(measured) == {"rtt", "up", "down"}
    small = [replace(row, samples=[[370.0, 0.05]] * 3) for row in rows[1:3]]
    store.record("toy-1", [RunNoted(10.0, noted(""))], small)
    shown = thinwire("devices", "show", "pi-01", "--home", home).out
    assert "  upload       at least 2.1 Mb/s (too little was sent to tell, the last 3 times)\n" in shown
    assert "  download     too little was sent to tell\n" in shown


def test_a_device_is_shown_no_wider_than_the_terminal(thinwire, home, store, device, monkeypatch):
    row = MeasureRow("pi-01", "rtt", "", [[1.0, 0.05]] * 3, 0.048, 0.061, 9.0)
    store.record(told(home), [RunNoted(9.0, noted(""))], [row])
    monkeypatch.setattr("thinwire.cli.console.terminal_columns", lambda: 50)
    lines = thinwire("devices", "show", "pi-01", "--home", home).out.splitlines()
    assert max(map(len, lines)) <= 50
    at = lines.index("  round trip   48 ms, nine of ten at most 61 ms")
    assert lines[at + 1] == "               (of the last 3)"


def test_that_nobody_can_tell_who_is_online_is_said(thinwire, home, store, device):
    lock = AggregatorHome.under(home).lock
    with hold(lock, {}):
        assert thinwire("devices", "list", "--home", home).err == ""
    os.utime(lock, (T, T))
    said = thinwire("devices", "list", "--home", home).err
    since = f"no aggregator has been running since {moment(T)}: nobody can tell who is online; "
    assert said == f"{since}thinwire aggregator start --home {home}\n"
    assert thinwire("devices", "list", "--json", "--home", home).err == ""


def test_a_device_says_when_it_was_last_heard_of_and_not_when_it_came(thinwire, home, store, device):
    def heard():
        line = thinwire("devices", "list", "--home", home).out.splitlines()[1]
        (document,) = thinwire("devices", "list", "--json", "--home", home).document
        words = ("now", "10 min", "5 min")
        return next((word for word in words if f"  {word} " in line), line), document["last_seen_at"]

    now, lock = time.time(), AggregatorHome.under(home).lock
    store.record_device(DeviceOnline(now - 9000, "pi-01"))
    with hold(lock, {}):
        said, at = heard()
        assert said == "now"
        assert at is not None
        assert at >= now, "it calls all the time"
        store.record_device(DeviceOffline(now - 500, "pi-01", "its connection is closed", now - 600))
        assert heard() == ("10 min", now - 600)
        store.record_device(DeviceOnline(now - 400, "pi-01"))
    os.utime(lock, (now - 700, now - 700))
    assert heard()[1] == pytest.approx(now - 400), "it was heard after the lock was touched last"
    os.utime(lock, (now - 300, now - 300))
    assert heard() == ("5 min", pytest.approx(now - 300)), "as long as there was somebody to hear it"
    store.record_restart(time.time(), now - 300)
    with hold(lock, {}):
        assert heard() == ("5 min", now - 300)


@pytest.mark.parametrize(("ended_s", "times"), [(0.0, 1), (3 * SUSPECT_S, 2)])
def test_the_contacts_of_a_sampled_run_stay_hidden_when_it_is_deleted_at_once(thinwire, home, store, ended_s, times):
    lock, now = AggregatorHome.under(home).lock, time.time()
    contacts = {"pi-01": now - 5.0, "pi-02": now - 9.0}
    for name in contacts:
        store.roster.enrol(name, KEY + name, b"key", "loopback")
        store.record_device(DeviceOnline(now - 400, name))
    plan = RunPlan.parse(PRIVATE.replace("clients = 3\n", "") + "sampling_rate = 0.5\n")
    run_id = store.create_run("digits", plan, LAYOUT, TaskReport("digits"))
    store.record(run_id, [status("running"), status("done", now - ended_s)])
    store.mark_deleted(run_id, "operator")
    with hold(lock, {"listen": "127.0.0.1:1"}):
        lock.with_name(HEARD).write_text(json.dumps(contacts))
        listed = thinwire("devices", "list", "--json", "--home", home).document
        shown = [
            [one["last_seen_at"] for one in listed],
            thinwire("aggregator", "status", "--json", "--home", home).document["last_seen_at"].values(),
            [one.last_seen_at for one in Devices(store, lock).page()],
        ]
    assert [len({*found}) for found in shown] == [times] * 3


def test_who_came_over_loopback_waits_while_the_device_api_has_tls(thinwire, home, store, device):
    with hold(AggregatorHome.under(home).lock, {"pin": PIN}):
        assert "pending" in thinwire("devices", "list", "--home", home).out
        thinwire("devices", "approve", "pi-01", "--home", home)
        assert "pending" not in thinwire("devices", "list", "--home", home).out


def test_the_log_shows_who_did_what_and_what_the_device_api_refused(thinwire, home, store, device):
    thinwire("devices", "revoke", "pi-01", "--home", home)
    store.roster.note("invitation", "192.0.2.7", "expired (invitation 3)", "\x1b[2Jpi-03")
    said = thinwire("devices", "list", "--log", "--home", home)
    assert f"{operator()}" in said.out
    assert "expired (invitation 3)" in said.out
    assert "\x1b" not in said.out
    document = thinwire("devices", "list", "--log", "--json", "--home", home).document
    assert [action["what"] for action in document["actions"]] == ["revoke", "enrol"]
    assert document["refused"][0]["address"] == "192.0.2.7"


@pytest.mark.parametrize("words", [["approve", "a"], ["revoke", "a"], ["rename", "a", "b"], ["invite", "--list"]])
def test_where_no_aggregator_ever_was_nothing_is_made(thinwire, home, words):
    said = thinwire("devices", *words, "--home", home)
    assert (said.code, "aggregator start" in said.err) == (9, True)
    assert not AggregatorHome(Path(home) / "aggregator").database.exists()


def test_devices_whose_keys_a_device_reported_are_named_and_forgotten_only_with_yes(thinwire, home, store, device):
    run_id, (row,) = new_run(store), store.roster.rows()
    reserve(store, run_id, 1, devices=("pi-01",))
    store.record(run_id, [status("done")])
    store.roster.enrol("pi-02", "ab" * 32, b"another", "manual")
    store.roster.seen(Hello("pi-02", "p1", booked={population_key("ward"): 1}, booked_keys=(row.fingerprint,)), at=1.0)
    for name in ("pi-01", "pi-02"):
        store.roster.revoke(name)
    pinned = ec.generate_private_key(ec.SECP256R1()).public_key()
    (home / "roster.json").write_bytes(
        write_roster({"pi-02": pinned.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)})
    )
    refused = thinwire("devices", "forget", "pi-02", "--home", home)
    assert refused.code != 0
    assert "pi-02 is forgotten only together with pi-01" in refused.err
    assert "pi-02 --yes" in refused.err
    assert len(store.roster.rows()) == 2
    said = thinwire("devices", "forget", "pi-02", "--yes", "--home", home)
    assert said.code == 0
    assert "pi-01 is forgotten with it" in said.err
    assert "the installed roster still names pi-02: thinwire devices roster install" in said.err
    store.roster.refresh()
    assert store.roster.rows() == []


def test_a_revoked_device_is_forgotten_and_the_command_may_be_typed_again(thinwire, home, store, device):
    refused = thinwire("devices", "forget", "pi-01", "--home", home)
    assert refused.code != 0
    assert "thinwire devices revoke" in refused.err
    store.roster.revoke("pi-01", "me")
    said = thinwire("devices", "forget", "pi-01", "--json", "--home", home)
    assert said.code == 0
    assert said.document["pseudonym"].startswith("forgotten-")
    assert "backups, logs" in thinwire("devices", "forget", "--help").out
    assert [row.name for row in store.roster.rows()] == []
    again = thinwire("devices", "forget", "pi-01", "--home", home)
    assert (again.code, again.out) == (0, "nothing in the database names pi-01\n")
    assert "forget" in thinwire("devices", "list", "--log", "--home", home).out


# Tags.


def test_a_device_is_tagged_and_found_by_its_tags(thinwire, home, store, device):
    assert thinwire("devices", "tag", "pi-01", "+ward", "+arm", "--home", home).out == "pi-01  arm ward\n"
    assert thinwire("devices", "tag", "pi-01", "-arm", "--json", "--home", home).document["tags"] == ["ward"]
    assert thinwire("devices", "tag", "pi-01", "--home", home).out == "pi-01  ward\n"
    said = thinwire("devices", "tag", "pi-01", "+Ward", "--home", home)
    assert (said.code, "the tag 'Ward' is not valid" in said.err, "devices tag" in said.err) == (2, True, True)
    assert thinwire("devices", "tag", "pi-77", "+ward", "--home", home).code == 9
    assert "TAGS" in thinwire("devices", "list", "--home", home).out
    assert [one["name"] for one in thinwire("devices", "list", "--tag", "ward", "--json", "--home", home).document] == [
        "pi-01"
    ]
    none = thinwire("devices", "list", "--tag", "arm", "--home", home)
    assert (none.code, none.out, "no device has the tag arm" in none.err) == (0, "", True)


def test_the_status_counts_the_devices_that_are_approved(thinwire, home, store):
    for name, state in (("pi-01", "approved"), ("pi-02", "revoked")):
        store.roster.enrol(name, name * 8, name.encode(), "loopback")
        if state == "revoked":
            store.roster.revoke(name)
    with hold(AggregatorHome.under(home).lock, {"pid": os.getpid(), "listen": "127.0.0.1:9090"}):
        assert "devices  0 of 1 online" in thinwire("aggregator", "status", "--home", home).out
