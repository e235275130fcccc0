"""The rotation of drive and eden, and what they lose, held against their papers' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.codec_examples import decoded, layout_of, made
from thinwire.compression import Unbiased, parse
from thinwire.compression.codecs.drive_eden import ERRORS, LEVELS, Drive, Eden
from thinwire.compression.rotation import block_sizes, hadamard, rotate, rotate_back, signs
from thinwire.core.prng import second_word, uniform


def test_rounding_behind_a_rotation_draws_from_a_second_word_because_signs_has_the_bits_of_the_first() -> None:
    negative = signs(0, 1 << 16, 7) != 0
    assert np.array_equal(uniform(0, 1 << 16, 7) >= 0.5, negative)
    alike = (uniform(0, 1 << 16, second_word(7)) >= 0.5) == negative
    assert abs(alike.mean() - 0.5) < 4 * 0.5 / 256  # four standard deviations


def test_the_transform_is_hadamards() -> None:
    matrix = np.array([[1]])
    while matrix.shape[0] < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(1).integers(-50, 50, 128).astype(np.float32)
    assert np.array_equal(hadamard(x), (matrix @ x.astype(np.int64)).astype(np.float32))


def test_a_rotation_goes_back() -> None:
    x = np.random.default_rng(2).integers(-50, 50, 1 << 12).astype(np.float32)
    drawn = signs(100, 100 + x.size, 77)
    assert np.array_equal(rotate_back(rotate(x, drawn), drawn) / x.size, x)


def test_blocks_are_the_powers_of_two_of_the_rest() -> None:
    assert block_sizes(63) == []
    assert block_sizes((1 << 16) + (1 << 12) + 65) == [1 << 16, 1 << 12, 1 << 6]


@pytest.mark.parametrize("bits", sorted(ERRORS))
def test_the_levels_are_the_best_for_normal_values(bits: int) -> None:
    """Each level is the mean of what is nearest to it, and the error is the published one (Max 1960, table 1)."""
    values = np.abs(np.random.default_rng(bits).standard_normal(400_000))
    levels = np.array(LEVELS[bits])
    nearest = np.abs(values[:, None] - levels).argmin(axis=1)
    for level in range(levels.size):
        own = values[nearest == level]
        assert abs(own.mean() - levels[level]) < 5 * own.std() / np.sqrt(own.size)
    assert ((values - levels[nearest]) ** 2).mean() == pytest.approx(ERRORS[bits], rel=0.05)


@pytest.mark.parametrize("spec", ["drive", "eden(1)", "eden(2)", "eden(4)"])
def test_a_rotated_vector_comes_back_on_average_with_the_error_of_the_paper(spec: str) -> None:
    x = made(4096, 11, "normal", 0)
    square = float((x.astype(np.float64) ** 2).sum())
    found = np.array([decoded(spec, x, key) for key in range(100)], np.float64)
    kind = parse(spec).bind(layout_of(4096)).kind
    assert isinstance(kind, Unbiased)
    assert ((found - x) ** 2).sum(axis=1).mean() / square == pytest.approx(kind.omega, rel=0.08)
    assert ((found.mean(axis=0) - x) ** 2).sum() / square <= 2 * kind.omega / 100


def test_drive_is_eden_of_one_bit() -> None:
    x = made(5000, 1, "normal", 0)
    a, b = (step.quantize(x, 99) for step in (Drive(), Eden(1)))
    assert np.array_equal(a[0], b[0])
    assert np.array_equal(a[1], b[1])
