"""The rotation of drive and eden, and what they lose, held against their papers' numbers."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import numpy as np
import pytest

from tests.support.codec_examples import decoded, layout_of, made
from thinwire.compression import Codec, Contractive, Unbiased, feedback, native, parse
from thinwire.compression.codecs.drive_eden import Drive, Eden
from thinwire.compression.codecs.pack_zstd import SparseSymbols, nonzero
from thinwire.compression.feedback import ef21
from thinwire.compression.normal_values import ERRORS, LEVELS, bits_beyond, threshold, variance_beyond
from thinwire.compression.rotation import block_sizes, hadamard, rotate, rotate_back, signs
from thinwire.core import Key
from thinwire.core.errors import CodecError, NonFiniteUpdate
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


@pytest.mark.parametrize("rate", ["0.03", "0.1", "0.31", "0.6", "0.95"])
def test_below_one_bit_a_normal_vector_takes_the_bits_and_gets_the_error_that_it_says(rate: str) -> None:
    x = np.random.default_rng(3).standard_normal(1 << 19).astype(np.float32)
    bound = parse(f"eden({rate})").bind(layout_of(x.size))
    payload = bound.encode(x, bound.init(), Key(1)).payload
    assert 8 * len(payload) <= 1.02 * float(rate) * x.size + 8 * 100
    assert isinstance(bound.kind, Unbiased)
    y = bound.decode(payload).astype(np.float64)
    assert np.square(y - x).sum() / np.square(x).sum() == pytest.approx(bound.kind.omega, rel=0.05)
    assert y @ x / (x @ x) == pytest.approx(1, abs=1e-4)  # the scale makes it so, in each block


def test_between_one_and_two_bits_the_error_is_below_that_of_both_neighbours_in_proportion() -> None:
    one, two = (parse(f"eden({b})").bind(layout_of(64)).kind for b in (1, 2))
    assert isinstance(one, Unbiased)
    assert isinstance(two, Unbiased)
    for part in (0.1, 0.25, 0.4, 0.5):
        assert variance_beyond(threshold(Decimal(str(1 + part)))) < (1 - part) * one.omega + part * two.omega


@pytest.mark.parametrize("rate", ["0.1", "0.6", "1.5"])
def test_between_whole_bits_a_scale_divided_by_1_and_omega_contracts(rate: str) -> None:
    x = np.random.default_rng(3).standard_normal(1 << 17).astype(np.float32)
    bound = parse(f"eden({rate})").bind(layout_of(x.size)).under_feedback()
    assert isinstance(bound.kind, Contractive)
    left = bound.decode(bound.encode(x, bound.init(), Key(1)).payload).astype(np.float64) - x
    assert np.square(left).sum() / np.square(x).sum() == pytest.approx(1 - bound.kind.delta, rel=0.01)


@pytest.mark.parametrize("around", [feedback, ef21])
def test_below_one_bit_a_residual_of_a_client_is_refused(around: Callable[[Codec], Codec]) -> None:
    for spec in ("eden(0.1)", 'layers("a"=int8; *=topk(0.5) > eden(0.3))'):
        with pytest.raises(CodecError, match="loses accuracy"):
            around(parse(spec)).bind(layout_of(600))


@pytest.mark.parametrize("t, bits, omega", [(1.6, 0.61, 1.23), (2.0, 0.31, 2.90), (2.5, 0.11, 9.11)])
def test_thresholds_have_the_bits_and_errors_of_the_probe_that_proposed_them(
    t: float, bits: float, omega: float
) -> None:
    assert bits_beyond(t) == pytest.approx(bits, abs=0.005)
    assert variance_beyond(t) == pytest.approx(omega, abs=0.005)
    assert threshold(Decimal(str(round(bits_beyond(t), 6)))) == pytest.approx(t, abs=1 / 4096)


def test_a_block_of_equal_magnitudes_is_sent_whole_and_alike_on_every_path() -> None:
    """All values of a rotated spike are the largest: more than 16-bit sums hold, so kernels take floats."""
    x = np.zeros(1 << 16, np.float32)
    x[5] = -3
    found = set[bytes]()
    for path in native.available():
        with native.using(path):
            found.add(decoded("eden(0.1)", x).tobytes())
    (only,) = found
    assert np.allclose(np.frombuffer(only, np.float32), x, atol=1e-6)


def test_the_largest_values_of_a_whole_block_are_sent_alike_where_none_reaches_the_threshold() -> None:
    """Ten spikes at independent places: 128 of 2^16 rotated values are the largest, root of 10 root mean squares."""
    codec, x = Eden.read("0.01"), np.zeros(1 << 16, np.float32)
    x[[1 << k for k in range(10)]] = 1
    with native.using("numpy"):
        symbols, scales = codec.quantize(x, 5)
    places = np.flatnonzero(symbols)
    assert places.size == 128
    for path in native.available()[:-1]:
        with native.using(path):
            found, factors = codec.quantize(x, 5)
        assert isinstance(found, SparseSymbols)
        assert np.array_equal(found.places, places)
        assert np.array_equal(found.symbols, symbols[places])
        assert np.array_equal(factors, scales)


@pytest.mark.parametrize("kind", ["normal", "spike"])
@pytest.mark.parametrize("rate", ["0.02", "0.1", "0.6", "1.3"])
def test_what_is_sent_below_one_bit_is_the_same_on_every_path_and_number_of_threads(
    rate: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels give places alone while these take less memory than all symbols: not of a spike, which is sent whole."""
    monkeypatch.setattr(native, "LEAST", 1 << 16)
    codec, x = Eden.read(rate), np.random.default_rng(7).standard_normal(3 * (1 << 16) + (1 << 12) + 100, np.float32)
    if kind == "spike":
        x[1 << 16 : 1 << 17] = 0
        x[70_000] = 2
    with native.using("numpy"):
        symbols, scales = codec.quantize(x, 5)
    places = np.flatnonzero(symbols)
    for path in native.available()[:-1]:
        for threads in (1, 3):
            with native.using(path), native.using_threads(threads):
                found, factors = codec.quantize(x, 5)
            assert isinstance(found, SparseSymbols) == (rate != "1.3" and kind == "normal")
            assert np.array_equal(factors, scales)
            own_places, own_symbols = nonzero(found)
            assert np.array_equal(own_places, places)
            assert np.array_equal(own_symbols, symbols[places])


@pytest.mark.parametrize("path", native.available())
@pytest.mark.parametrize("at", [3, (1 << 16) + 20])
def test_a_value_that_is_not_finite_is_refused_below_one_bit(path: str, at: int) -> None:
    x = np.ones((1 << 16) + 40, np.float32)
    x[at] = np.nan
    with native.using(path), pytest.raises(NonFiniteUpdate):
        parse("eden(0.1)").bind(layout_of(x.size)).encode(x, {}, Key(1))


@pytest.mark.parametrize(
    "spec, hint", [("eden(0.0001)", "eden(0.001)"), ("eden(1.6)", "eden(1.5)"), ("eden(0.x)", "0.1")]
)
def test_bits_that_are_not_possible_are_refused_with_what_to_try(spec: str, hint: str) -> None:
    with pytest.raises(CodecError) as refused:
        parse(spec)
    assert hint in refused.value.hint


def test_the_largest_value_of_a_block_is_sent_where_none_reaches_the_threshold() -> None:
    x = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    for key in range(20):
        y = decoded("eden(0.001)", x, key)
        assert y @ x / (x @ x) == pytest.approx(1, abs=1e-3)
