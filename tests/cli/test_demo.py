"""The demo: its document, and that it leaves no process behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_aggregator import COMMAND, PATIENCE_S, processes_that_name, until
from tests.support.cli_story import round_events
from tests.support.fork_server import Forked, run_forked
from tests.support.processes import environment
from thinwire.aggregation import codecs
from thinwire.cli.demo.commands import folder, has_desktop, kind_of, plan_of
from thinwire.cli.demo.processes import Disturbance, roles
from thinwire.cli.demo.report import activation, sentences, spent_sentence, time_lines
from thinwire.core.errors import ThinwireError, UsageError
from thinwire.core.events import UpdateAccepted
from thinwire.core.plan_values import SecureSection
from thinwire.core.secure_numbers import fewest_survivors, protects
from thinwire.privacy.noise_plan import honest_survivors, noise_plan

KEYS = {
    "run_id", "clients", "rounds", "closed_reasons", "accuracy", "accuracy_uncompressed", "accuracy_centralised",
    "payload_bytes", "wire_bytes", "dense_bytes", "uplink_ratio", "late", "failed", "wall_s", "dashboard_url", "home",
    "versions",
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the demo makes its state directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [("darwin", "", True), ("linux", "", False), ("linux", "DISPLAY", True), ("linux", "WAYLAND_DISPLAY", True)],
)
def test_a_browser_opens_only_on_a_desktop(monkeypatch, platform, variable, expected):
    monkeypatch.setattr("sys.platform", platform)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, ":0")
    assert has_desktop() is expected


@pytest.mark.parametrize(
    ("device", "line"), [("client-2", []), ("client-1", ["       client-2 was not back yet when the run ended"])]
)
def test_it_says_if_the_killed_client_did_not_reply_again(device, line):
    done = list[str]()
    disturbance = Disturbance("client-2", 3, done.append, done.append)
    assert disturbance.end() == []
    (_, opened, accepted, *_) = round_events("toy-1", 3)
    assert isinstance(accepted, UpdateAccepted)
    disturbance.hear(opened)
    assert disturbance.look(time.monotonic() + 9) == ["       client-2 is started again"]
    disturbance.hear(replace(accepted, device=device))
    assert (done, disturbance.end()) == (["client-2", "client-2"], line)


def test_it_runs_by_itself_and_prints_one_document(place):
    command = [*COMMAND, "demo", "--clients", "3", "--rounds", "4", "--seed", "2", "--json", "--no-browser"]
    done = run_forked(command, 200, stdin=subprocess.DEVNULL, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS
    assert (found["clients"], found["rounds"], len(found["closed_reasons"])) == (3, 4, 4)
    assert found["uplink_ratio"] > 85
    assert not found["dashboard_url"].endswith(":8080"), "the default ports stay for an aggregator of the user's own"
    assert (
        found["payload_up_bytes"] < found["wire_up_bytes"]
    )  # down, an assignment that was never answered has no wire bytes
    assert 0.3 < found["accuracy"] < found["accuracy_centralised"] + 0.1
    assert sum(found["spent_s"].values()) == pytest.approx(found["rounds_s"], rel=0.02, abs=0.05)
    assert found["start_s"] + found["rounds_s"] + found["baselines_s"] < found["wall_s"]
    assert Path(found["home"]).is_dir()
    told = done.stderr.splitlines()
    killed = next(at for at, line in enumerate(told) if "is killed (kill -9) in round 2" in line)
    assert told[killed - 1].split()[0] == "1", "it is told behind the round before"
    assert "is started again" in done.stderr
    web = next(line for line in told if line.startswith("web "))
    assert f"{found['dashboard_url']}    (to log in: thinwire aggregator status --login --home" in web, "the run's page"
    assert found["dashboard_url"].endswith("/runs/digits-1")
    assert processes_that_name(found["home"]) == set()
    assert f"to remove them: rm -r {found['home']}" in done.stderr


def test_under_masks_it_says_what_was_protected_and_at_which_price(place):
    command = [*COMMAND, "demo", "--secure", "--clients", "4", "--rounds", "4", "--seed", "2", "--json"]
    done = run_forked(command, 200, stdin=subprocess.DEVNULL, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rounds"], found["status"]) == (4, "done")
    assert 0.3 < found["accuracy"] < found["accuracy_centralised"] + 0.1
    secure = found["secure"]
    assert secure["least_survivors"] in (3, 4), "one of the four is killed in round 2"
    assert secure["protection"].startswith("protects the updates of one round against an honest-but-curious aggregator")
    assert secure["client_up_bytes"] < secure["dense_update_bytes"] / 2
    assert found["wire_up_bytes"] > 4 * 3 * secure["client_up_bytes"], "the wire carries keys and shares too"
    assert found["wire_down_bytes"] > 3 * 3 * secure["dense_update_bytes"], "and the model"
    assert 0 < sum(secure["phases_s"].values()) <= found["rounds_s"]
    assert "is killed (kill -9) in round 2" in done.stderr


@pytest.mark.parametrize("words", [["--private"], ["--private", "--secure"]])
def test_a_private_demo_ends_with_the_epsilon_that_it_spent(place, words):
    command = [*COMMAND, "demo", *words, "--clients", "4", "--rounds", "2", "--seed", "2"]
    done = run_forked(command, 200, stdin=subprocess.DEVNULL, env=environment())
    assert done.returncode == 0, done.stderr
    said = " ".join(line.strip() for line in done.stdout.splitlines())
    spent = re.search(r"privacy +2 rounds spent epsilon ([\d.]+) at delta 0.001 of one client with all its data", said)
    assert spent is not None, said
    assert 7 < float(spent[1]) <= 8, "the noise is planned for an epsilon of 8"
    assert ("the aggregator included" in said) == ("--secure" in words)


def test_the_table_of_a_secure_demo_ends_in_the_protection_and_its_price():
    found = {
        "secure": {
            "protection": protects(SecureSection(max_corrupt=0.25), 4),
            "least_survivors": 3, "client_up_bytes": 14_000.4, "dense_update_bytes": 38_440,
        }
    }  # fmt: skip
    said = " ".join(line.strip() for line in sentences(found))
    assert "sums of 3 or more updates and no single one, for 14 kB a client and round" in said
    assert "where dense fp32 takes 38.4 kB" in said
    assert "1 of 4 clients colluding, and neither against poisoned updates nor" in said
    found["secure"]["client_up_bytes"] = None
    assert list(sentences(found)) == ["secure     No round had a sum, so the aggregator saw no update at all."]


def test_the_seconds_of_the_table_add_up():
    spent = {"train_s": 3.7, "waiting_s": 5.0, "load_s": 0.2, "store_s": 0.04, "step_s": 0.02}
    found = {"wall_s": 28.3, "rounds_s": 8.96, "start_s": 9.6, "baselines_s": 5.5, "spent_s": spent}
    assert list(time_lines(found)) == [
        "seconds    28 in all: 10 until round 1, 9 in rounds, 6 for comparison, 3 in all else",
        "           in rounds, along the slowest client: waiting 5.0, train 3.7, load 0.2, shorter stages 0.1",
    ]


def test_two_clients_are_no_secure_demo():
    with pytest.raises(UsageError) as refused:
        plan_of(4, 1, 2, secure=True)
    assert refused.value.hint == "--clients 3, or more"
    assert plan_of(4, 1, 3, secure=True).secure.enabled


def test_the_table_of_a_private_demo_ends_in_what_was_spent_for_whom_and_who_is_trusted():
    found = {"epsilon": 7.9991, "delta": 1e-3, "rounds": 20, "unit": "one client with all its data", "honest": None}
    said = " ".join(line.strip() for line in spent_sentence(found))
    assert "20 rounds spent epsilon 8 at delta 0.001 of one client with all its data, towards" in said
    assert said.endswith("the aggregator saw every update in the clear and is trusted to add the noise.")
    shared = " ".join(line.strip() for line in spent_sentence({**found, "honest": 16}))
    assert shared.endswith("and the cost counts on the noise of 16 honest clients in each of them.")
    assert "no bound on epsilon" in " ".join(spent_sentence({**found, "epsilon": None}))
    assert list(spent_sentence({**found, "rounds": 0})) == ["privacy    No round was opened, so nothing was spent."]


def test_a_private_demo_plans_its_noise_for_its_own_rounds():
    plan = plan_of(4, 1, 8, private=True)
    assert (kind_of(plan), plan.privacy.mode, plan.run.rounds, plan.cohort.wait_for) == ("private", "central", 4, 8)
    noise = {rounds: noise_plan(plan_of(rounds, 1, 8, private=True), 9610, 1) for rounds in (4, 20)}
    assert noise[4].noise_multiplier < noise[20].noise_multiplier
    for each in noise.values():
        assert each.epsilon(plan.privacy.delta) == pytest.approx(plan.privacy.target_epsilon, rel=1e-3)


def test_a_private_demo_under_masks_plans_its_noise_for_its_number_of_clients():
    plan = plan_of(4, 1, 8, secure=True, private=True)
    assert (kind_of(plan), plan.privacy.mode, plan.cohort.clients) == ("private-secure", "distributed", 8)
    assert not plan.check(codecs)
    with pytest.raises(UsageError):
        plan_of(4, 1, 2, secure=True, private=True)


@pytest.mark.parametrize("clients", [4, 6, 9, 10, 20])
def test_a_private_demo_under_masks_has_a_sum_of_the_round_in_which_a_client_is_killed(clients):
    plan = plan_of(4, 1, clients, secure=True, private=True)
    assert not plan.check(codecs)
    assert fewest_survivors(plan.secure, clients, noised=True) < clients
    assert honest_survivors(plan.secure, clients) < fewest_survivors(plan.secure, clients, noised=True), "one reads"
    with pytest.raises(UsageError, match="a sum needs 3"):
        plan_of(4, 1, 3, secure=True, private=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process_and_no_folder_behind(place, number):
    demo = Forked(
        [*COMMAND, "demo", "--clients", "2", "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert demo.stderr is not None
    for line in demo.stderr:
        if line.startswith("clients"):
            break
    until(lambda: demo.poll() is not None or len(processes_that_name(str(place))) >= 4, "not everything was started")
    assert demo.poll() is None, demo.stderr.read()
    demo.send_signal(number)
    assert demo.wait(PATIENCE_S) in (130, -number)  # a shell shows both as 128 + number
    _, said = demo.communicate()
    assert processes_that_name(str(place)) == set()
    assert list(place.glob("thinwire-demo-*")) == []
    assert "is removed" in said


def test_what_went_wrong_can_be_looked_at(place, capsys):
    with pytest.raises(ThinwireError), folder() as home:
        raise ThinwireError("client-2 ended by itself")
    assert home.is_dir()
    assert f"kept in {home}; to remove them: rm -r {home}" in capsys.readouterr().err


def test_who_cannot_type_thinwire_yet_is_told_what_makes_it_found(tmp_path, monkeypatch):
    (tmp_path / "a venv" / "bin").mkdir(parents=True)
    (tmp_path / "a venv" / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "a venv"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert activation() == ". 'a venv/bin/activate'"
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert activation() is None


def test_the_slow_one_and_the_killed_one_are_two():
    for count in range(2, 9):
        assert len(Counter(roles([f"client-{n}" for n in range(count)]))) == 2
