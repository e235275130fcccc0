"""`thinwire client status` and `logs`: what a device's owner is told."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from thinwire.client.calls import ClientStatus
from thinwire.client.policy import Policy
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import client_home, hold
from thinwire.privacy.pinned_roster import write_roster


def test_a_client_that_runs_says_since_when_and_what_it_keeps(thinwire, home):
    folder, now = client_home(home, "pi-03"), time.time()
    ClientStatus("working", now, now - 7200, "digits-7", 4, 3, "cannot reach it", now - 100, 86_400.0).save(folder)
    (folder / "runs" / "digits-7").mkdir(parents=True)
    (folder / "runs" / "digits-7" / "state.json").write_text(json.dumps({"outbox": [{}, {}]}))
    with hold(folder / "lock", {"aggregator": "https://agg.example:9090"}):
        (row,) = thinwire("client", "status", "--json", "--home", home).document
        said = thinwire("client", "status", "--home", home).out
    told = {"name": "pi-03", "running": True, "state": "working", "run": "digits-7", "round": 4, "pending": 2}
    assert told.items() <= row.items()
    assert (row["skew_s"], row["last_error"], row["aggregator"]) == (
        86_400,
        "cannot reach it",
        "https://agg.example:9090",
    )
    for word in ("2 h", "digits-7", "24 h behind the aggregator's"):
        assert word in said
    assert "cannot reach it" not in said, "the connection is good again"
    ClientStatus("offline", now, None, last_error="cannot reach it", last_error_at=now - 100).save(folder)
    assert "cannot reach it" in thinwire("client", "status", "--home", home).out


def test_a_name_that_is_not_here_is_told_beside_those_that_are(thinwire, home):
    for name in ("pi-1", "pi-2"):
        ClientStatus().save(client_home(home, name))
        with hold(home / "clients" / name / "lock", {}):
            pass
    for words in (("status",), ("privacy",), ("logs",), ("reload",), ("runs", "list")):
        said = thinwire("client", *words, "--name", "pi-9", "--home", home)
        assert (said.code, f"in {home / 'clients'} there are pi-1, pi-2" in said.err) == (9, True), said.err
    assert "--name pi-1" in thinwire("client", "logs", "--home", home).err
    (home / "clients" / "pi-2" / "lock").unlink()
    assert "pi-1 has taken part in no private round" in thinwire("client", "privacy", "--home", home).err


def test_a_machine_without_clients_says_so(thinwire, home):
    said = thinwire("client", "status", "--home", home)
    assert (said.code, said.out) == (0, "")
    assert f"no client was ever started in {home / 'clients'}" in said.err


def test_reload_signals_a_client_that_runs_and_refuses_one_that_does_not(thinwire, home, monkeypatch):
    folder, signalled = client_home(home, "pi-03"), []
    ClientStatus().save(folder)
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    with hold(folder / "lock", {"leaving": "pi-03"}):
        said = thinwire("client", "reload", "--home", home)
    assert (said.code, signalled) == (9, []), "a signal would end that command"
    with hold(folder / "lock", {"tasks": []}):
        said = thinwire("client", "reload", "--home", home)
    assert (said.code, signalled) == (0, [(os.getpid(), signal.SIGUSR1)]), said.err
    assert "pi-03 reads code and policy again" in said.err
    assert f"thinwire client logs --home {home} --name pi-03\n" in said.err
    said = thinwire("client", "reload", "--home", home)
    assert (said.code, len(signalled), "pi-03 is not running" in said.err) == (9, 1, True), said.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(ProcessLookupError, 9, "pi-03 is not running"), (PermissionError, 2, "pi-03 runs as another user")],
)
def test_a_client_that_cannot_be_signalled_is_not_said_to_reload(thinwire, home, monkeypatch, error, code, said):
    """It may end, or be another user's, between the look at its lock and the signal."""
    folder = client_home(home, "pi-03")
    ClientStatus().save(folder)

    def kill(pid: int, number: int) -> None:
        raise error

    with hold(folder / "lock", {"tasks": []}):
        monkeypatch.setattr(os, "kill", kill)
        found = thinwire("client", "reload", "--home", home)
    assert (found.code, said in found.err, "before its next assignment" in found.err) == (code, True, False), found.err
    assert "\ntry:   " in found.err


def test_the_owner_sees_what_the_policy_and_the_pinned_roster_demand_of_secure_rounds(thinwire, home, tmp_path):
    folder, key, roster, signed = (
        client_home(home, "pi-03"),
        *(tmp_path / name for name in ("k.pem", "r.json", "s.json")),
    )
    ClientStatus().save(folder)
    with hold(folder / "lock", {}):
        pass
    assert thinwire("client", "status", "--json", "--home", home).document[0]["secure"] == {}
    (folder / "client.toml").write_text('[policy]\nsecure = "required"\nmin_cohort = 10\n')
    assert thinwire("devices", "roster", "key", key).code == 0
    devices = {f"pi-{number}": ec.derive_private_key(number, ec.SECP256R1()).public_key() for number in (1, 2)}
    der = {name: key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for name, key in devices.items()}
    roster.write_bytes(write_roster(der))
    assert thinwire("devices", "roster", "sign", roster, "--key", key, "--out", signed).code == 0
    StartOptions({"roster": str(signed), "roster_key": f"{key}.pub"}).save(folder)
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert row["secure"] == {"secure": "required", "min_cohort": 10, "pinned": 2}
    said = "pi-03: its owner demands of secure rounds: secure = required, min_cohort = 10, a pinned roster of 2 devices"
    assert said in thinwire("client", "status", "--home", home).out
    signed.write_bytes(signed.read_bytes().replace(b"pi-2", b"pi-3"))
    (folder / "client.toml").write_text("[policy]\nmin_cohort = -1\n")
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert {name: text.partition(" (")[0] for name, text in row["secure"].items()}.keys() == {"policy", "roster"}


def test_the_owner_sees_what_the_policy_demands_of_private_rounds_and_of_work(thinwire, home):
    folder = client_home(home, "pi-03")
    ClientStatus().save(folder)
    with hold(folder / "lock", {}):
        pass
    (folder / "client.toml").write_text(
        '[policy]\nprivacy = ["distributed", "local"]\nmax_epsilon = 4\nmin_noise = 0.5\nrounds_a_day = 20\n'
        'hours = "22:00-06:00"\nhours_end_work = false\n'
    )
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert row["private"] == {"privacy": ["distributed", "local"], "max_epsilon": 4.0, "min_noise": 0.5}
    assert row["work"] == {"rounds_a_day": 20, "hours": "22:00-06:00", "hours_end_work": False}
    assert row["secure"] == {}
    said = thinwire("client", "status", "--home", home).out
    for line in (
        "its owner demands of private rounds: privacy = distributed or local, max_epsilon = 4, min_noise = 0.5",
        "its owner limits its work: rounds_a_day = 20, hours = 22:00-06:00, hours_end_work = false",
    ):
        assert f"pi-03: {line}\n" in said
    assert "secure rounds" not in said


def test_every_key_of_the_policy_is_shown_if_it_is_not_the_default(thinwire, home):
    other = {"tasks": ["t"], "kinds": ["train"], "secure": "required", "adversary": "malicious", "privacy": ["local"],
             "post_quantum": "required", "hours": "22:00-06:00",
             "hours_end_work": False, "metered": "refuse", "link": "metered",
             "power": "mains", "max_corrupt_assumed": 0.5, "max_delta": 0.5}  # fmt: skip
    values = {key: other.get(key, 3) for key in Policy.model_fields}
    folder = client_home(home, "pi-03")
    with hold(folder / "lock", {}):
        pass
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    (folder / "client.toml").write_text("\n".join(["[policy]", *lines]))
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert {**row["secure"], **row["private"], **row["work"]} == values


def test_a_client_starts_with_a_roster_and_the_key_of_its_owner_alone(thinwire, home, tmp_path):
    start = ("client", "start", "--aggregator", "http://127.0.0.1:9", "--task", "t=t.py", "--home", home)
    said = thinwire(*start, "--roster", tmp_path / "signed.json")
    assert (said.code, "--roster SIGNED.json --roster-key KEY.pem.pub" in said.err) == (2, True)
    said = thinwire(*start, "--roster", tmp_path / "signed.json", "--roster-key", tmp_path / "none.pub")
    assert (said.code, "cannot read" in said.err) == (2, True)


def test_what_a_client_was_doing_when_it_was_killed_is_not_taken_for_now(thinwire, home):
    folder = client_home(home, "pi-03")
    ClientStatus("working", 1.0, 1.0, "digits-7", 4).save(folder)
    with hold(folder / "lock", {}):
        pass
    (row,) = thinwire("client", "status", "--json", "--home", home).document
    assert (row["state"], row["connected_at"], row["run"]) == ("stopped", None, "digits-7")


def test_logs_of_a_client_that_said_nothing_are_empty(thinwire, home):
    ClientStatus().save(client_home(home, "pi-03"))
    said = thinwire("client", "logs", "--name", "pi-03", "--home", home)
    assert (said.code, said.out, "client.log" in said.err) == (0, "", True)
