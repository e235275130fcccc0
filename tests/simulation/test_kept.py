"""A simulation with a home goes on after it was killed, at any event, to the same bits as if never killed."""

from __future__ import annotations

import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import run_forked
from tests.support.processes import environment
from tests.support.small_task import normed, plan_of, task_of
from thinwire import simulate
from thinwire.core import RunPlan
from thinwire.core.errors import Refused
from thinwire.core.events import Event
from thinwire.core.statedir import AggregatorHome, own
from thinwire.server.context import RunContext
from thinwire.simulation import History
from thinwire.simulation.client_folders import SharedFolder
from thinwire.simulation.kept import FOLDER
from thinwire.store import FileSpool

SECTIONS = """
[cohort]
clients = 3
[uplink]
codec = "topk(0.3) > int8"
"""
BUFFERED = """
[cohort]
clients = "all"
mode = "buffered"
buffer = 2
[uplink]
codec = "topk(0.3) > int8"
"""


class Killed(BaseException):
    """Ends the process of a simulation, in this one."""


def plan(sections: str = SECTIONS, rounds: int = 3) -> RunPlan:
    return RunPlan.from_json({**plan_of(run=f"rounds = {rounds}").to_json(), **tomllib.loads(sections)})


def run(home: Path | None, **more: Any) -> History:
    return simulate(task_of(normed), more.pop("plan", plan()), clients=5, home=home, step_s=[0.1] * 5, **more)


@pytest.mark.parametrize("sections", [SECTIONS, BUFFERED], ids=["sync", "buffered"])
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: str
) -> None:
    """The moments: after each commit of the journal, of a client's state and of a reply in the spool."""
    passed, dies_at = 0, sys.maxsize

    def watched(owner: type, name: str) -> None:
        commit = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal passed
            found = commit(*arguments, **more)
            passed += 1
            if passed == dies_at:
                raise Killed
            return found

        monkeypatch.setattr(owner, name, counted)

    watched(RunContext, "record")
    watched(SharedFolder, "commit")
    watched(FileSpool, "commit")
    whole = run(tmp_path / "whole", plan=plan(sections))
    moments, ids = passed, list[str]()
    assert moments > 40
    for at in range(1, moments + 1, 3):
        home = tmp_path / str(at)
        passed, dies_at = 0, at
        with pytest.raises(Killed):
            run(home, plan=plan(sections))
        dies_at = sys.maxsize
        again = run(home, plan=plan(sections))
        assert again.run.model_digest == whole.run.model_digest, f"killed at moment {at} of {moments}"
        ids.append(again.run.run_id)
        assert not any((AggregatorHome.under(home).root / FOLDER).iterdir()), "folders of clients stay"
    assert set(ids[:-1]) == {whole.run.run_id}, "a second run was made, though the first was not over"


KILLED = """
import os, signal, sys
from tests.simulation import test_kept
left = int(sys.argv[2])
def on_round(event):
    if event.round == left:
        os.kill(os.getpid(), signal.SIGKILL)
test_kept.run(__import__("pathlib").Path(sys.argv[1]), on_round=on_round)
"""


def test_after_kill_9_of_its_process_the_same_call_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = run_forked([sys.executable, str(script), str(tmp_path / "home"), "2"], 120.0, env=environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
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
    assert run(tmp_path).run.run_id.endswith("-1")


def test_a_run_that_another_process_has_is_refused(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        raise Killed

    with pytest.raises(Killed):
        run(tmp_path, on_round=stop)
    home = AggregatorHome.under(tmp_path)
    (owner,) = home.root.glob("runs/*/.owner")
    with own(owner), pytest.raises(Refused, match="another process runs"):
        run(tmp_path)
