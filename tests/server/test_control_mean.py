"""What the aggregator keeps of all devices under SCAFFOLD and FedDyn: their mean, once each, whatever crashes."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.server.test_crash_anywhere import PLAN, World
from tests.support.crashes import LAYOUT, Fate, Outcome, change, killed
from thinwire.aggregation.control_variates import algorithm_of, own_segments, transmitted_layout
from thinwire.compression import parse
from thinwire.core import RunPlan
from thinwire.core.events import ModelStored, RoundClosed, UpdateAccepted
from thinwire.core.fleet import Delivery
from thinwire.core.prng import Key, derive
from thinwire.core.types import Assignment, ReplyHeader, UpdateId, Vector, within_run
from thinwire.server.aggregator import Model, RoundAggregator, SumConfig
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, SyntheticUpdates

EVERY = 11  # of all places: the plain run tries each of them
BOTH = pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])


def plan_of(algorithm: str) -> RunPlan:
    raw = PLAN.to_json()
    raw["run"] |= {"algorithm": algorithm, "keep": "all"}
    raw["cohort"]["staleness_exponent"] = 0
    raw["server"]["optimizer"] = "fedavg"
    return RunPlan.from_json(raw)


def sent(plan: RunPlan, assigned: str) -> Vector:
    """What an assignment's answer decodes to, of the vector that is followed; as `MadeUp` encodes it."""
    algorithm = algorithm_of(plan)
    assert algorithm is not None
    travels, name = transmitted_layout(algorithm, LAYOUT), assigned.rsplit(".", 1)[1]
    codec, key = parse(plan.uplink.codec).bind(travels), derive(Key(0), name, within_run(assigned))
    drawn, made = change(name, travels.size, _Assigned(int(assigned.split(".")[-2]))), list[Vector]()  # type: ignore[arg-type]  # a round is all it takes
    for s in own_segments(algorithm, travels):
        payload = codec.encode(drawn[s.span].copy(), codec.init(s.index), key, s.index).payload
        made.append(codec.decode(payload, s.index))
    return np.concatenate(made)


class _Assigned:
    def __init__(self, number: int) -> None:
        self.round = number


@BOTH
def test_it_is_the_mean_over_all_that_ever_counted_of_what_each_of_them_sent(tmp_path: Path, algorithm: str) -> None:
    world, plan = World(tmp_path, Fate(), plan_of(algorithm)), plan_of(algorithm)
    made = world.live()
    assigned = {e.update_id: e.assignment_id for e in made.of(UpdateAccepted)}
    aggregated = [update_id for closed in made.of(RoundClosed) for update_id in closed.aggregated]
    everyone = {UpdateId.parse(update_id).device for update_id in aggregated}
    expected = sum((sent(plan, assigned[update_id]) for update_id in aggregated), np.zeros(LAYOUT.size)) / len(everyone)
    last, travels = made.of(ModelStored)[-1], transmitted_layout(algorithm_of(plan), LAYOUT)
    folder = world.home.run(UpdateId.parse(aggregated[0]).run)
    params, _ = Versions(folder, travels).read(last)
    common = (
        params[LAYOUT.size :] if algorithm == "scaffold" else load_file(folder / f"v{last.version:06d}.state")["common"]
    )
    np.testing.assert_allclose(common, expected, rtol=1e-4, atol=1e-5)
    assert len(everyone) > 3
    assert (last.state != "") == (algorithm == "feddyn")


@BOTH
def test_a_crash_changes_nothing_of_it(tmp_path: Path, algorithm: str) -> None:
    fate, begin = Fate(), partial(World, plan=plan_of(algorithm))
    made = begin(tmp_path / "whole", fate).live()

    def check(again: Outcome, where: str) -> None:
        assert again.same() == made.same(), where

    killed(begin, tmp_path, fate.places, check, slice(0, None, EVERY))


@pytest.mark.parametrize(("known", "expected"), [({}, 1.0), ({"b": 30}, 1.75), ({"a": 10, "b": 30}, 2.25)])
def test_it_moves_by_a_devices_weight_among_all_and_begins_again_where_nobody_is_known(
    known: dict[str, int], expected: float
) -> None:
    plan, travels = plan_of("scaffold"), LAYOUT.with_control
    assignment = Assignment("r.1.a", "r", "toy", "train", plan.to_json(), codec="identity")
    header, body = SyntheticUpdates("a", travels, update=1.0, examples=10).finish(
        Delivery(assignment, None), Behavior()
    )
    assert isinstance(header, ReplyHeader)
    model = Model(travels, np.full(travels.size, 2.0, np.float32), np.zeros(0, np.float32), {})
    aggregator, ends = (
        RoundAggregator(plan, travels, "identity", SumConfig(known)),
        np.cumsum([0, *(part.length for part in header.parts)]),
    )
    aggregator.add(header, lambda: (body[start:stop] for start, stop in itertools.pairwise(ends)), 1.0)
    aggregator.step(model)
    assert model.params[: LAYOUT.size].tolist() == [3.0] * LAYOUT.size
    np.testing.assert_allclose(model.params[LAYOUT.size :], expected, rtol=1e-6)
