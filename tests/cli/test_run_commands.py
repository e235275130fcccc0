"""`runs pause` and `resume`, and `aggregator config`: what a person commands, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_story import told
from tests.support.server_bench import LAYOUT
from thinwire.cli.local_state import operator
from thinwire.cli.runs import run_commands
from thinwire.core import RunPlan
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import TaskReport
from thinwire.core.start_options import StartOptions
from thinwire.store import Store

PLAN = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 1')


@pytest.fixture
def run_id(store: Store) -> str:
    made = store.create_run("toy", PLAN, LAYOUT, TaskReport("toy"))
    store.record(made, [RunStatusChanged(1.0, "running", "round 1, step 1 of 20")])
    return made


@pytest.fixture(autouse=True)
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_commands, "WAIT_S", 0.0)


def test_without_an_aggregator_the_command_stays_and_that_is_said(thinwire, home: Path, store: Store, run_id: str):
    said = thinwire("runs", "pause", run_id, "--home", home)
    assert (said.code, said.out.strip()) == (
        0, f"{run_id} running: its aggregator will pause it when its open round closes",
    )  # fmt: skip
    (command,) = store.commands.pending()
    assert (command.kind, command.run_id, command.who) == ("pause-run", run_id, operator())


@pytest.mark.parametrize("words", ["pause", "stop", "stop --after-round"])
def test_nobody_waits_for_an_aggregator_that_is_down_and_how_to_start_it_is_said(
    thinwire, home: Path, store: Store, run_id: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_commands, "WAIT_S", 600.0)
    StartOptions({"listen": "0.0.0.0:9443"}).save(home / "aggregator")
    said = thinwire("runs", *words.split(), run_id, "--home", home)
    assert said.code == 0
    assert said.err == f"no aggregator is running: thinwire aggregator start --listen 0.0.0.0:9443 --home {home}\n"


def test_a_paused_run_is_resumed_by_a_command(thinwire, home: Path, store: Store, run_id: str):
    store.record(run_id, [RunStatusChanged(2.0, "paused", "paused by a person after 1 of 20 rounds")])
    said = thinwire("runs", "pause", run_id, "--json", "--home", home)
    assert said.document == {"run_id": run_id, "status": "paused"}
    thinwire("runs", "resume", run_id, "--home", home)
    assert [command.kind for command in store.commands.pending()] == ["pause-run", "resume-run"]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_run_that_is_over_is_refused(thinwire, home: Path, store: Store, run_id: str, verb: str):
    store.record(run_id, [RunStatusChanged(2.0, "done", "20 rounds")])
    said = thinwire("runs", verb, run_id, "--home", home)
    assert (said.code, f"{run_id} has nothing to {verb}\nwhy:   it is done" in said.err) == (5, True), said.err
    ways = (f"thinwire runs extend --home {home} {run_id} --rounds N", f"thinwire runs clone --home {home} {run_id}")
    assert f"try:   more rounds: {ways[0]}; from the start: {ways[1]}" in said.err
    assert not store.commands.pending()


def test_a_run_that_is_not_paused_is_not_resumed(thinwire, home: Path, store: Store, run_id: str):
    said = thinwire("runs", "resume", run_id, "--home", home)
    assert (said.code, f"{run_id} is not paused\nwhy:   it is running" in said.err) == (5, True), said.err


def test_the_settings_are_shown_with_where_they_came_from(thinwire, home: Path, store: Store):
    shown = thinwire("aggregator", "config", "--home", home, "--json").document["settings"]
    assert shown[0] == {"key": "max_runs", "value": 4, "from": "default"}
    assert {"key": "allow", "value": [], "from": "default"} in shown
    (home / "aggregator.toml").write_text("max_runs = 2\n")
    lines = thinwire("aggregator", "config", "--home", home).out.splitlines()
    assert ["max_runs", "2", "aggregator.toml"] in [line.split()[:3] for line in lines]
    assert thinwire("aggregator", "config", "show", "--home", home).out.splitlines() == lines
    (home / "aggregator.toml").write_text("max_run = 2\n")
    said = thinwire("aggregator", "config", "--home", home)
    assert said.code == 3
    assert "unknown key max_run\nwhy:   a file has the keys max_runs, " in said.err


def test_a_setting_is_shown_as_the_file_has_it_and_one_without_a_value_as_not_set(thinwire, home: Path, store: Store):
    (home / "aggregator.toml").write_text('allow = ["digits"]\n')
    lines = [line.split() for line in thinwire("aggregator", "config", "--home", home).out.splitlines()]
    assert ["allow", '["digits"]', "aggregator.toml"] in lines
    assert ["alerts.email_to", "[]", "default"] in lines
    assert ["keep_days", "not", "set", "default"] in lines
    assert ["alerts.smtp", '"localhost:25"', "default"] in lines


def test_a_comparison_to_a_target_says_once_what_is_reached_and_nothing_of_seeds(
    thinwire, home: Path, store: Store, run_id: str
):
    store.record(run_id, [RunStatusChanged(2.0, "done", "20 rounds")])
    other = store.create_run("toy", PLAN, LAYOUT, TaskReport("toy"))
    store.record(other, [RunStatusChanged(2.0, "stopped", "stopped by a person")])
    said = thinwire("runs", "compare", run_id, other, "--to", "accuracy=0.9", "--home", home)
    assert said.err.splitlines() == [
        "reached, and what follows it: to accuracy at least 0.9",
        "stopped or failed: what they sent and took is of a part of their plan",
    ]


def test_a_run_of_devices_and_a_simulated_one_differ_by_their_clients_and_not_by_a_split(thinwire, home: Path):
    names = [told(home), told(home, source="sim")]
    said = thinwire("runs", "compare", *names, "--home", home).out.split("\n")[0]
    assert ("CLIENTS" in said, "SPLIT" in said) == (True, False)
