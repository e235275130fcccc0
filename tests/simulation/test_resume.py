"""A simulation with a home goes on after it was killed, at any event, to the same bits as if never killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from tests.support.crashes import Fate, Killed, each_death
from tests.support.fork_server import run_forked
from tests.support.processes import environment
from tests.support.small_task import normed, plan_of, task_of
from thinwire import simulate
from thinwire.client.personal_files import saved_values
from thinwire.client.run_state import ClientRunState
from thinwire.core import RunPlan
from thinwire.core.errors import NotWritten, Refused
from thinwire.core.events import Event, RoundClosed, RoundOpened, RunStatusChanged
from thinwire.core.statedir import AggregatorHome, Held, own
from thinwire.server import command_queue
from thinwire.server.context import RunContext
from thinwire.server.run_deletion import delete_run
from thinwire.server.run_end import end_abandoned
from thinwire.simulation import History, storage
from thinwire.simulation.storage import SharedFolder, keep_personal_values, shared_folder
from thinwire.store import FileSpool, Store

SECTIONS = """
[cohort]
clients = 3
[uplink]
codec = "topk(0.3) > int8"
"""
PERSONAL = """
[local]
lr = 0.1
personal_layers = ["3.*"]
"""
BUFFERED = """
[cohort]
clients = "all"
mode = "buffered"
buffer = 2
[uplink]
codec = "topk(0.3) > int8"
"""


SECURE = """
[local]
lr = 0.1
steps = 2
buffers = "local"
[cohort]
clients = 3
deadline_s = 60
late = "drop"
[secure]
enabled = true
[run]
task = "small"
rounds = 2
evaluate = "off"
"""


def plan(sections: str = SECTIONS, rounds: int = 3) -> RunPlan:
    return RunPlan.from_json({**plan_of(run=f"rounds = {rounds}").to_json(), **tomllib.loads(sections)})


def run(home: Path | None, task: Any = None, **more: Any) -> History:
    task, made = task or task_of(normed), more.pop("plan", plan())
    return simulate(task, made, clients=5, home=home, step_s=[0.1] * 5, **more)


def remembering(model: Any, data: Any, context: Any) -> int:
    """Move all layers by how often this client has trained and by its own head, which both stay with it."""
    times = int(context.state.get("times", 0)) + 1
    context.state["times"] = times
    context.report("times", times)
    with torch.no_grad():
        own = model[3].bias.mean()
        for values in model.parameters():
            values += 0.01 * times + 0.1 * own
    return len(data)


class Moments:
    """Moments of a simulation: after each commit of the journal, of a client's state and of a reply in the spool."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fate = Fate()
        for owner, name in ((RunContext, "record"), (SharedFolder, "commit"), (FileSpool, "commit")):
            self._watch(patch, owner, name)

    def _watch(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        commit = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            found = commit(*arguments, **more)
            self.fate.here(name)
            return found

        patch.setattr(owner, name, counted)

    def kill(self, at: int, home: Path, plan: RunPlan) -> None:
        """Begin a simulation that is killed at this moment."""
        self.fate = Fate(at)
        with pytest.raises(Killed):
            run(home, plan=plan)
        self.fate = Fate()


@pytest.mark.parametrize(
    ("sections", "task"),
    [
        (SECTIONS, task_of(normed)),
        (BUFFERED, task_of(normed)),
        (PERSONAL + SECTIONS, task_of(normed, train=remembering)),
    ],
    ids=["sync", "buffered", "personal-layers-and-own-state"],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: str, task: Any
) -> None:
    moments = Moments(monkeypatch)
    whole = run(tmp_path / "whole", task, plan=plan(sections))
    last = len(moments.fate.places)
    assert last > 40

    def live(home: Path, fate: Fate) -> tuple[Path, History, int]:
        moments.fate = fate
        try:
            return home, run(home, task, plan=plan(sections)), 0
        except Killed:
            moments.fate = Fate()
            return home, run(home, task, plan=plan(sections)), len(fate.places)

    def check(again: tuple[Path, History, int], where: str) -> None:
        home, found, at = again
        assert found.run.model_digest == whole.run.model_digest, f"{where} of {last}"
        assert [row.train_metrics for row in found.rounds] == [row.train_metrics for row in whole.rounds], where
        is_over = at == last
        assert is_over or found.run.run_id == whole.run.run_id, "a second run was made, though the first was not over"
        folder = AggregatorHome.under(home).root / "simulated"
        left = {path.name for path in folder.rglob("*") if path.is_file()}
        if not sections.startswith(PERSONAL):
            assert not any(folder.iterdir()), "folders of clients stay"
            return
        assert left <= {"simulation.json", "small-1.safetensors", "small-2.safetensors"}, where
        for client in {row["client"] for row in whole.client_records()}:
            of_both = (one.model(client).state_dict()["3.bias"] for one in (found, whole))
            assert torch.equal(*of_both), where

    each_death(tmp_path, [*range(1, last, 5), last], live, check)


def test_a_full_disk_leaves_it_as_a_kill_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunContext.record

    def full(running: RunContext, *events: Event, **more: Any) -> None:
        if any(isinstance(event, RoundClosed) and event.round == 2 for event in events):
            raise NotWritten("cannot write the journal")
        record(running, *events, **more)

    with monkeypatch.context() as patched, pytest.raises(NotWritten):
        patched.setattr(RunContext, "record", full)
        run(tmp_path)
    again = run(tmp_path)
    assert (again.run.run_id, again.run.status) == ("small-1", "done")
    assert again.run.model_digest == run(None).run.model_digest


def test_a_secure_simulation_that_is_killed_aborts_its_open_round_and_makes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The secrets of its clients were in the memory of the process: in each phase, the round cannot be summed."""
    moments, secure = Moments(monkeypatch), RunPlan.parse(SECURE)
    run(tmp_path / "whole", plan=secure)
    aborted = 0
    for at in range(2, len(moments.fate.places), 9):
        moments.kill(at, tmp_path / str(at), secure)
        again = run(tmp_path / str(at), plan=secure)
        reasons = [row.reason for row in again.rounds]
        assert again.run.status == "done" and reasons.count("all") == 2, f"killed at moment {at}: {reasons}"
        assert set(reasons) <= {"all", "aborted"}
        aborted += "aborted" in reasons
    assert aborted > 1


KILLED = """
import os, signal, sys
from tests.simulation import test_resume
left = int(sys.argv[2])
def on_round(event):
    if event.round == left:
        os.kill(os.getpid(), signal.SIGKILL)
test_resume.run(__import__("pathlib").Path(sys.argv[1]), on_round=on_round)
"""


def test_after_kill_9_of_its_process_the_same_call_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = run_forked([sys.executable, str(script), str(tmp_path / "home"), "2"], 120.0, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    home = AggregatorHome.under(tmp_path / "home")
    with Store.open(home.database) as store:
        for _ in range(2):  # as each `thinwire runs list` does, and an aggregator every five seconds
            end_abandoned(store, home)
        found = [event.text for _, event in store.events("small-1") if isinstance(event, RunStatusChanged)]
        assert store.run("small-1").status == "waiting"
        assert sum("the same call or command goes on with it" in text for text in found) == 1
    begun = list[int]()
    again = run(tmp_path / "home", on_round=lambda event: begun.append(event.round))
    assert begun == [3], "closed rounds are not made again"
    assert again.run.model_digest == run(None).run.model_digest
    assert len(again.rounds) == 3 and again.model().state_dict().keys()


def test_another_plan_or_other_clients_begin_a_run_of_their_own(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(tmp_path, on_round=stop)
    other = run(tmp_path, plan=plan(rounds=2))
    assert other.run.run_id.endswith("-2")
    fewer = simulate(task_of(normed), plan(), clients=4, home=tmp_path, step_s=[0.1] * 4)
    assert fewer.run.run_id.endswith("-3")
    elsewhere = run(tmp_path, data=tmp_path)
    assert elsewhere.run.run_id.endswith("-4"), "clients with other data"
    wider = simulate(
        task_of(lambda: nn.Sequential(nn.Linear(4, 3))), plan(), clients=5, home=tmp_path, step_s=[0.1] * 5
    )
    assert wider.run.run_id.endswith("-5"), (
        "no client would have the model of the first run, and it would wait for ever"
    )
    assert run(tmp_path).run.run_id.endswith("-1")


def test_deleting_a_run_that_was_killed_and_stopped_deletes_its_clients(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(tmp_path, on_round=stop)
    home = AggregatorHome.under(tmp_path)
    assert list((home.root / "simulated" / "small-1" / "clients").glob("*/runs/small-1/residual-*")), "of each client"
    with Store.open(home.database) as store:
        store.commands.add("stop-run", "small-1")  # by a person at the dashboard
        end_abandoned(store, home)
        assert store.run("small-1").status == "stopped", "its process, which would carry the command out, has died"
        delete_run(store, home, "small-1", "ann")
    assert not (home.root / "simulated" / "small-1").exists()


def test_an_end_that_is_killed_loses_no_clients_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, removed = AggregatorHome.under(tmp_path / "home"), list[Path]()

    def remove(path: Path, ignore_errors: bool) -> None:
        removed.append(path)
        if len(removed) == dies_at:
            raise Killed
        rmtree(path, ignore_errors=ignore_errors)

    rmtree, dies_at = shutil.rmtree, 1
    monkeypatch.setattr(storage, "shutil", SimpleNamespace(rmtree=remove))
    with pytest.raises(Killed):
        run(tmp_path / "home", task_of(normed, train=remembering), plan=plan(PERSONAL + SECTIONS))
    folder, ends = home.simulation("small-1").parent, list[dict[str, Any]]()
    for dies_at in range(1, 20):
        copy = Path(shutil.copytree(folder, tmp_path / str(dies_at)))
        removed.clear()
        with contextlib.suppress(Killed):
            keep_personal_values(copy, "small-1")
        keep_personal_values(copy, "small-1")
        files = [path for path in copy.rglob("*") if path.is_file() and path.name != "simulation.json"]
        assert {path.name for path in files} == {"small-1.safetensors"}
        values = {path.parts[-3]: load_file(path) for path in files}
        ends.append({client: {name: one.tolist() for name, one in found.items()} for client, found in values.items()})
    assert len(removed) < dies_at, "the last one was not killed"
    assert all(end == ends[-1] for end in ends)
    assert all({"3.weight", "3.bias", "context/times"} <= set(values) for values in ends[-1].values())


@pytest.mark.parametrize("first", ["context-", "personal-"])
def test_a_kill_while_a_clients_files_are_removed_loses_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """A file system gives the files of a folder in any order, so any one of them may be gone already."""
    own, rmtree = tmp_path / "clients" / "sim-01", shutil.rmtree
    values, state = {"3.bias": np.ones(3, np.float32)}, {"times": np.full(1, 7)}
    shared_folder(own, "small-1").commit(ClientRunState(1, identity="beef", personal=values, context=state))
    (tmp_path / "spool").mkdir()

    def remove(path: Path, ignore_errors: bool) -> None:
        if path == own / "runs":
            (found,) = path.glob(f"small-1/{first}*")
            found.unlink()
            raise Killed
        rmtree(path, ignore_errors=ignore_errors)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(storage, "shutil", SimpleNamespace(rmtree=remove))
        keep_personal_values(tmp_path, "small-1")
    keep_personal_values(tmp_path, "small-1")
    assert [path.name for path in own.rglob("*")] == ["personal", "small-1.safetensors"]
    assert (found := saved_values(own, "small-1", "beef")) is not None
    assert ({**found.arrays}.keys(), {**found.context}.keys()) == (values.keys(), state.keys())


def test_the_values_of_a_state_of_which_another_file_is_damaged_stay(tmp_path: Path) -> None:
    own, ones = tmp_path / "clients" / "sim-01", np.ones(3, np.float32)
    shared_folder(own, "small-1").commit(ClientRunState(1, identity="beef", residual=ones, personal={"3.bias": ones}))
    next(own.glob("runs/small-1/residual-*")).write_bytes(b"")
    (tmp_path / "spool").mkdir()
    keep_personal_values(tmp_path, "small-1")
    assert saved_values(own, "small-1", "beef") is not None


@pytest.mark.parametrize("kind", ["stop-run", "stop-after-round"])
def test_a_command_to_stop_stays_until_it_has_taken_effect_also_over_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)
    record = RunContext.record

    def commanded(running: RunContext, *events: Event, **more: Any) -> None:
        if any(isinstance(event, RoundClosed) for event in events):
            raise Killed
        record(running, *events, **more)
        if any(isinstance(event, RoundOpened) for event in events):
            running.store.commands.add(kind, running.run_id)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(RunContext, "record", commanded)
        run(tmp_path)
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        assert [command.kind for command in store.commands.pending()] == [kind]
        again = run(tmp_path)
        assert (again.run.run_id, again.run.status, len(again.rounds)) == ("small-1", "stopped", 1)
        assert store.commands.pending() == []


def test_a_command_to_stop_that_comes_with_the_end_is_answered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_queue, "time", SimpleNamespace(monotonic=lambda: 1.0))  # no queue looks twice
    with Store.open(AggregatorHome.under(tmp_path).database) as store:
        run(tmp_path, plan=plan(rounds=1), on_round=lambda event: store.commands.add("stop-run", "small-1"))
        assert (store.run("small-1").status, store.commands.pending()) == ("done", [])


def test_what_a_client_commits_is_synced_as_the_journal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    run(tmp_path, plan=plan(rounds=1))
    of_clients = {path.partition("/runs/small-1/.")[2] for path in synced if "/simulated/small-1/clients/" in path}
    assert {"residual", "state", "1"} <= {name.partition(".")[0].partition("-")[0] for name in of_clients}


def test_a_run_that_another_process_has_or_may_have_is_refused(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(tmp_path, on_round=stop)
    home = AggregatorHome.under(tmp_path)
    (owner,) = home.root.glob("runs/*/.owner")
    with own(owner), pytest.raises(Refused, match="another process runs"):
        run(tmp_path)
    with own(owner, is_new=False), pytest.raises(Held), own(owner, is_new=False):  # both saw that its process had died
        raise AssertionError("two processes go on with one run")
    owner.write_text('{"pid": 7, "host": "another"}')
    with pytest.raises(Refused, match="nobody knows whether another machine still runs small-1") as refused:
        run(tmp_path)
    assert refused.value.hint.endswith("give the run up: thinwire runs stop small-1")
