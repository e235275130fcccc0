"""The learning rate's way over a run is one curve, however a device cuts it into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.client.train.schedule import Schedule

shares = st.floats(0, 0.9)


def over_a_run(kind: str, warmup: float, end: float, rounds: int, steps: int) -> list[float]:
    return [
        Schedule(kind, warmup, end, made / rounds, (made + 1) / rounds).factor(step, steps)
        for made in range(rounds)
        for step in range(steps)
    ]


@given(kind=st.sampled_from(["linear", "cosine"]), warmup=shares, end=shares, rounds=st.integers(1, 9))
def test_it_rises_in_the_warm_up_and_falls_to_its_end(kind, warmup, end, rounds):
    curve = over_a_run(kind, warmup, end, rounds, steps=7)
    top = curve.index(max(curve))
    assert curve[: top + 1] == sorted(curve[: top + 1])
    assert curve[top:] == sorted(curve[top:], reverse=True)
    assert all(0 < factor <= 1 for factor in curve)
    if curve[-1] < max(curve):  # the warm-up was over before
        assert curve[-1] >= end


@given(kind=st.sampled_from(["constant", "linear", "cosine"]), warmup=shares, rounds=st.integers(2, 5))
def test_rounds_and_steps_cut_the_same_curve(kind, warmup, rounds):
    assert over_a_run(kind, warmup, 0.0, rounds, 6) == pytest.approx(over_a_run(kind, warmup, 0.0, 1, 6 * rounds))


def test_a_constant_rate_without_warm_up_does_not_move():
    assert not Schedule().moves
    assert Schedule("constant", warmup=0.1).moves
    assert set(over_a_run("constant", 0.0, 0.0, 3, 2)) == {1.0}


def test_where_the_number_of_steps_is_not_known_a_round_has_one_rate():
    schedule = Schedule("linear", begin=0.2, until=0.4)
    assert {schedule.factor(step, 0) for step in range(5)} == {schedule.factor(0, 1)}


def test_rounds_beyond_the_plans_stay_at_the_end():
    assert Schedule("cosine", end=0.1, begin=1.2, until=1.3).factor(0, 4) == pytest.approx(0.1)
