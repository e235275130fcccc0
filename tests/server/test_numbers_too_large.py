"""Numbers in a legal frame that no sum can hold: their update is dropped, and the model stays finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.normed import NORMED, normed, three_honest
from tests.support.server_bench import LAYOUT, REPORT, Bench, drive_through, killed, outcome, scripted
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.server_optimizers import optimizers
from thinwire.compression import parse
from thinwire.core import Key, RunPlan
from thinwire.core.errors import ThinwireError
from thinwire.core.events import ModelStored, RoundClosed, UpdateDropped
from thinwire.core.types import Part, ReplyHeader, UpdateId
from thinwire.server.aggregator import MAX_MEAN, RoundAggregator
from thinwire.server.model_store import Versions
from thinwire.server.round_close import AggregatedUpdate, aggregated_without
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedDevice, SyntheticUpdates

ROUNDS = 3


def bench(folder: Path, *liars: ScriptedDevice, **sections: Any) -> Bench:
    """Three honest devices behind these; what a device sends is taken as it is."""
    sections = {"uplink": {"codec": "identity", "feedback": "none"}, "run": {"rounds": ROUNDS}, **sections}
    return Bench(folder, [*liars, *three_honest()], layout=NORMED, **sections)


def models(made: Bench) -> list[tuple[np.ndarray, np.ndarray]]:
    versions = Versions(made.home.run(made.run_id), NORMED)
    return [versions.read(e) for e in made.events(ModelStored) if versions.path(e.version).exists()]


def require_finite(made: Bench) -> None:
    for params, buffers in models(made):
        assert np.isfinite(params).all()
        assert np.isfinite(buffers).all()
        assert (buffers[3:] >= 0).all()


HOSTILE: dict[str, dict[str, Any]] = {
    "a mean": {"mean": 3e38},
    "a mean below": {"mean": -3e38},
    "a mean whose square is too large": {"mean": 3e19},
    "a variance": {"variance": 3e38},
    "a variance below zero": {"variance": -0.5},
    "a counter": {"counters": {"bn.num_batches_tracked": 2**63 - 1}},
    "a counter below": {"counters": {"bn.num_batches_tracked": -(2**63 - 1)}},
}


@pytest.mark.parametrize("which", HOSTILE)
def test_statistics_that_no_model_can_hold_cost_their_own_device_its_update(tmp_path: Path, which: str) -> None:
    made = bench(tmp_path / "hostile", normed("a", **HOSTILE[which]))
    assert made.drive().status == "done"
    dropped = made.events(UpdateDropped)
    assert [e.device for e in dropped] == ["a"] * ROUNDS
    assert all(e.reason == "bad-payload" and "bn." in e.detail for e in dropped), dropped[0]
    require_finite(made)
    alone = bench(tmp_path / "alone")
    assert made.store.run(made.run_id).model_digest == alone.drive().model_digest


@pytest.mark.parametrize("optimizer", list(optimizers))
@pytest.mark.parametrize("change", [-3e38, 1e18])
def test_one_devices_change_leaves_the_model_and_what_the_optimizer_remembers_finite(
    tmp_path: Path, optimizer: str, change: float
) -> None:
    made = bench(tmp_path, normed("a", change, examples=1), server={"optimizer": optimizer}, run={"rounds": 6})
    assert made.drive().status == "done"
    assert [e.reason for e in made.events(RoundClosed)] == ["all"] * 6
    require_finite(made)
    for stored in made.events(ModelStored)[-1:]:
        for array in Versions(made.home.run(made.run_id), NORMED).read_state(stored).values():
            assert np.isfinite(array).all()


@pytest.mark.parametrize("down", ["topk(0.1) > int8", "int8", "eden(2)", "sign"])
def test_one_devices_change_leaves_what_the_downlink_sends_finite(tmp_path: Path, down: str) -> None:
    made = bench(tmp_path, normed("a", 3e38, examples=1), normed("e", 1e28), downlink={"codec": down})
    assert made.drive().status == "done"
    require_finite(made)


def test_of_updates_that_fit_alone_and_not_together_the_later_is_dropped() -> None:
    """A late update counts with its discount, but all of its examples: in a mean it may fit behind others alone."""
    plan = RunPlan.from_json({"run": {"task": "toy"}, "local": {"lr": 1.0, "steps": 1}})
    aggregator, state = RoundAggregator(plan, NORMED, "identity"), list[AggregatedUpdate]()
    bound = parse("identity").bind(NORMED)
    for name, change, examples in (("a", 0.9, 10), ("b", 1.05, 10), ("c", 1.2, 10), ("d", 0.1, 10)):
        frame = bound.encode(np.full(40, change * MAX_MEAN, np.float32), {}, Key(0)).payload
        update_id = UpdateId("toy-1", name, 1)
        sent = ReplyHeader("x", update_id, 0, examples, 1, 1.0, parts=(Part("frame/0", len(frame), ""),))
        state.append((sent, lambda frame=frame: iter([frame]), 1.0))  # type: ignore[misc]  # bound now
    for entry in state[:2]:
        aggregator.add(*entry)
        assert aggregator.fits()
    left, spoilers = aggregated_without(lambda: RoundAggregator(plan, NORMED, "identity"), state)
    assert [header.update_id.device for header in spoilers] == ["c"]
    honest = RoundAggregator(plan, NORMED, "identity")
    for entry in (state[0], state[1], state[3]):
        honest.add(*entry)
    assert np.array_equal(left.changes.total, honest.changes.total)
    assert left.changes.examples == 30


def test_a_kill_at_any_commit_drops_the_same_updates(tmp_path: Path) -> None:
    def begin(folder: Path) -> Bench:
        return bench(
            folder,
            normed("a", 3e38, examples=1),
            normed("e", mean=3e38),
            run={"rounds": 2},
            server={"optimizer": "fedavgm"},
        )

    undisturbed = begin(tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    assert {e.device for e in undisturbed.events(UpdateDropped)} == {"a", "e"}

    def check(made: Bench, where: str) -> None:
        assert outcome(made) == outcome(undisturbed), where

    killed(begin, tmp_path, places, check)


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_the_mean_of_all_devices_stays_finite_too(tmp_path: Path, algorithm: str) -> None:
    run, cohort = {"rounds": ROUNDS, "algorithm": algorithm}, {"late": "drop", "wait_for": 4}
    travels = transmitted_layout(
        algorithm_of(RunPlan.from_json({"run": {"task": "toy", **run}, "local": {"lr": 1.0}})), LAYOUT
    )
    devices = [
        scripted(name, does=SyntheticUpdates(name, travels, change, 1))
        for name, change in zip("abcd", (3e38, 1, 1, 1), strict=True)
    ]
    made = Bench(tmp_path, devices, run=run, cohort=cohort, uplink={"codec": "identity"})
    assert made.drive().status == "done"
    assert {e.device for e in made.events(UpdateDropped)} == {"a"}
    versions = Versions(made.home.run(made.run_id), travels)
    last = made.events(ModelStored)[-1]
    assert np.abs(versions.read(last)[0]).max() < 100
    assert all(np.abs(array).max() < 100 for array in versions.read_state(last).values())


def test_in_a_buffer_too(tmp_path: Path) -> None:
    liars = normed("a", 3e38, examples=1), normed("e", mean=3e38)
    made = bench(tmp_path, *liars, cohort={"mode": "buffered", "buffer": 3})
    assert made.drive().status == "done"
    assert {e.device for e in made.events(UpdateDropped)} == {"a", "e"}
    require_finite(made)


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_no_run_begins_with_a_model_that_could_not_be_stepped_from(tmp_path: Path, value: float) -> None:
    made = Bench(tmp_path, [scripted("a")])
    plan, params = RunPlan.from_json({"run": {"task": "toy"}, "local": {"lr": 1.0}}), np.zeros(LAYOUT.size, np.float32)
    params[7] = value
    with pytest.raises(ThinwireError, match="the first model holds"):
        submit(made.store, made.home, plan, FirstModel(LAYOUT, REPORT, params, np.zeros(0, np.float32)))
    assert len(made.store.runs()) == 1


def test_a_step_that_gives_nan_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    still = scripted("a", does=SyntheticUpdates("a", LAYOUT, 0.0))  # divided by the square root of 0, and by a tau of 0
    made = Bench(tmp_path, [still], server={"optimizer": "fedadam", "tau": 1e-300})
    row = made.drive()
    assert (row.status, row.exit_code) == ("failed", 3)
    assert "the step of the server optimizer 'fedadam' gives NaN" in row.status_text
