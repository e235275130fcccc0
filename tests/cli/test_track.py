"""The follower of a run: each round once in the tracker, whatever is killed and however often the tracker fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Thinwire
from tests.support.small_task import plan_of, task_of
from thinwire.cli.runs.track import Row, alone, evaluated, follow, start_follower, values
from thinwire.client import ClientInfo
from thinwire.core.errors import Refused, UsageError
from thinwire.core.records import replace
from thinwire.core.statedir import AggregatorHome
from thinwire.simulation import run_sim
from thinwire.store import RunRow, Store

ROUNDS = 4


@dataclass
class Rows:
    """A tracker that outlives the follower, and is down at some of its calls."""

    down_at: frozenset[int] = frozenset()
    rows: list[tuple[int, Row]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    calls: int = 0

    def _call(self) -> None:
        self.calls += 1
        if self.calls in self.down_at:
            raise ConnectionError("no route")

    def last(self) -> int:
        self._call()
        return self.rows[-1][0] if self.rows else 0

    def add(self, step: int, row: Row, at: float) -> None:
        self._call()
        self.rows.append((step, row))
        if self.calls + 1 in self.down_at and step % 2:
            self.calls += 1
            raise ConnectionError("the row is kept, and the answer lost")

    def end(self, run: RunRow) -> None:
        self._call()
        self.ended.append(run.status)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> AggregatorHome:
    home = AggregatorHome.under(tmp_path_factory.mktemp("tracked"))
    with Store.open(home.database) as store:
        run_sim(plan_of(run=f"rounds = {ROUNDS}"), task_of(), store=store, home=home, clients=2, client=ClientInfo())
    return home


def followed(home: AggregatorHome, connect: Callable[[], Rows]) -> tuple[list[str], list[float]]:
    slept = list[float]()
    with Store.open(home.database) as store:
        return list(follow(store, store.run("latest").run_id, connect, slept.append)), slept


def test_each_round_is_one_row_with_its_metrics_and_what_it_took(made: AggregatorHome) -> None:
    tracker = Rows()
    said, _ = followed(made, lambda: tracker)
    assert said == [f"{ROUNDS} rounds copied, done"] and tracker.ended == ["done"]
    assert [step for step, _ in tracker.rows] == [1, 2, 3, 4]
    with Store.open(made.database) as store:
        for (_, row), stored in zip(tracker.rows, store.rounds("small-1"), strict=True):
            assert row["loss"] == stored.metrics["loss"] and row["payload_up"] == stored.payload_up
            assert "train/loss" in row


@pytest.mark.parametrize("down", [{1}, {2}, {3, 4, 5}, {1, 2, 3, 4}, set(range(1, 15, 2)), {7}])
def test_a_tracker_that_fails_gets_each_round_once_and_delays_nothing(made: AggregatorHome, down: set[int]) -> None:
    tracker = Rows(frozenset(down))
    said, slept = followed(made, lambda: tracker)
    assert [step for step, _ in tracker.rows] == [1, 2, 3, 4]
    assert said[-1] == f"{ROUNDS} rounds copied, done"
    assert all("ConnectionError" in one and "again in" in one for one in said[:-1])
    assert len(slept) == len(said) - 1 and max(slept, default=0.0) <= 60.0


def test_a_follower_that_is_killed_goes_on_behind_the_last_row(made: AggregatorHome) -> None:
    class Killed(BaseException):
        pass

    tracker = Rows()
    add = tracker.add

    def dies(step: int, row: Row, at: float) -> None:
        add(step, row, at)
        if step == 2:
            raise Killed

    tracker.add = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        followed(made, lambda: tracker)
    tracker.add = add  # type: ignore[method-assign]
    followed(made, lambda: tracker)
    assert [step for step, _ in tracker.rows] == [1, 2, 3, 4]


def test_a_round_whose_model_is_not_evaluated_yet_waits(made: AggregatorHome) -> None:
    with Store.open(made.database) as store:
        run, rounds = store.run("latest"), store.rounds("small-1")
    assert [row.round for row in evaluated(replace(run, status="running"), rounds)] == [1, 2, 3]
    assert [row.round for row in evaluated(run, rounds)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("section", "keys", "whole"),
    [("local", {"overlap": {"max_delay": 2}}, [1, 2]), ("cohort", {"mode": "buffered"}, [1, 2])],
)
def test_a_round_that_is_evaluated_rounds_later_waits_until_it_is(
    made: AggregatorHome, section: str, keys: dict[str, Any], whole: list[int]
) -> None:
    """Of 5 closed rounds the first three are evaluated: the third one may still change, and the others will."""
    with Store.open(made.database) as store:
        run, rounds = store.run("latest"), store.rounds("small-1")
    late = [replace(rounds[-1], round=number, metrics={}) for number in (4, 5)]
    running = replace(run, status="running", plan={**run.plan, section: {**run.plan[section], **keys}})
    assert [row.round for row in evaluated(running, [*rounds[:3], *late])] == whole


def test_a_run_with_a_secret_sample_shows_its_metrics_only(made: AggregatorHome) -> None:
    with Store.open(made.database) as store:
        run, row = store.run("latest"), store.rounds("small-1")[0]
    plan = {**run.plan, "privacy": {**run.plan["privacy"], "mode": "central", "sampling_rate": 0.1}}
    assert set(values(replace(run, plan=plan), row)) == {"round", *row.metrics}


def test_an_unknown_tracker_and_one_that_is_not_installed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tracker 'neptune'"):
        start_follower("small-1", "neptune", tmp_path)
    with pytest.raises(UsageError, match="wandb is not installed") as refused:
        start_follower("small-1", "wandb", tmp_path)
    assert refused.value.hint == "pip install wandb"


@pytest.mark.parametrize("command", [("run",), ("sim", "--clients", "2")], ids=["run", "sim"])
@pytest.mark.parametrize("tracker", ["neptune", "wandb"])
def test_a_command_with_a_tracker_that_cannot_be_is_an_error_before_there_is_a_run(
    thinwire: Thinwire, home: Path, store: Store, command: tuple[str, ...], tracker: str
) -> None:
    plan = Path(__file__).parents[2] / "examples" / "digits" / "plan.toml"
    said = thinwire(*command, plan, "--track", tracker, "--home", home)
    assert (said.code, tracker in said.err) == (2, True)
    assert store.runs() == []


def test_a_second_follower_of_a_run_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    """The follower of a simulation outlives its kill -9, and the same command starts another one."""
    with alone(tmp_path, "small-1", "tensorboard", "boards"):
        with (
            pytest.raises(Refused, match="another process copies small-1 to tensorboard"),
            alone(tmp_path, "small-1", "tensorboard", str(Path("boards").absolute())),
        ):
            raise AssertionError("two followers copy each round")
        with (
            alone(tmp_path, "small-1", "tensorboard", "elsewhere"),
            alone(tmp_path, "small-2", "tensorboard", "boards"),
        ):
            pass
    with alone(tmp_path, "small-1", "tensorboard", "boards"):
        pass
