"""What coders write of symbols and places, and how close to the entropy that is."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.compression import native
from thinwire.compression.base import packed_bytes
from thinwire.compression.codecs.delta_rice import Rice, _written
from thinwire.compression.codecs.pack_zstd import packed, unpacked
from thinwire.core.errors import BadPayload


@given(bits=st.integers(1, 7), items=st.integers(0, 100), seed=st.integers(0, 99))
@settings(deadline=None)
def test_symbols_of_any_width_come_back(bits: int, items: int, seed: int) -> None:
    half = 1 << (bits - 1)
    symbols = np.random.default_rng(seed).integers(-half, half, items).astype(np.int8)
    data = packed(symbols, bits)
    assert data.size == packed_bytes(items, bits)
    assert np.array_equal(unpacked(data, items, bits), symbols)


@pytest.mark.parametrize("bits", [1, 2, 3, 7])
def test_symbols_that_two_threads_pack_are_those_that_numpy_packs(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part begins where the first one ends."""
    monkeypatch.setattr(native, "LEAST", native.GRAIN)
    half = 1 << (bits - 1)
    symbols = np.random.default_rng(bits).integers(-half, half, 2 * native.GRAIN + 13).astype(np.int8)
    with native.using("numpy"):
        expected = packed(symbols, bits)
    with native.using_threads(2):
        assert len(native.parts(0, symbols.size)) == 2
        assert np.array_equal(packed(symbols, bits), expected)
        assert np.array_equal(unpacked(expected, symbols.size, bits), symbols)


def test_bits_behind_the_last_symbol_are_refused() -> None:
    with pytest.raises(BadPayload, match="behind the last symbol"):
        unpacked(np.array([0b1000_0001], np.uint8), 3, 2)


@pytest.mark.parametrize(
    ("ratio", "over"),
    [(0.0005, 0.02), (0.001, 0.02), (0.01, 0.02), (0.03, 0.02), (0.1, 0.02), (0.2, 0.03), (0.3, 0.02)],
)
def test_rice_comes_within_two_percent_and_eight_bytes_of_the_entropy_of_places(ratio: float, over: float) -> None:
    """Between two parameters it is worst: 2.4 % where every fifth value is sent."""
    size = 1 << 20
    indices = np.flatnonzero(np.random.default_rng(3).random(size) < ratio)
    share = indices.size / size
    entropy = -size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    data = Rice().pack_indices(indices)
    assert len(data) * 8 <= entropy * (1 + over) + 64
    assert np.array_equal(Rice().unpack_indices(data, indices.size, size), indices)


def test_the_places_of_one_percent_take_a_twelfth_of_a_bit_a_parameter() -> None:
    size = 1 << 20
    indices = np.flatnonzero(np.random.default_rng(4).random(size) < 0.01)
    assert len(Rice().pack_indices(indices)) * 8 / size * (0.01 * size / indices.size) <= 0.083


@given(seed=st.integers(0, 999), bits=st.integers(1, 8), spread=st.floats(0.2, 60))
@settings(deadline=None, max_examples=40)
def test_rice_is_never_longer_than_packed_symbols_but_for_its_parameters(seed: int, bits: int, spread: float) -> None:
    half = 1 << (bits - 1)
    drawn = np.random.default_rng(seed).normal(0, spread, 5000)
    symbols = np.clip(np.rint(drawn), -half, half - 1).astype(np.int8)
    data = Rice().pack_symbols(symbols, bits)
    assert len(data) <= packed_bytes(5000, bits) + 3
    assert np.array_equal(Rice().unpack_symbols(data, 5000, bits), symbols)


@pytest.mark.parametrize("data", [b"", b"\x19\x01", b"\xff\x01", b"\x00", b"\x00\xff\xff\xff", b"\x18" + b"\xff" * 16])
def test_what_rice_never_writes_is_refused(data: bytes) -> None:
    with pytest.raises(BadPayload):
        Rice().unpack_indices(data, 5, 100)


@pytest.mark.parametrize("path", ["numpy", ""])
def test_a_symbol_next_to_the_largest_is_refused(path: str) -> None:
    """Of 2 bits there are the numbers 0 to 3; here they are coded as gaps are, which have no such limit."""
    with native.using(path) if path else contextlib.nullcontext():
        assert Rice().unpack_symbols(_written(np.full(9, 3), 0), 9, 2).tolist() == [-2] * 9
        with pytest.raises(BadPayload, match="the number 4"):
            Rice().unpack_symbols(_written(np.full(9, 4), 0), 9, 2)


def test_a_parameter_for_each_block_and_the_last_one_short() -> None:
    indices = np.concatenate([np.arange(4096), 4096 + np.arange(1, 500) * 1000])
    data = Rice().pack_indices(indices)
    assert (data[0], len(data) < 4096 // 8 + 499 * 12 // 8 + 8) == (0, True)
    assert np.array_equal(Rice().unpack_indices(data, indices.size, 1 << 20), indices)
