"""The trackers with their own packages, offline: one row a round, also after the follower was killed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import EXAMPLE, Site
from tests.support.small_task import plan_of, task_of
from thinwire.cli.runs.track import follow, opener
from thinwire.client import ClientInfo
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import run_sim
from thinwire.store import Store

STEPS = [1, 2, 3, 4]
WRITTEN_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages: they warn of each other


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    made = AggregatorHome.under(tmp_path_factory.mktemp("tracked"))
    with Store.open(made.database) as store:
        run_sim(plan_of(run="rounds = 4"), task_of(), store=store, home=made, clients=2, client=ClientInfo())
    return made


def copied(home: AggregatorHome, to: str, place: str) -> list[float]:
    """Copy with a follower that is killed after round 2, then with another one; return the losses of the run."""
    opening = opener(to, place)
    with Store.open(home.database) as store:
        run = store.run("latest")
        tracker = opening(run)
        add: Any = tracker.add

        def dies(step: int, row: Any, at: float) -> None:
            add(step, row, at)
            if step == 2:
                raise Killed

        tracker.add = dies  # type: ignore[method-assign]
        with pytest.raises(Killed):
            list(follow(store, run.run_id, lambda: tracker, lambda seconds: None))
        said = list(follow(store, run.run_id, lambda: opening(run), lambda seconds: pytest.fail("it waits")))
        assert said == ["4 rounds copied, done"]
        return [row.metrics["loss"] for row in store.rounds(run.run_id)]


BLOCK, HEAD, FULL, FIRST, LAST = 32768, 7, 1, 2, 4


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run's file: LevelDB's log format behind a header of 7 bytes."""
    at, record = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind not in range(FULL, LAST + 1) or at + HEAD + length > len(data):
            return
        part = data[at + HEAD : at + HEAD + length]
        record = part if kind in (FULL, FIRST) else record + part
        if kind in (FULL, LAST):
            yield record
        at += HEAD + length


def written(folder: Path) -> dict[int, float] | None:
    """Return the loss of each step in the offline files; None before wandb's own process has written the end of a run.

    `finish()` may return earlier than that on a busy machine.
    """
    from wandb.proto import wandb_internal_pb2

    rows: dict[int, float] = {}
    ended = False
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ended = ended or record.HasField("exit")
            if record.HasField("history"):
                row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
                rows[int(row["_step"])] = row["loss"]
    return rows if ended else None


def test_tensorboard_has_one_event_a_round(home: AggregatorHome, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = copied(home, "tensorboard", str(tmp_path))
    found = EventAccumulator(str(tmp_path / "small-1")).Reload().Scalars("loss")
    assert [one.step for one in found] == STEPS
    assert [one.value for one in found] == pytest.approx(losses, rel=1e-6)


def losses_on_the_board(log: Path, boards: Path) -> list[int]:
    """Wait for a follower, which is a process of its own, and return the steps that TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    until = time.monotonic() + WRITTEN_S
    while "2 rounds copied, done" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.2)
    (folder,) = boards.iterdir()
    return [one.step for one in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def test_a_simulation_with_track_starts_a_follower_that_copies_its_rounds(tmp_path: Path) -> None:
    task = Path(__file__).parents[2] / "examples/own_training"
    words = ["sim", str(task / "plan.toml"), "--clients", "2", "--set", "run.rounds=2", "--home", "state"]
    command = [sys.executable, "-m", "thinwire.cli", *words, "--track", "tensorboard"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "state").rglob("track-*-tensorboard.log")
    assert losses_on_the_board(log, tmp_path / "tensorboard") == [1, 2], log.read_text()


def test_a_run_with_track_starts_a_follower_that_copies_the_rounds_of_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the follower makes its folder
    site = Site(tmp_path / "home")
    site.forks = False
    try:
        site.start_aggregator()
        site.start_client("pi-a")
        words = ("--set", "run.rounds=2", "--set", "local.steps=5", "--yes", "--detach")
        done = site.typed("run", str(EXAMPLE / "plan.toml"), *words, "--track", "tensorboard")
        assert done.returncode == 0, done.stderr
        run_id = done.stdout.strip()
        assert site.until_done(run_id).status == "done", site.said()
        log = tmp_path / "home" / "aggregator" / f"track-{run_id}-tensorboard.log"
        assert losses_on_the_board(log, tmp_path / "tensorboard") == [1, 2], log.read_text()
    finally:
        site.close()


def test_mlflow_has_one_value_a_round_and_the_plan(home: AggregatorHome, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    place = f"sqlite:///{tmp_path}/mlflow.db"
    losses = copied(home, "mlflow", place)
    client = MlflowClient(tracking_uri=place)
    (experiment,) = [one for one in client.search_experiments() if one.name == "thinwire/small"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params["run.rounds"]) == ("FINISHED", "4")
    found = sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda one: one.step)
    assert [one.step for one in found] == STEPS
    assert [one.value for one in found] == pytest.approx(losses)


def test_wandb_keeps_each_round_at_its_step(
    home: AggregatorHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    losses = copied(home, "wandb", "")
    rows: dict[int, float] | None = None
    until = time.monotonic() + WRITTEN_S
    while rows is None and time.monotonic() < until:
        rows = written(tmp_path)
        time.sleep(0.05)
    assert rows is not None, "the offline file has no end"
    assert sorted(rows) == STEPS
    assert [rows[step] for step in STEPS] == pytest.approx(losses)
