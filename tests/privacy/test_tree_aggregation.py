"""Tree aggregation: a prefix consists of nodes that get noise, and a participation is never booked below its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, SingleEpochTreeAggregationDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core import RunPlan
from thinwire.core.privacy_numbers import inflation
from thinwire.privacy.accounting import ORDERS, Release, epsilon
from thinwire.privacy.noise_plan import NoisePlan, noise_plan
from thinwire.privacy.tree_aggregation import booked, cost_factor, levels, nodes

NODE = Release("discrete-gaussian", 1.0, 4.0, 10, distance=2.0**-100)


def blocks(length: int) -> Iterator[range]:
    """Yield all blocks of places 1 .. length whose size is a power of two and that end at a multiple of it."""
    for size in (1 << level for level in range(levels(length))):
        for end in range(size, length + 1, size):
            yield range(end - size + 1, end + 1)


def block(end: int) -> range:
    """Return the places of the node that ends here and gets noise."""
    return range(end - (end & -end) + 1, end + 1)


def cost(pattern: Sequence[int], of: Sequence[range]) -> int:
    """Return the cost of these places of a client, in that of a single participation in one block."""
    return sum(sum(place in one for place in pattern) ** 2 for one in of)


def patterns(length: int, separation: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, -(-length // separation) + 1):
        for found in itertools.combinations(range(1, length + 1), count):
            if all(b - a >= separation for a, b in itertools.pairwise(found)):
                yield found


@given(st.integers(1, 2000))
def test_a_prefix_consists_of_its_nodes_and_each_of_them_ends_alone(place: int) -> None:
    assert sorted(itertools.chain.from_iterable(map(block, nodes(place)))) == list(range(1, place + 1))
    assert set(nodes(place)) - {place} <= set(nodes(place - 1)), "one node is new in each round"
    assert len(nodes(place)) <= levels(place)


@pytest.mark.parametrize("length", range(1, 11))
def test_no_pattern_costs_more_than_is_booked_for_it_whenever_the_run_ends(length: int) -> None:
    for separation in range(1, length + 2):
        for pattern in patterns(length, separation):
            for most in {len(pattern), -(-length // separation)}:
                booking = cost_factor(length, separation, most)
                for end in range(1, length + 1):
                    until = [place for place in pattern if place <= end]
                    released = [one for one in blocks(length) if one[-1] <= end]
                    assert cost(until, released) <= len(until) * booking, (pattern, end)


@pytest.mark.parametrize(("length", "separation"), [(8, 1), (8, 2), (8, 4), (16, 4), (16, 8)])
def test_the_worst_pattern_costs_what_is_booked_where_all_blocks_are_released(length: int, separation: int) -> None:
    most = -(-length // separation)
    worst = max(cost(one, list(blocks(length))) for one in patterns(length, separation))
    assert worst == most * cost_factor(length, separation, most)


@pytest.mark.parametrize("length", range(1, 11))
def test_the_worst_pattern_of_the_authors_would_be_booked_as_hardly_less(length: int) -> None:
    """Appendix D.2 counts the worst pattern of all blocks exactly; a run may end with the one that costs most."""
    for separation in range(1, length + 1):
        exact = max(cost(one, list(blocks(length))) / len(one) for one in patterns(length, separation))
        assert 0.95 <= exact / cost_factor(length, separation, -(-length // separation)) <= 1


@pytest.mark.parametrize(("length", "figure"), [(3, 7), (8, 120), (11, 120 + 6 + 1), (19, 496 + 6 + 1)])
def test_taking_part_in_every_round_costs_as_in_appendix_d2(length: int, figure: int) -> None:
    """The figures are those of the authors' program: the sum of 2^d (2^(d + 1) - 1) over the length's set bits d."""
    every = range(1, length + 1)
    assert cost(every, list(blocks(length))) == figure <= length * cost_factor(length, 1, length)


@settings(max_examples=200)
@given(st.data())
def test_trees_that_begin_anywhere_cost_no_more_than_is_booked(data: st.DataObject) -> None:
    """As after a restored backup, which has no keys: a tree may begin early, and a client may be in many of them."""
    length, separation = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    gaps = data.draw(st.lists(st.integers(separation, 3 * separation), max_size=12))
    rounds = list(itertools.accumulate(gaps, initial=data.draw(st.integers(1, 10))))
    total, first = 0, 1
    while first <= rounds[-1]:
        last = first + data.draw(st.integers(1, length)) - 1
        total += cost([number - first + 1 for number in rounds if first <= number <= last], list(blocks(length)))
        first = last + 1
    assert total <= len(rounds) * cost_factor(length, separation, len(rounds))


@settings(max_examples=50)
@given(st.integers(1, 64), st.data())
def test_the_increments_tell_exactly_what_the_nodes_tell(length: int, data: st.DataObject) -> None:
    """The divergence of the increments is that of Gaussians with the covariance B B', of which no node is known."""
    increments = np.zeros((length, length))  # B: the nodes whose noise a round adds or takes off
    for t in range(1, length + 1):
        increments[t - 1, [e - 1 for e in nodes(t)]] += 1
        increments[t - 1, [e - 1 for e in nodes(t - 1)]] -= 1
    pattern = data.draw(st.sets(st.integers(1, length), min_size=1))
    moved = np.zeros(length)
    moved[[place - 1 for place in pattern]] = 1
    exact = moved @ np.linalg.solve(increments @ increments.T, moved)
    assert exact == pytest.approx(cost(sorted(pattern), [block(e) for e in range(1, length + 1)]), rel=1e-6)


def test_what_is_booked_is_the_composition_of_the_nodes_and_their_draws() -> None:
    """Place 1 of a tree of 8 rounds is in four nodes, of which each has a release of its own."""
    one = booked(NODE, 8, 8, 1)
    np.testing.assert_allclose(one.rdp(), 4 * NODE.rdp())
    assert one.total_distance() == 4 * NODE.total_distance()
    pair = booked(NODE, 2, 1, 2)  # places 1 and 2: two leaves, and a block that has both
    both = Release("discrete-gaussian", 2.0, 4.0, 10)
    np.testing.assert_allclose(2 * pair.rdp(), 2 * NODE.rdp() + both.rdp())


@pytest.mark.parametrize("z", [0.5, 2.33, 7.0])
@pytest.mark.parametrize("trees", [[1], [5], [8], [100], [1600], [16, 16, 16]])
def test_one_participation_in_each_tree_costs_as_in_dp_accounting(z: float, trees: list[int]) -> None:
    """Its event takes a record that is in one tree only; in three trees it is three events."""
    accountant = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_SPECIAL)
    for steps in trees:
        accountant.compose(SingleEpochTreeAggregationDpEvent(z, steps))
    node = Release("discrete-gaussian", 1.0, z * z, 1)
    ours = {booked(node, trees[0], trees[0], len(trees)): len(trees)}
    assert epsilon(ours, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-6)


def tree_plan(noise: str, **keys: int) -> NoisePlan:
    given = "\n".join(f"{key} = {value}" for key, value in keys.items())
    text = '[run]\ntask = "t"\nrounds = 100\n[cohort]\nclients = 10\n[local]\nlr = 1.0\n[privacy]\nmode = "central"\n'
    return noise_plan(RunPlan.parse(f'{text}mechanism = "tree"\nclip = 1.0\ndelta = 1e-5\n{noise}\n{given}'), 1000, 1)


def test_the_plan_counts_the_participations_that_its_separation_leaves() -> None:
    assert tree_plan("noise_multiplier = 1.0").participations == 100
    assert tree_plan("noise_multiplier = 1.0", min_separation=30).participations == 4
    assert tree_plan("noise_multiplier = 1.0", min_separation=30, max_participations=2).participations == 2


@pytest.mark.parametrize("keys", [{}, {"restart_every": 16, "min_separation": 16}, {"min_separation": 25}])
def test_the_noise_that_is_found_reaches_the_target(keys: dict[str, int]) -> None:
    found = tree_plan("target_epsilon = 8.0", **keys)
    assert 7.99 <= found.epsilon(1e-5) <= 8.0
    assert found.variance == pytest.approx((found.noise_multiplier * found.scale) ** 2)
    ratio = found.release.sensitivity / found.scale / inflation(found.scale, 1000)
    length, separation = keys.get("restart_every", 100), keys.get("min_separation", 1)
    assert ratio == pytest.approx(math.sqrt(cost_factor(length, separation, found.participations)))


def test_separation_and_restarts_make_noise_cheaper() -> None:
    together = tree_plan("noise_multiplier = 4.0", max_participations=4)
    apart = tree_plan("noise_multiplier = 4.0", max_participations=4, min_separation=25)
    restarts = tree_plan("noise_multiplier = 4.0", max_participations=4, min_separation=25, restart_every=25)
    assert together.epsilon(1e-5) > apart.epsilon(1e-5) > restarts.epsilon(1e-5)
