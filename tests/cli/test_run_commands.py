"""`runs pause` and `resume`, and `aggregator config`: what a person commands, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server_bench import LAYOUT
from thinwire.cli.runs import run_commands
from thinwire.core import RunPlan
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import TaskReport
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
    assert (command.kind, command.run_id) == ("pause-run", run_id)


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
