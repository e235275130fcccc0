"""Cutting one set into the parts of many clients: everything once, the same everywhere, nobody without data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.client.compute.partitions import FEWEST
from thinwire.client.compute.site import Site
from thinwire.client.partitions import held_out, own_part, parse_split, partition
from thinwire.core.errors import TaskError, UsageError

splits = st.sampled_from(["iid", "dirichlet(0.05)", "dirichlet(0.3)", "dirichlet( 100 )"])


@given(
    split=splits,
    count=st.integers(1, 12),
    size=st.integers(24, 200),
    classes=st.integers(1, 10),
    seed=st.integers(0, 9),
)
def test_the_parts_are_everything_once_and_none_is_empty(
    split: str, count: int, size: int, classes: int, seed: int
) -> None:
    labels = np.arange(size) % classes
    parts = partition(labels, count, split, seed)
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(size))
    assert min(len(part) for part in parts) >= FEWEST


@given(split=splits, seed=st.integers(0, 99))
def test_every_client_works_out_the_same_cut(split: str, seed: int) -> None:
    labels = np.arange(100) % 10
    parts = partition(labels, 4, split, seed)
    for index in range(4):
        own = own_part(labels, Site(partition=index, partitions=4, split=split, seed=seed))
        assert own.tolist() == parts[index].tolist()


def test_a_small_alpha_gives_each_client_few_labels() -> None:
    labels = np.arange(4000) % 10

    def largest_share(split: str) -> float:
        parts = partition(labels, 8, split, 1)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share("iid") < 0.2 < largest_share("dirichlet(0.3)") < largest_share("dirichlet(0.02)")


@given(size=st.integers(2, 100), share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_what_is_held_out_is_never_trained_on(size: int, share: float, seed: int) -> None:
    indices = np.arange(size) * 3
    train, test = held_out(indices, share, Site(seed=seed))
    assert sorted([*train, *test]) == indices.tolist()
    assert len(train) >= 1
    assert len(test) >= 1


@pytest.mark.parametrize(
    "spec", ["", "IID", "dirichlet", "dirichlet()", "dirichlet(0)", "dirichlet(-1)", "dirichlet(e)", "x"]
)
def test_a_split_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="no split"):
        parse_split(spec)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(TaskError, match="too few"):
        partition(np.zeros(7), 4, "iid", 0)
