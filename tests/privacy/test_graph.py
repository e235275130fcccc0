"""The graph of secure aggregation: its parameters are those of the reference, and its bounds hold where it is drawn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.errors import PlanError
from thinwire.core.secure_numbers import share_of
from thinwire.privacy.graph import (
    COMPLETE_UP_TO,
    LARGEST_COHORT,
    LARGEST_COMPLETE,
    Parameters,
    find_graph,
    find_parameters,
    meets_bounds,
    neighbours,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "graph" / "neighbours.json"


def seed_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.mark.parametrize(
    ("clients", "max_corrupt", "max_dropout", "k", "t"),
    [
        (100, 0.1, 0.1, 22, 11),
        (100, 0.1, 0.3, 34, 11),
        (100, 1 / 3, 0.3, 64, 34),
        (10, 0.33, 0.33, 8, 4),
        (10, 0.33, 0.05, 4, 4),
        (100, 0.45, 0.45, 92, 46),
        (100, 0.33, 0.33, 68, 34),
        (1000, 0.33, 0.33, 286, 150),
        (10000, 0.33, 0.33, 422, 221),
        (100, 0.05, 0.33, 28, 6),
        (1000, 0.05, 0.33, 72, 24),
        (10000, 0.05, 0.33, 86, 29),
        (100, 0.33, 0.05, 34, 29),
        (1000, 0.33, 0.05, 78, 60),
        (10000, 0.33, 0.05, 92, 70),
    ],
)
def test_the_parameters_are_those_of_the_reference(clients, max_corrupt, max_dropout, k, t):
    """They are those that federated-compute tests for a curious server."""
    assert find_parameters(clients, max_corrupt, max_dropout) == (k, t)


@pytest.mark.parametrize(
    ("clients", "max_corrupt", "max_dropout", "reference", "ours"),
    [(1000, 0.45, 0.45, (822, 417), (824, 418)), (10, 0.05, 0.33, (4, 2), (6, 2))],
)
def test_where_the_reference_is_less_strict_there_are_two_neighbours_more(
    clients, max_corrupt, max_dropout, reference, ours
):
    """In the reference a client may be its own neighbour, and t is raised to 2 after its bound was checked."""
    corrupt, dropout = share_of(max_corrupt, clients), share_of(max_dropout, clients)
    assert not meets_bounds(clients, corrupt, dropout, Parameters(*reference))
    assert find_parameters(clients, max_corrupt, max_dropout) == ours


small = st.tuples(st.integers(20, 400), st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.33]), st.sampled_from([0.0, 0.1, 0.25]))


@given(small)
@settings(max_examples=40, deadline=None)
def test_the_smallest_k_meets_the_bounds_and_two_neighbours_fewer_do_not(numbers):
    clients, max_corrupt, max_dropout = numbers
    corrupt, dropout = share_of(max_corrupt, clients), share_of(max_dropout, clients)
    found = find_parameters(clients, max_corrupt, max_dropout)
    assert meets_bounds(clients, corrupt, dropout, found)
    assert not meets_bounds(clients, corrupt, dropout, Parameters(found.k, found.t - 1)) or found.t == 2
    assert not any(meets_bounds(clients, corrupt, dropout, Parameters(found.k - 2, t)) for t in range(2, found.k - 1))


def test_more_rounds_need_no_fewer_neighbours():
    degrees = [find_parameters(300, 0.2, 0.2, rounds).k for rounds in (1, 100, 10_000, 1_000_000)]
    assert degrees == sorted(degrees)
    assert degrees[0] < degrees[-1]


def bad_events(clients: int, corrupt: int, dropout: int, found: Parameters, seed: int) -> tuple[bool, bool, bool]:
    """Draw one graph, and look for each of the three events by walking it."""
    drawn = random.Random(seed)
    bad = set(drawn.sample(range(clients), corrupt))
    left = set(drawn.sample(range(clients), dropout))
    graph = neighbours(clients, found.k, seed_of(seed))
    exposed = any(len(bad & set(graph[u])) >= found.t for u in set(range(clients)) - bad)
    unrecoverable = any(len(set(others) - left) < found.t for others in graph)
    honest = set(range(clients)) - bad - left
    reached, border = set[int](), [min(honest)]
    while border:
        if (u := border.pop()) not in reached:
            reached.add(u)
            border += honest & set(graph[u])
    return exposed, reached != honest, unrecoverable


@pytest.mark.parametrize("clients", [30, 60])
def test_each_bound_holds_in_graphs_drawn_at_weak_parameters(clients):
    """At 2^-4 and 2^-3 the events can be counted: none is more frequent than its bound, and some do happen."""
    corrupt, dropout, draws = clients // 5, clients // 5, 600
    found = find_parameters(clients, 0.2, 0.2, event_bits=4, sum_bits=3)
    seen = [bad_events(clients, corrupt, dropout, found, seed) for seed in range(draws)]
    counts = [sum(column) for column in zip(*seen, strict=True)]
    for count, bound in zip(counts, (2**-4, 2**-4, 2**-3), strict=True):
        assert count / draws <= bound + 3 * (bound / draws) ** 0.5
    thin = Parameters(found.k - 4, max(2, found.t - 3))
    assert any(map(any, (bad_events(clients, corrupt, dropout, thin, i) for i in range(100))))


@given(st.integers(3, 60), st.integers(1, 20), st.integers(0, 2**64))
def test_each_client_has_k_neighbours_and_is_a_neighbour_of_each(count, half, number):
    k = min(2 * half, count - 1 if count % 2 else count - 2)
    graph = neighbours(count, k, seed_of(number))
    for client, others in enumerate(graph):
        assert len(others) == len(set(others)) == k
        assert others == sorted(others)
        assert client not in others
        assert all(client in graph[other] for other in others)


def test_the_order_of_the_ring_is_the_same_on_every_machine():
    """The file was written once. Devices of two versions that drew two graphs would fail every round."""
    for case in json.loads(GOLDEN.read_text()):
        assert neighbours(case["count"], case["k"], bytes.fromhex(case["seed"])) == case["neighbours"]


def test_every_order_of_the_ring_is_equally_likely():
    counts: dict[tuple[tuple[int, ...], ...], int] = {}
    for number in range(3000):
        ring = tuple(tuple(others) for others in neighbours(5, 2, seed_of(number)))
        counts[ring] = counts.get(ring, 0) + 1
    assert len(counts) == 12  # rings of five: 4! / 2
    assert max(abs(count - 250) for count in counts.values()) < 75


@pytest.mark.parametrize(("count", "k", "size"), [(10, 3, 32), (10, 0, 32), (10, 10, 32), (10, 4, 16)])
def test_what_is_no_graph_is_an_error(count, k, size):
    with pytest.raises(ValueError, match="no Harary graph"):
        neighbours(count, k, bytes(size))


def test_small_cohorts_and_malicious_aggregators_have_the_complete_graph():
    few = find_graph(10, 9, 0.1, 0.1, "curious")
    assert (few.is_complete, few.k, few.t, few.min_survivors) == (True, 8, 6, 6)
    assert find_graph(COMPLETE_UP_TO, COMPLETE_UP_TO, 0.1, 0.1, "curious").is_complete
    assert find_graph(1000, 1000, 0.1, 0.1, "malicious").is_complete
    assert find_graph(1000, 1000, 0.1, 0.1, "curious", "complete").is_complete


def test_a_large_cohort_has_k_neighbours_and_may_lose_no_more_than_planned():
    many = find_graph(1000, 1000, 0.1, 0.1, "curious")
    assert (many.k, many.t, many.min_survivors) == (*find_parameters(1000, 0.1, 0.1), 900)


@pytest.mark.parametrize("members", [900, 950, 999])
def test_all_corrupt_clients_may_be_on_a_smaller_roster(members):
    """Who does not advertise is a drop-out: the rest may lose fewer, and holds as many corrupt clients."""
    found = find_graph(1000, members, 0.1, 0.1, "curious")
    assert found.min_survivors == 900
    assert meets_bounds(members, 100, members - 900, Parameters(found.k, found.t))


def refused(*args, **more) -> PlanError:
    with pytest.raises(PlanError) as error:
        find_graph(*args, **more)
    assert error.value.what
    assert error.value.why
    assert error.value.hint
    return error.value


def test_what_no_graph_withstands_is_refused():
    assert "k-regular" in refused(1000, 1000, 0.1, 0.1, "malicious", "k-regular").what
    assert "no k-regular graph" in refused(20, 20, 0.45, 0.45, "curious", "k-regular").what
    assert "no k-regular graph" in refused(1000, 899, 0.1, 0.1, "curious", "k-regular").what
    assert "a roster of 5 clients" in refused(10, 5, 0.1, 0.1, "curious").what
    assert "a roster of 11 clients" in refused(10, 11, 0.1, 0.1, "curious").what
    with pytest.raises(PlanError, match="no k-regular graph of 6 clients"):
        find_parameters(6, 0.4, 0.4)
    assert "no threshold" in refused(100, 100, 0.4, 0.4, "malicious").what
    assert "at most" in refused(LARGEST_COHORT + 1, LARGEST_COHORT + 1, 0.1, 0.1, "curious").why


def test_auto_takes_the_complete_graph_where_no_other_meets_the_bounds():
    assert find_graph(140, 140, 0.49, 0.49, "curious").is_complete
    assert find_graph(1000, 899, 0.1, 0.1, "curious").is_complete


@pytest.mark.parametrize(
    ("adversary", "kind"), [("curious", "complete"), ("malicious", "auto"), ("malicious", "complete")]
)
def test_a_complete_graph_that_would_take_a_device_minutes_is_refused(adversary, kind):
    """An aggregator could select so many clients that a device does nothing else for hours."""
    assert find_graph(LARGEST_COMPLETE, LARGEST_COMPLETE, 0.1, 0.1, adversary, kind).is_complete
    with pytest.raises(PlanError, match="a complete graph of 4097 clients"):
        find_graph(LARGEST_COMPLETE + 1, LARGEST_COMPLETE + 1, 0.1, 0.1, adversary, kind)
