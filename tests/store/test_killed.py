from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.fork_server import Forked
from tests.support.processes import environment
from tests.support.store_agreement import assert_is_replayed, assert_sums_agree
from tests.support.store_story import new_run
from thinwire.core.events import RoundOpened
from thinwire.store import Store

STEPS = (*range(1, 40, 2), 50, 63, 77)  # a round is some sixty statements and five commits


def test_killed_at_any_step_journal_and_tables_agree_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with Store.open(path) as store:
        run_id = new_run(store)
    command = [sys.executable, "-m", "tests.support.dying", str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Forked(command, env=environment(), **pipes) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for step in STEPS:
            print(step, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == f"SIGKILL {step}\n"
            with Store.open(path) as store:
                assert_sums_agree(store, run_id)
                journalled = [e.round for _, e in store.events(run_id) if isinstance(e, RoundOpened)]
                rounds = store.rounds(run_id)
                assert journalled == [row.round for row in rounds]
                assert journalled == [entry.round for entry in store.privacy.rows("ward")]
                ends = ["reserved" if row.closed_at is None else "committed" for row in rounds]
                assert ends == [entry.state for entry in store.privacy.rows("ward")]
                assert store.privacy.spent_by_device("ward", ["pi-01"])["pi-01"].get("{}", 0) == len(rounds)
        writer.stdin.close()
        assert writer.wait(60) == 0
    with Store.open(path) as store:
        assert len(store.rounds(run_id)) > 3
        assert_is_replayed(store, run_id)
