"""The scalars of a secure sum: what no honest clients can have ends the round as aborted, and not the run."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.crashes import LAYOUT
from tests.support.scripted_rng import ScriptedRng
from tests.support.secure_fleet import toy_plan
from thinwire.aggregation.lattice import BadSum
from thinwire.core import Key, RunPlan
from thinwire.core.secure_numbers import METRIC_BITS
from thinwire.core.types import SecureWork
from thinwire.privacy.masks import pack, packed_size
from thinwire.privacy.secure_round import UnmaskingKeys
from thinwire.server.secure_sum import SecureAggregator, next_clip

ONE = 1 << METRIC_BITS
PLAN = RunPlan.parse(
    toy_plan('clip = "auto"\nweight_max = 8\nmetrics = { loss = 10.0 }', clients=4, run='evaluate = "clients"')
)
HONEST = {"weight": 2, "fits": 1, "loss": ONE, "loss/count": 2}


def summed(*clients: dict[str, int], plan: RunPlan = PLAN) -> SecureAggregator:
    """The sum of clients whose update is 0, with these scalars and without masks."""
    made = SecureAggregator(plan, LAYOUT, SecureWork(len(clients), 0, 1.0), "5e" * 16)
    for number, scalars in enumerate(clients):
        points = made.lattice.encode(np.zeros(LAYOUT.size, np.float32), 1, 0, Key(0), ScriptedRng(number))
        packed = np.empty(packed_size(made.terms.lanes, made.terms.width), np.uint8)
        pack(points.lanes, made.terms.width, packed)
        lanes = [1, *(scalars[name] % 2**64 for name in made.terms.scalars)]
        made.total.add(packed, np.array(lanes, np.uint64).tobytes())
    made.unmask(UnmaskingKeys((), ()), bytes(32), 1, 0.0, 1.0)
    return made


def test_the_metrics_and_the_next_clip_are_those_of_the_sum() -> None:
    made = summed(HONEST, HONEST, {**HONEST, "fits": 0})
    assert made.metrics == {"eval/loss": (30.0, 6.0)}
    assert made.summed is not None
    assert made.summed.next_clip == next_clip(1.0, 2, 3)


@pytest.mark.parametrize(
    "lie",
    [
        {"fits": -(2**40)}, {"fits": 3}, {"loss": 9 * ONE}, {"loss": -9 * ONE}, {"loss/count": -5, "loss": 0},
        {"loss/count": 21}, {"weight": 21}, {"weight": -9},
    ],
)  # fmt: skip
def test_a_client_whose_scalars_are_impossible_ends_its_round_and_not_the_run(lie: dict[str, int]) -> None:
    with pytest.raises(BadSum):
        summed(HONEST, HONEST, {**HONEST, **lie})


def test_one_client_can_claim_the_whole_weight_within_the_bounds() -> None:
    """What is not protected: a lie that honest clients could have told together is not found."""
    made = summed(HONEST, HONEST, {**HONEST, "weight": 20, "fits": -2, "loss/count": 20, "loss": 4 * ONE})
    assert made.summed is not None
    assert made.summed.next_clip == 2.0
    assert made.metrics == {"eval/loss": (60.0, 24.0)}


@pytest.mark.parametrize("clients", [3, 4, 6])
def test_a_metric_of_one_or_two_clients_is_not_recorded_though_another_one_is_of_all(clients: int) -> None:
    plan = RunPlan.parse(
        toy_plan('metrics = { loss = 10.0, recall = 1.0, "train/loss" = 10.0 }', run='evaluate = "clients"')
    )
    of_all = {"weight": 1, "fits": 1, "loss": ONE, "loss/count": 1}
    one = {"recall": ONE, "recall/count": 1, "train/loss": ONE, "train/loss/count": 1}
    none = dict.fromkeys(one, 0)
    made = summed(*({**of_all, **(one if number < 2 else none)} for number in range(clients)), plan=plan)
    assert made.metrics == {"eval/loss": (10.0 * clients, float(clients))}
    made = summed(*({**of_all, **(one if number < 3 else none)} for number in range(clients)), plan=plan)
    assert set(made.metrics) == {"eval/loss", "eval/recall", "train/loss"}
