"""The seed, the devices' names and the round decide a run's draws; its own name, the path, the time and the process do
not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import nn

from tests.support.small_task import plan_of, task_of
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation.run import run_sim
from thinwire.store import Store

ROOT = Path(__file__).parents[2]
MODES = [
    ("[cohort]\nclients = 3\nover_select = 1", "rounds = 4\nseed = 7"),
    ('[cohort]\nmode = "buffered"\nbuffer = 2\nmax_concurrency = 3', "rounds = 4\nseed = 7"),
]
ALL = [(*mode, codec) for mode, codec in zip(MODES, ("eden(1)", "int8"), strict=True)]


def hidden() -> nn.Module:
    """A layer that is large enough to be compressed."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 3))


def digests(folder: Path, text: str, run: str, codec: str, count: int) -> list[tuple[str, str]]:
    """(name, digest of the last model) of several runs of one plan in one store."""
    home, made = AggregatorHome.under(folder, durable=False), list[tuple[str, str]]()
    plan = plan_of(text, codec=codec, run=run)
    with Store.open(home.database, durable=False) as store:
        for _ in range(count):
            run_id = run_sim(
                plan, task_of(hidden), store=store, home=home, clients=5, client=ClientInfo(seed=7), step_s=[0.1] * 5
            )
            made.append((run_id, store.run(run_id).model_digest))
    return made


@pytest.mark.parametrize(("text", "run", "codec"), ALL)
def test_runs_of_other_names_and_times_give_byte_equal_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, run: str, codec: str
) -> None:
    (name, digest), (other_name, other_digest) = digests(tmp_path / "one", text, run, codec, 2)
    assert name != other_name
    assert other_digest == digest
    later = time.time() + 12_345.678_9
    monkeypatch.setattr(time, "time", lambda: later)
    assert digests(tmp_path / "elsewhere", text, run, codec, 1) == [(name, digest)]


def test_a_process_with_other_hashes_gives_the_same_bits(tmp_path: Path) -> None:
    text, run, codec = ALL[0]
    there = f"""
from pathlib import Path
from tests.simulation.test_any_name_same_bits import digests
print(digests(Path({str(tmp_path / "there")!r}), {text!r}, {run!r}, {codec!r}, 1)[0][1])
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(
        [sys.executable, "-c", there], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digests(tmp_path / "here", text, run, codec, 1)[0][1]]
