"""Cutting one set into the parts of many clients: everything once, the same everywhere, nobody without data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.client.task import held_out, own_part, parse_split, partition
from thinwire.client.train import partitions
from thinwire.client.train.errors import BadSplit
from thinwire.client.train.partitions import FEWEST
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.errors import TaskError, UsageError

splits = st.sampled_from(["iid", "dirichlet(0.05)", "dirichlet(0.3)", "dirichlet( 100 )", "shards(1)"])


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
        own = own_part(labels, ClientInfo(partition=index, partitions=4, split=split, seed=seed))
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
    train, test = held_out(indices, share, ClientInfo(seed=seed))
    assert sorted([*train, *test]) == indices.tolist()
    assert len(train) >= 1
    assert len(test) >= 1


def test_one_example_more_moves_others_as_the_how_to_of_private_records_says() -> None:
    of_1000, of_1001 = (set(held_out(np.arange(size), 0.2, ClientInfo())[0].tolist()) for size in (1000, 1001))
    assert len((of_1000 ^ of_1001) - {1000}) == 72


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "IID",
        "dirichlet",
        "dirichlet()",
        "dirichlet(0)",
        "dirichlet(-1)",
        "dirichlet(e)",
        "x",
        "by()",
        "by(a b)",
        "shards(0)",
        "shards(x)",
    ],
)
def test_a_split_that_is_none_is_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="no split"):
        parse_split(spec)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(TaskError, match="too few"):
        partition(np.zeros(7), 4, "iid", 0)


def test_by_a_key_gives_as_many_clients_as_values_one_each() -> None:
    keyed = {"label": np.arange(90) % 3, "writer": np.repeat(["ann", "bob", "cy"], [50, 10, 30])}
    parts = partition(keyed, 3, "by(writer)", 0)
    assert [set(keyed["writer"][part]) for part in parts] == [{"ann"}, {"cy"}, {"bob"}]


@given(count=st.integers(1, 8), values=st.integers(8, 20), seed=st.integers(0, 9))
def test_by_a_key_cuts_no_group_and_leaves_none_out(count: int, values: int, seed: int) -> None:
    labels = np.repeat(np.arange(values), np.random.default_rng(seed).integers(2, 30, values))
    parts = partition(labels, count, "by(label)", seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert sum(len(set(labels[part])) for part in parts) == values


@pytest.mark.parametrize(
    ("split", "count", "error", "said"),
    [
        ("by(writer)", 2, UsageError, "no key"),
        ("by(label)", 5, TaskError, "4 values of label for 5 clients"),
        ("shards(30)", 2, TaskError, "too few for 60 shards"),
    ],
)
def test_a_cut_that_the_labels_do_not_allow_is_refused(split: str, count: int, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        partition(np.repeat(np.arange(4), 10), count, split, 0)


def test_a_value_with_a_single_example_is_refused() -> None:
    with pytest.raises(TaskError, match="has 1 example"):
        partition([0, 0, 0, 1], 2, "by(label)", 0)


def test_keys_of_different_lengths_are_refused() -> None:
    with pytest.raises(TaskError, match="differ in length"):
        partition({"label": [0, 1, 2, 3], "writer": [0, 1]}, 2, "iid", 0)


def test_shards_give_each_client_few_labels_and_much_the_same_number() -> None:
    labels = np.arange(1000) % 10
    parts = partition(labels, 10, "shards(2)", 1)
    assert {len(part) for part in parts} == {100}
    assert max(len(set(labels[part])) for part in parts) <= 4
    assert parts[0].tolist() != partition(labels, 10, "shards(2)", 2)[0].tolist()


def test_a_single_example_cannot_be_both_trained_on_and_held_out() -> None:
    with pytest.raises(BadSplit, match="1 of the examples to train on and to hold out"):
        held_out(np.array([3]), 0.2, ClientInfo())


def test_the_clients_of_a_simulation_cut_their_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, cut = list[int](), partitions.partition

    def counted(*given: Any) -> Any:
        cuts.append(given[1])
        return cut(*given)

    monkeypatch.setattr(partitions, "partition", counted)
    labels = np.array([f"label {n % 7}" for n in range(91)])
    parts = [own_part(labels, ClientInfo(partition=n, partitions=9, split="iid", seed=5)) for n in range(9)]
    assert (cuts, sorted(np.concatenate(parts).tolist())) == ([9], list(range(91)))
    parts[0][:] = 0  # a task may change its own part
    assert own_part(labels, ClientInfo(partition=0, partitions=9, split="iid", seed=5)).any()
    for other in (labels[::-1], labels.astype(object)[::-1]):
        own_part(other, ClientInfo(partition=0, partitions=9, split="iid", seed=5))
    assert cuts == [9, 9, 9]
