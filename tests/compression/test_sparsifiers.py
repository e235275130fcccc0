"""Which places each sparsifier sends, held against sorting all of them."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np
import pytest

from tests.support.codec_examples import made
from thinwire.compression import native, parse
from thinwire.compression.codecs.topk_randk_threshold import RandK, Threshold, TopK
from thinwire.core import Key, Layout


@pytest.mark.parametrize("size", [1, 2, 99, 101, 5000, 300_001])
@pytest.mark.parametrize("ratio", ["0.001", "0.01", "0.3", "0.999"])
@pytest.mark.parametrize("shape", ["normal", "ties", "sparse"])
def test_topk_is_what_sorting_all_of_them_gives(size: int, ratio: str, shape: str) -> None:
    """The largest first, of equal ones the lower place: of 300 001 values a threshold is guessed from a sample."""
    x, count = made(size, 5, shape, 0), max(1, ceil(Fraction(ratio) * size))
    expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:count])
    for path in native.available():
        with native.using(path):
            places, values = TopK.read(ratio).select(x, 0)
        assert np.array_equal(places, expected), path
        assert np.array_equal(values, x[places]), path


def test_a_threshold_sends_what_is_over_it_and_always_the_largest() -> None:
    x = made(2000, 5, "normal", 0)
    over = np.abs(x) >= 1.5 * np.sqrt(np.mean(x.astype(np.float64) ** 2))
    assert np.array_equal(Threshold.read("1.5").select(x, 0)[0], np.flatnonzero(over))
    assert Threshold.read("900").select(x, 0)[0].tolist() == [int(np.argmax(np.abs(x)))]
    assert Threshold.read("1").select(np.zeros(7, np.float32), 0)[0].size == 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_drawn_places_are_all_different_and_in_order(size: int) -> None:
    for ratio in ("0.1", "1"):
        places = RandK.read(ratio).places(size, 12345)
        assert places.size == RandK.read(ratio).count(size)
        assert (np.diff(places) > 0).all()
        assert 0 <= places[0] <= places[-1] < size


def test_every_place_is_drawn_as_often_as_every_other() -> None:
    counts = np.zeros(1000)
    for word in range(2000):
        counts[RandK.read("0.1").places(1000, word * 40503)] += 1
    expected, spread = 200, np.sqrt(2000 * 0.1 * 0.9)
    assert np.abs(counts - expected).max() < 5 * spread
    assert abs(counts.std() - spread) < spread / 5


def test_no_place_travels() -> None:
    codec = parse("randk(0.1)").bind(Layout.of({"w": (10_000,)}))
    payload = codec.encode(made(10_000, 1, "normal", 0), {}, Key(1)).payload
    assert len(payload) <= 4 * 1000 + 4 + 24
