"""`thinwire client doctor`: which step on the way fails, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.support.transport_doubles import place
from thinwire.cli.doctor.client import _disk, _policy
from thinwire.core.clock import RealClock
from thinwire.core.start_options import StartOptions
from thinwire.core.statedir import client_home, hold
from thinwire.transport.device.identity import device_key

TASK = ["--task", "digits=examples/digits/task.py"]
WAY = ["name", "tcp", "pin", "clock", "row"]


@pytest.fixture
def api(tmp_path):
    with place(tmp_path / "device_api", tls=True) as made:
        yield made


@pytest.fixture
def joined(thinwire, home, api):
    words = ["client", "join", api.url, api.invite().text(), "--name", "pi-03", "--home", home]
    assert thinwire(*words).code == 0
    return home / "clients" / "pi-03"


def looked(thinwire, home, *more):
    said = thinwire("client", "doctor", "--name", "pi-03", "--json", *more, "--home", home)
    return said.code, {row["what"]: row for row in said.document["findings"]}


def test_a_client_that_has_joined_is_ok_from_name_to_disk(thinwire, home, api, joined):
    code, found = looked(thinwire, home, *TASK)
    assert (code, list(found)) == (0, [*WAY, "task", "kernels", "policy", "disk"]), found
    assert "the CA that was joined" in found["pin"]["said"]
    assert found["row"]["said"].startswith("approved")
    assert "9,610 parameters" in found["task"]["said"]
    assert api.roster.hellos == []  # a client that runs is not disturbed by another hello
    shown = thinwire("client", "doctor", "--name", "pi-03", *TASK, "--home", home).out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("ok ")] == list(found)


def test_what_its_owner_limits_is_said_by_its_keys(thinwire, home, api, joined):
    found = looked(thinwire, home, *TASK)[1]
    assert found["policy"]["said"].startswith("max_assignment_minutes = 120, min_free_disk_mb = 500; no client.toml")
    assert found["disk"]["said"].endswith("min_free_disk_mb = 500 MB stay free")
    (joined / "client.toml").write_text('[policy]\nhours = "22:00-06:00"\nmin_free_disk_mb = 1000000000')
    code, found = looked(thinwire, home, *TASK)
    assert (code, found["disk"]["ok"], "min_free_disk_mb = 1000000000" in found["disk"]["said"]) == (1, False, True)
    assert 'hours = "22:00-06:00", hours_end_work = true' in found["policy"]["said"]
    (joined / "client.toml").write_text("[policy]\nmin_free_disk = 1")
    assert looked(thinwire, home, *TASK)[1]["policy"]["ok"] is False


@pytest.mark.parametrize(("state", "hint"), [("pending", "devices approve"), ("revoked", "devices approve")])
def test_a_row_that_may_not_is_found_with_its_key(thinwire, home, api, joined, state, hint):
    api.roster.put("pi-03", state)
    code, found = looked(thinwire, home, *TASK)
    assert (code, found["row"]["ok"], hint in found["row"]["try"]) == (1, False, True)
    assert api.roster.devices["pi-03"].fingerprint[:8] in found["row"]["said"]
    assert found["clock"]["ok"]


def test_a_key_that_is_not_known_is_told_to_join(thinwire, home, api, joined):
    api.roster.devices.clear()
    code, found = looked(thinwire, home, *TASK)
    assert (code, "thinwire client join" in found["row"]["try"]) == (1, True)


def test_an_aggregator_with_another_ca_is_not_believed(thinwire, home, api, joined, tmp_path):
    with place(tmp_path / "other", tls=True) as other:
        code, found = looked(thinwire, home, *TASK, "--aggregator", other.url)
    assert (code, found["tcp"]["ok"], found["pin"]["ok"], found["row"]["ok"]) == (1, True, False, None)
    assert found["pin"]["try"]


def test_who_has_not_joined_is_told_to(thinwire, home):
    code, found = looked(thinwire, home, *TASK, "--aggregator", "https://agg.example:9090")
    assert (code, "thinwire client join" in found["joined"]["try"], found["tcp"]["ok"]) == (1, True, None)
    assert not home.exists()


def test_a_port_where_nobody_listens_is_found(thinwire, home, api, joined):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{taken.getsockname()[1]}"
        code, found = looked(thinwire, home, *TASK, "--aggregator", url)
    assert (code, [found[what]["ok"] for what in WAY]) == (1, [True, False, None, None, None])


def test_a_full_disk_is_shown_with_the_reserve_of_the_policy(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("thinwire.cli.doctor.checks.tempfile.TemporaryFile", full)
    tmp_path.chmod(0o700)
    found = _disk(tmp_path, 1, 500)
    assert (found.ok, "min_free_disk_mb = 500 MB stay free" in found.said) == (False, True), found.said


def test_counts_of_another_format_are_found_with_what_to_do(tmp_path):
    (tmp_path / "policy.json").write_text('{"format": 4}')
    found, _ = _policy(tmp_path / "client.toml", tmp_path)
    assert (found.ok, "has format 4, and this program reads 3" in found.said) == (False, True), found.said
    assert found.try_.startswith("install the thinwire that wrote it")


def test_a_name_that_nobody_knows_is_found(thinwire, home, api, joined, monkeypatch):
    def unknown(*args, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    code, found = looked(thinwire, home, *TASK, "--aggregator", "https://agg.example:9090")
    assert (code, found["name"]["ok"], found["tcp"]["ok"]) == (1, False, None)


def test_the_proxy_is_named(thinwire, home, api, joined, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    code, found = looked(thinwire, home, *TASK, "--aggregator", "https://agg.example:9090")
    assert (code, "HTTPS_PROXY" in found["name"]["said"], found["tcp"]["ok"]) == (1, True, False)
    assert "by the proxy 127.0.0.1:1" in found["tcp"]["said"]


def test_a_clock_that_is_wrong_is_shown_and_lived_with(thinwire, home, tmp_path):
    class Tomorrow(RealClock):
        def wall(self):
            return super().wall() + 86_400

    with place(tmp_path / "device_api", tls=True, clock=Tomorrow()) as api:
        text = api.invite().text()
        assert thinwire("client", "join", api.url, text, "--name", "pi-03", "--home", home).code == 0
        code, found = looked(thinwire, home, *TASK)
    assert (code, found["clock"]["ok"], "timedatectl" in found["clock"]["try"]) == (0, True, True), found
    assert "behind the aggregator's" in found["clock"]["said"]


def test_a_task_that_is_not_usable_is_found_by_its_place(thinwire, home, api, joined, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def model():\n    raise ValueError\ndef data(client): ...\ndef loss(model, batch): ...\n")
    code, found = looked(thinwire, home, "--task", f"mine={broken}")
    assert (code, "broken.py:2" in found["task"]["said"]) == (1, True)
    code, found = looked(thinwire, home, "--task", f"mine={tmp_path / 'none.py'}")
    assert (code, found["task"]["ok"]) == (1, False)


def test_it_looks_at_what_the_last_start_was_typed_with(thinwire, home, api, joined):
    StartOptions({"task": ["digits=digits/task.py"]}, Path("examples").absolute()).save(joined)
    code, found = looked(thinwire, home)
    assert (code, "9,610 parameters" in found["task"]["said"]) == (0, True), found


def test_without_any_task_it_says_so(thinwire, home, api, joined, monkeypatch):
    monkeypatch.setattr("thinwire.client.task.installed_tasks", dict)
    code, found = looked(thinwire, home)
    assert (code, found["task"]["ok"]) == (1, False)


def test_a_client_that_is_still_starting_has_not_failed(thinwire, home, tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.client.task.installed_tasks", dict)
    with place(tmp_path / "plain") as plain:
        about = {"aggregator": plain.url, "tasks": ["digits=task.py"], "name": "pi-03"}
        with hold(client_home(home, "pi-03") / "lock", about):
            code, found = looked(thinwire, home)
    assert (code, found["tcp"]["ok"], found["task"]["ok"]) == (0, True, None), found
    assert (found["task"]["said"], found["task"]["try"]) == (
        f"process {os.getpid()} is still starting",
        "try again in a moment",
    )


def test_on_a_plain_device_api_the_first_start_makes_the_row(thinwire, home, tmp_path):
    with place(tmp_path / "plain") as plain:
        code, found = looked(thinwire, home, *TASK, "--aggregator", plain.url)
        assert (code, found["row"]["ok"], "first start" in found["row"]["said"]) == (0, None, True)
        device_key(client_home(home, "pi-03"))
        code, found = looked(thinwire, home, *TASK, "--aggregator", plain.url)
        assert (code, found["row"]["ok"], "first start" in found["row"]["said"]) == (0, True, True)


def test_the_task_is_looked_at_by_the_python_that_would_train(thinwire, home, api, joined, tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o700)
    before = sorted(path.name for path in joined.iterdir())
    StartOptions({"task": [TASK[1]], "python": str(other)}).save(joined)
    code, found = looked(thinwire, home)
    assert (code, found["task"]["said"].endswith(f"trained by {other}")) == (0, True), found
    assert sorted(path.name for path in joined.iterdir()) == sorted([*before, "start.json"])
    other.write_text("#!/bin/sh\n")
    code, found = looked(thinwire, home)
    assert (code, "does not run" in found["task"]["said"]) == (1, True)
