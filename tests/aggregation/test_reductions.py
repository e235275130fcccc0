"""The laws of each reduction, its breakdown point, and the results of Flower's own strategies on the same vectors."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.server.strategy import aggregate as flower
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from thinwire.aggregation import UpdateRows, reduction_base
from thinwire.aggregation.reductions import reduction_of, reductions
from thinwire.core.disk_reserve import FREE_BYTES
from thinwire.core.errors import CodecError, ThinwireError
from thinwire.core.layout import FLOAT_BYTES
from thinwire.core.types import Vector

SPECS = ("median", "trimmed(0.2)", "trimmed(2)", "krum(1)", "multi-krum(1, 3)", "geometric-median", "clipped(3)")
PAGE = 4096  # bytes, the least that a file takes on the disk
Updates = NDArray[np.float32]


def reduce(spec: str, updates: Sequence[Vector] | Updates, names: Sequence[str] = ()) -> Vector:
    rows = UpdateRows(Path(tempfile.gettempdir()), len(updates[0]))
    for index, update in enumerate(updates):
        rows.add(names[index] if names else f"run.1.{index:03}", [update[:3], update[3:]])
    return reduction_of(spec).reduce(rows)


def drawn(seed: int, count: int, size: int = 40) -> Updates:
    return np.random.default_rng(seed).normal(1.0, 1.0, (count, size)).astype(np.float32)


def test_each_reduction_has_its_laws_here() -> None:
    assert {spec.partition("(")[0] for spec in SPECS} == reductions.own


@pytest.mark.parametrize("spec", SPECS)
def test_each_reduction_names_its_paper_and_its_breakdown_point(spec: str) -> None:
    text = " ".join((type(reduction_of(spec)).__doc__ or "").split())
    assert re.search(r"[A-Z][a-z]+ et al\. 20\d\d", text)
    assert "breakdown point" in text.lower()


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(7, 12), size=st.integers(4, 40))
def test_the_order_of_arrival_changes_no_bit(spec: str, seed: int, count: int, size: int) -> None:
    updates, order = drawn(seed, count, size), np.random.default_rng(seed).permutation(count)
    names = [f"run.1.{index:03}" for index in order]
    assert reduce(spec, updates).tobytes() == reduce(spec, updates[order], names).tobytes()


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(7, 12))
def test_names_do_not_decide(spec: str, seed: int, count: int) -> None:
    updates = drawn(seed, count)
    assert np.allclose(reduce(spec, updates), reduce(spec, updates[::-1]), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(7, 12))
def test_equal_updates_give_that_update(spec: str, seed: int, count: int) -> None:
    (update,) = drawn(seed, 1)
    assert np.array_equal(reduce(spec, [update] * count), update)


@pytest.mark.parametrize("size", [2.0**59, 1e6, 3.0])
@pytest.mark.parametrize("spec", SPECS)
def test_hostile_updates_do_not_move_it_far(spec: str, size: float) -> None:
    for seed in range(10):
        updates = drawn(seed, 9)
        honest = updates[:-1] if "(1" in spec or "(0.2" in spec else updates[:-2]
        updates[len(honest) :] = size * np.random.default_rng(seed).choice([-1.0, 1.0], updates[len(honest) :].shape)
        found = reduce(spec, updates)
        spread = max(float(np.linalg.norm(a - b)) for a in honest for b in honest)
        assert np.linalg.norm(found - honest.mean(axis=0)) <= 2 * spread
        if reduction_of(spec).needs_dense:  # each coordinate lies between two honest ones
            assert (found <= honest.max(axis=0)).all()
            assert (found >= honest.min(axis=0)).all()
        if spec == "krum(1)":
            assert any(np.array_equal(found, one) for one in honest)
    assert np.linalg.norm(updates.mean(axis=0) - honest.mean(axis=0)) > spread or size < 100, "the mean is moved"


@pytest.mark.parametrize("count", [7, 10, 20])
def test_it_gives_what_flowers_strategies_give(count: int) -> None:
    updates = drawn(count, count, 501)
    results = [([update], 1) for update in updates]
    for spec, theirs in (
        ("median", flower.aggregate_median(results)),
        ("trimmed(0.2)", flower.aggregate_trimmed_avg(results, 0.2)),
        ("krum(2)", flower.aggregate_krum(results, 2, 0)),
        ("multi-krum(2, 3)", flower.aggregate_krum(results, 2, 3)),
    ):
        assert np.allclose(reduce(spec, updates), theirs[0], atol=1e-5), spec


def test_blocks_of_coordinates_change_no_bit_of_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = drawn(1, 9, 1000)
    whole = [reduce(spec, updates) for spec in SPECS]
    monkeypatch.setattr(reduction_base, "CACHED", 9 * 64)
    for spec, before in zip(SPECS, whole, strict=True):
        assert np.allclose(reduce(spec, updates), before, rtol=1e-6), spec
        assert spec != "median" or reduce(spec, updates).tobytes() == before.tobytes()


def test_the_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    updates = drawn(3, 9).astype(np.float64)
    found = reduce("geometric-median", updates.astype(np.float32)).astype(np.float64)
    least = np.linalg.norm(updates - found, axis=1).sum()
    for seed in range(20):
        near = found + np.random.default_rng(seed).normal(0, 1e-2, found.shape)
        assert np.linalg.norm(updates - near, axis=1).sum() >= least


def test_it_reads_no_more_than_it_needs() -> None:
    rows = UpdateRows(Path(tempfile.gettempdir()), 100)
    for index, update in enumerate(drawn(0, 5, 100)):
        rows.add(str(index), [update])
    krum = reduction_of("krum(1)")
    weights = np.array([0, 0, 1.0, 0, 0])
    assert [rows_of.shape for _, rows_of in rows.blocks([2])] == [(1, 100)]
    assert np.array_equal(rows.combined(weights), drawn(0, 5, 100)[2])
    krum.reduce(rows)
    assert len(krum.chosen) == 1


def test_two_rounds_never_count_on_the_same_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with space for five updates beside what stays free, and two rounds of three each."""
    first, second = rounds = [UpdateRows(tmp_path, PAGE // FLOAT_BYTES) for _ in range(2)]

    def usage(folder: Path) -> SimpleNamespace:
        taken = sum(os.fstat(one._file.fileno()).st_blocks * 512 for one in rounds if one._file is not None)
        return SimpleNamespace(free=FREE_BYTES + 5 * PAGE - taken, total=10**12)

    monkeypatch.setattr(reduction_base, "shutil", SimpleNamespace(disk_usage=usage))
    first.allocate(3)
    with pytest.raises(ThinwireError, match="reduce keeps 3 decoded updates"):
        second.allocate(3)
    second.allocate(2)
    second.close()
    first.close()
    second.allocate(3)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("medain", "no reduction 'medain'"),
        ("median(1)", "its brackets hold other numbers"),
        ("krum", "it takes f"),
        ("krum(1, 2)", "it takes f"),
        ("krum(0)", "whole numbers"),
        ("trimmed(0.5)", "below 0.5"),
        ("trimmed(1.5)", "below 0.5"),
        ("clipped(0)", "above 0"),
        ("krum(nan)", "its brackets hold other numbers"),
        ("krum((1)", "it is a name"),
    ],
)
def test_a_spec_that_is_not_valid_is_refused(spec: str, said: str) -> None:
    with pytest.raises(CodecError) as refused:
        reduction_of(spec)
    assert said in f"{refused.value.what} {refused.value.why} {refused.value.hint}"


@pytest.mark.parametrize(
    ("spec", "fewest"),
    [("median", 3), ("trimmed(2)", 5), ("trimmed(0.2)", 5), ("krum(2)", 7), ("multi-krum(1, 4)", 7), ("clipped(1)", 3)],
)
def test_how_many_updates_it_needs(spec: str, fewest: int) -> None:
    assert reduction_of(spec).fewest == fewest
