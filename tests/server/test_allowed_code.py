"""A run from the dashboard goes on only while `aggregator.toml` allows the code that its plan names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.server.test_run_notices import serves
from tests.support.server_bench import Bench, three
from tests.support.several_runs import Site, steady
from thinwire.aggregation import ServerOptimizer
from thinwire.core.errors import PlanError
from thinwire.core.events import Event, RoundClosed, RoundOpened
from thinwire.core.types import State, Vector
from thinwire.server import command_queue
from thinwire.server.run_extension import extend_run
from thinwire.server.submit import start
from thinwire.store import START_RUN, Store
from thinwire.store.read_models import CommandRow


@dataclass(frozen=True)
class HalfStep(ServerOptimizer):
    lr: float = 1.0

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        return params + np.float32(self.lr / 2) * change, {}


PLACE = f"{__name__}:HalfStep"
REFUSED = f"[server] optimizer names '{PLACE}'"


def allow(site: Bench | Site, *patterns: str) -> None:
    (site.home.root.parent / "aggregator.toml").write_text(f"allow = {list(patterns)}\n")


def commanded(site: Bench | Site, **run: Any) -> str:
    """Command a run with an optimizer of this file, which begins with the last model of another run."""
    plan = {"run": {"task": "toy", "rounds": 3, **run}, "local": {"lr": 0.5}, "server": {"optimizer": PLACE}}
    number = site.store.commands.add(START_RUN, args={"plan": plan})
    return start(site.store, site.home, next(one for one in site.store.commands.pending() if one.id == number))


def refusal(store: Store, run_id: str) -> tuple[str, int, bool]:
    row = store.run(run_id)
    return row.status, row.rounds_closed, row.status_text.startswith(REFUSED)


def test_a_restart_ends_it_and_no_command_gives_it_more_rounds(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    allow(bench, "*:HalfStep")
    run_id = commanded(bench, init=f"run:{bench.run_id}@0")
    serves(bench, 60.0, kill=lambda event: isinstance(event, RoundClosed) and event.round == 2)
    assert bench.store.run(run_id).rounds_closed == 2
    allow(bench, "other:*")
    serves(bench, 60.0)
    assert refusal(bench.store, run_id) == ("failed", 2, True)
    assert bench.store.run(bench.run_id).status == "done", "a run of no such code goes on"
    command = CommandRow(1, "extend-run", run_id, {"rounds": 1}, "operator", 0.0)
    with pytest.raises(PlanError, match="aggregator.toml does not allow it"):
        extend_run(bench.store, bench.home, command)
    allow(bench, "*:HalfStep")
    assert extend_run(bench.store, bench.home, command).status == "queued"


def test_a_pause_ends_it_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    site = Site(tmp_path, steady({"a": 1.0}))
    first = site.submit(run={"rounds": 1})
    allow(site, "*:HalfStep")
    site.runs.append(run_id := commanded(site, init=f"run:{first}@0"))

    def on_event(of: str, event: Event) -> None:
        if of == run_id and isinstance(event, RoundClosed) and event.round == 1:
            allow(site)
            for kind in ("pause-run", "resume-run"):
                site.store.commands.add(kind, run_id)

    site.on_event = on_event
    site.serve(seconds=100.0)
    assert refusal(site.store, run_id) == ("failed", 1, True)
    assert not site.store.commands.pending()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_typo_in_the_file_keeps_a_paused_run_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    site = Site(tmp_path, steady({"a": 1.0}))
    first = site.submit(run={"rounds": 1})
    allow(site, "*:HalfStep")
    site.runs.append(run_id := commanded(site, init=f"run:{first}@0"))
    commands = list[int]()

    def on_event(of: str, event: Event) -> None:
        if of == run_id and isinstance(event, RoundClosed) and event.round == 1:
            site.store.commands.add("pause-run", run_id)
            (site.home.root.parent / "aggregator.toml").write_text("alow = []")
            if not restarts:
                commands.append(site.store.commands.add("resume-run", run_id))

    site.on_event = on_event
    site.serve(seconds=100.0)
    if restarts:
        commands.append(site.store.command_run("resume", run_id))
        site.serve(seconds=100.0)
    row = site.store.run(run_id)
    assert (row.status, row.rounds_closed) == ("paused", 1)
    assert "alow" in row.status_text
    assert row.status_text.endswith(f"correct that file, then: thinwire runs resume {run_id}")
    answered = site.store.commands.result(commands[0])
    assert answered is not None
    assert answered["done"] == restarts, "without a driver the run was queued first"
    allow(site, "*:HalfStep")
    site.store.command_run("resume", run_id)
    site.serve(seconds=100.0)
    assert site.store.run(run_id).status == "done"


def test_a_typo_at_a_restart_keeps_the_open_round_which_then_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    allow(bench, "*:HalfStep")
    run_id = commanded(bench, init=f"run:{bench.run_id}@0")
    serves(bench, 60.0, kill=lambda event: isinstance(event, RoundOpened) and event.round == 2)
    (bench.home.root.parent / "aggregator.toml").write_text("alow = []")
    serves(bench, 60.0)
    assert bench.store.run(run_id).status == "paused"
    opened = bench.store.rounds(run_id)[-1]
    assert (opened.round, opened.closed_at) == (2, None)
    allow(bench, "*:HalfStep")
    bench.store.command_run("resume", run_id)
    serves(bench, 60.0)
    assert bench.store.run(run_id).status == "done"
    again = bench.store.rounds(run_id)[1]
    assert (again.opened_at, again.selected) == (opened.opened_at, opened.selected), "the same round, with its clients"
    assert len(again.aggregated) == len(again.selected)


def test_the_file_of_a_first_model_is_not_asked_for_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    file = tmp_path / "first.safetensors"
    save_file({"w": np.ones((30, 20), np.float32), "b": np.zeros(20, np.float32)}, file)
    allow(bench, str(file), "*:HalfStep")
    run_id = commanded(bench, init=str(file))
    allow(bench, "*:HalfStep")
    serves(bench, 60.0)
    assert bench.store.run(run_id).status == "done"


RULE = """
from pathlib import Path
from thinwire.aggregation import CoordinateWise
Path(__file__).with_name("executed").touch()
class Rule(CoordinateWise):
    def of_block(self, rows):
        return rows[0]
"""


@pytest.mark.parametrize("key", ["reduce", "optimizer"])
def test_a_file_that_a_plan_of_the_api_names_is_executed_only_if_it_is_allowed(tmp_path: Path, key: str) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1}, uplink={"codec": "identity"})
    file = tmp_path / "rules" / "rule.py"
    file.parent.mkdir()
    file.write_text(RULE)
    run = {"task": "toy", "rounds": 1, "init": f"run:{bench.run_id}@0"}
    server, cohort = {key: f"{file}:Rule"}, {"wait_for": 3, "late": "drop"}
    plan = {
        "run": run, "local": {"lr": 0.5}, "server": server, "cohort": cohort, "uplink": {"codec": "identity"},
    }  # fmt: skip

    def begin() -> str:
        number = bench.store.commands.add(START_RUN, args={"plan": plan})
        return start(bench.store, bench.home, next(one for one in bench.store.commands.pending() if one.id == number))

    for patterns in ((), ("/elsewhere/*",)):
        allow(bench, *patterns)
        with pytest.raises(PlanError, match="aggregator.toml does not allow it"):
            begin()
    assert not (file.parent / "executed").exists()
    allow(bench, f"{file}:Rule")
    if key == "optimizer":  # a reduction is none, which is known after the import
        with pytest.raises(PlanError, match="is no server optimizer"):
            begin()
    else:
        run_id = begin()
        serves(bench, 60.0)
        assert bench.store.run(run_id).status == "done"
    assert (file.parent / "executed").exists()
