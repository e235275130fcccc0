"""`thinwire runs track RUN --to TRACKER`: a follower that copies each round of a run to an experiment tracker.

It is a process of its own, which reads the store. So a tracker that does not answer delays nothing: the follower tries
again, and the run goes on. A round is copied once its model is evaluated, as one row at the step of its number.

The follower keeps no state of its own. At its start, and after each error, it reads the step of the last row that the
tracker has, and copies the rounds after that one. So a killed follower loses nothing: a person types its command again.

Of a run with Poisson sampling (`[privacy] sampling_rate`) it copies the metrics only: counts, bytes and seconds would
tell how many clients were sampled.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, RunId

if TYPE_CHECKING:
    from thinwire.store import RoundRow, RunRow, Store

POLL_S, LONGEST_S = 2.0, 60.0  # between two looks at the store; between two attempts at a tracker
WORDS = "mlflow, tensorboard or wandb"
MAX_PARAMS = 100  # that MLflow takes in one request
PLACE = "folder of TensorBoard (default: tensorboard/), or tracking URI of MLflow"
To = Annotated[str, typer.Option("--to", metavar="TRACKER", help=WORDS)]
Place = Annotated[str, typer.Option("--place", metavar="PLACE", help=PLACE)]
Track = Annotated[str | None, typer.Option("--track", metavar="TRACKER", help=f"copy its rounds to {WORDS}")]
Row = Mapping[str, float]


class Tracker(Protocol):
    """Takes the rows of one run. Any method may raise whatever its package raises."""

    def last(self) -> int:
        """Return the step of the last row that the tracker has, 0 if it has none."""

    def add(self, step: int, row: Row, at: float) -> None:
        """Add a row that was measured at the wall clock's time `at`; it is kept when this returns."""

    def end(self, run: RunRow) -> None:
        """Record that the run is over."""


def track(run_id: RunId = "latest", to: To = "mlflow", place: Place = "", home: Home = None) -> None:
    """Copy the rounds of a run to an experiment tracker, until the run is over.

    Needs the tracker's package: pip install mlflow, tensorboard or wandb. After kill -9 the same command goes on.
    MLflow and Weights & Biases take their settings (MLFLOW_TRACKING_URI, WANDB_PROJECT, WANDB_MODE=offline) from the
    environment.
    """
    from thinwire.cli.local_state import aggregator_home, end_abandoned, open_store

    opening = opener(to, place)

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        end_abandoned(home)  # nobody else may look after a simulation whose process died

    with open_store(home) as store:
        row = store.run(run_id)
        with alone(aggregator_home(home).root, row.run_id, to, place):
            console.note(f"{row.run_id}: its rounds go to {to}")
            for step in follow(store, row.run_id, lambda: opening(store.run(row.run_id)), wait):
                console.note(f"{row.run_id}: {step}")


@contextmanager
def alone(folder: Path, run_id: str, to: str, place: str) -> Iterator[None]:
    """Be the only follower of a run for one place of a tracker: a second one would copy each round once more.

    Raise `Refused` if another process is. The lock ends with this process, however it ends.
    """
    from thinwire.core.errors import Refused
    from thinwire.core.statedir import Held, lock_file

    where = str(Path(place or "tensorboard").absolute()) if to == "tensorboard" else place
    name = f"track-{run_id}-{to}-{hashlib.sha256(where.encode()).hexdigest()[:8]}.lock"
    try:
        with lock_file(folder / name):
            yield
    except Held as held:
        raise Refused(
            f"another process copies {run_id} to {to}",
            why="each of two followers would copy each round",
            hint=f"that one goes on; or end it first, or give another --place: {folder / name} is its lock",
        ) from held


def opener(to: str, place: str) -> Callable[[RunRow], Tracker]:
    """Return the function that connects with a tracker; `UsageError` for one that is unknown or not installed."""
    from thinwire.core.errors import UsageError

    if to not in TRACKERS:
        raise UsageError(f"no tracker {to!r}", why="Thinwire has code for three trackers", hint=f"--to {WORDS}")
    try:
        importlib.import_module(to)
    except ImportError as error:
        raise UsageError(f"{to} is not installed", why=str(error), hint=f"pip install {to}") from error
    return lambda run: TRACKERS[to](run, place)


def follow(store: Store, run_id: str, connect: Callable[[], Tracker], sleep: Callable[[float], None]) -> Iterator[str]:
    """Copy rounds until the run is over and the tracker has all of them; yield what a person should know."""
    from thinwire.core.events import ENDED
    from thinwire.core.formatting import counted

    tracker: Tracker | None = None
    done, wait_s = 0, POLL_S
    while True:
        run = store.run(run_id)
        rows = [] if tracker is None else evaluated(run, store.rounds(run_id, done + 1))
        try:
            if tracker is None:
                tracker = connect()
                done = tracker.last()
                continue
            for row in rows:
                tracker.add(row.round, values(run, row), row.closed_at or time.time())
                done, wait_s = row.round, POLL_S
            if run.status in ENDED:
                tracker.end(run)
                yield f"{counted(done, 'round')} copied, {run.status}"
                return
        except Exception as error:  # whatever the tracker's package raises
            tracker, wait_s = None, min(2 * wait_s, LONGEST_S)
            said = f"{type(error).__name__}: {error}"
            yield f"the tracker does not take what follows round {done} ({said}); again in {wait_s:.0f} s"
        sleep(wait_s)


def evaluated(run: RunRow, rounds: list[RoundRow]) -> list[RoundRow]:
    """Return the closed rounds that will not change: so many later ones are closed too, or the run is over.

    Replies of the next round evaluate a version, with pipelined rounds those of later ones, and with buffered rounds
    those of the next `HELD` at most. Holdout evaluation may come rounds later. If a version was evaluated, no earlier
    one will be.
    """
    from thinwire.cli.runs.progress import HELD
    from thinwire.core.events import ENDED

    closed = [row for row in rounds if row.closed_at is not None]
    if run.status in ENDED:
        return closed
    measured = max((at for at, row in enumerate(closed, 1) if row.metrics), default=0)
    if run.plan["run"].get("evaluate") == "holdout":
        return closed[:measured]
    overlap = run.plan["local"].get("overlap") or {}
    later = HELD if run.plan["cohort"].get("mode") == "buffered" else 1 + int(overlap.get("max_delay", 0))
    return closed[: len(closed) - 1] if later == 1 else closed[: max(measured - 1, len(closed) - later, 0)]


def values(run: RunRow, row: RoundRow) -> Row:
    """Return a round's metrics; without Poisson sampling also its seconds, bytes and numbers of updates."""
    from thinwire.core.run_events import is_sampled

    found = {"round": float(row.round), **row.metrics}
    if is_sampled(run.plan):
        return found
    took = {
        "seconds": row.seconds or 0.0, "payload_up": row.payload_up, "payload_down": row.payload_down,
        "aggregated": len(row.aggregated), "late": row.late, "dropped": row.dropped, "failed": row.failed,
    }  # fmt: skip
    return {**found, **{f"train/{name}": value for name, value in row.train_metrics.items()}, **took}


def settings(run: RunRow) -> dict[str, str]:
    """Return the keys of the plan as `section.key`, for a table of runs."""
    return {
        f"{section}.{key}": str(value)[:250]
        for section, keys in run.plan.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


@dataclass
class TensorBoard:
    """Writes one event a round, with all its values, to a file of TensorBoard's."""

    run: RunRow
    place: str
    _writer: Any = field(init=False)

    def __post_init__(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = Path(self.place or "tensorboard") / self.run.run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self.folder))

    def last(self) -> int:
        """Return the step of the last row; see `Tracker.last`."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.folder), size_guidance={"scalars": 0}).Reload()
        return max((one.step for one in found.Scalars("round")), default=0) if "round" in found.Tags()["scalars"] else 0

    def add(self, step: int, row: Row, at: float) -> None:
        """Add a row; see `Tracker.add`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in row.items()])
        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))
        self._writer.flush()

    def end(self, run: RunRow) -> None:
        """Record that the run is over; see `Tracker.end`."""
        self._writer.close()


@dataclass
class MLflow:
    """Logs one batch a round to a run of MLflow that has our run's id as a tag."""

    run: RunRow
    place: str

    def __post_init__(self) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.place or None)
        name = f"thinwire/{self.run.task}"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        query = f"tags.`thinwire.run` = '{self.run.run_id}' and tags.`thinwire.created` = '{self.run.created_at}'"
        known = self._client.search_runs([experiment], query, max_results=1)
        tags = {"thinwire.run": self.run.run_id, "thinwire.created": str(self.run.created_at)}
        called = self.run.name or self.run.run_id
        mine = known[0] if known else self._client.create_run(experiment, run_name=called, tags=tags)
        self._id = mine.info.run_id
        rows = [Param(name, value) for name, value in settings(self.run).items() if name not in mine.data.params]
        for at in range(0, len(rows), MAX_PARAMS):
            self._client.log_batch(self._id, params=rows[at : at + MAX_PARAMS])

    def last(self) -> int:
        """Return the step of the last row; see `Tracker.last`."""
        return max((one.step for one in self._client.get_metric_history(self._id, "round")), default=0)

    def add(self, step: int, row: Row, at: float) -> None:
        """Add a row; see `Tracker.add`."""
        from mlflow.entities import Metric

        ordered = sorted(row.items(), key=lambda pair: pair[0] == "round")  # last: `last` looks for it
        self._client.log_batch(self._id, [Metric(name, float(v), int(1000 * at), step) for name, v in ordered])

    def end(self, run: RunRow) -> None:
        """Record that the run is over; see `Tracker.end`."""
        status = {"done": "FINISHED", "failed": "FAILED"}.get(run.status, "KILLED")
        self._client.set_terminated(self._id, status)


@dataclass
class WeightsAndBiases:
    """Logs one row a round to a run of Weights & Biases with our run's id; its server drops rows that it has."""

    run: RunRow
    place: str

    def __post_init__(self) -> None:
        import wandb

        name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in self.run.run_id)
        self._run = wandb.init(
            id=f"{name}-{int(self.run.created_at)}", name=self.run.name or self.run.run_id, resume="allow",
            config=settings(self.run), settings=wandb.Settings(silent=True),
        )  # fmt: skip

    def last(self) -> int:
        """Return the step of the last row; see `Tracker.last`."""
        return max(0, int(self._run.step) - 1) if self._run.resumed else 0

    def add(self, step: int, row: Row, at: float) -> None:
        """Add a row; see `Tracker.add`."""
        self._run.log({**row, "closed_at": at}, step=step, commit=True)

    def end(self, run: RunRow) -> None:
        """Record that the run is over; see `Tracker.end`."""
        self._run.finish(exit_code=run.exit_code)


TRACKERS: Mapping[str, Callable[[RunRow, str], Tracker]] = {
    "mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WeightsAndBiases,
}  # fmt: skip


def start_follower(run_id: str, to: str, home: Path | None) -> None:
    """Start a follower as a process of its own, which outlives this one; its words go to a log beside the store."""
    from thinwire.cli.local_state import aggregator_home
    from thinwire.core.statedir import private_opener

    opener(to, "")  # an unknown tracker, or one that is not installed, is an error here and not in a log
    log = aggregator_home(home).root / f"track-{run_id}-{to}.log"
    words = ["runs", "track", run_id, "--to", to, *(["--home", str(home)] if home else [])]
    with open(log, "ab", opener=private_opener) as out:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "thinwire.cli", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    console.note(f"its rounds go to {to}; the follower's messages are in {log}")
