"""How near rans comes to the entropy, that all paths give its bytes, and what it refuses."""

from __future__ import annotations

from math import lgamma, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from thinwire.compression import frequencies, native
from thinwire.compression.base import packed_bytes
from thinwire.compression.codecs.rans import Rans
from thinwire.core.errors import BadPayload

RANS = Rans()
PATHS = native.available()
Symbols = NDArray[np.int8]

few = settings(max_examples=30, deadline=None)
sizes = st.one_of(st.integers(0, 300), st.integers(300, 70_000))
seeds = st.integers(0, 2**32 - 1)
densities = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-5, 0).map(lambda power: 10**power), st.floats(0, 1))


def entropy_bytes(symbols: Symbols) -> float:
    """Of order 0, by the frequencies that the symbols have."""
    counts = np.bincount(symbols.view(np.uint8), minlength=256)
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum()) / 8


def ternary(size: int, seed: int, density: float) -> Symbols:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(size) < density, 2 * rng.integers(0, 2, size) - 1, 0).astype(np.int8)


def normal(size: int, seed: int, bits: int) -> Symbols:
    rng, top = np.random.default_rng(seed), 2 ** (bits - 1) - 1
    x = rng.standard_normal(size)
    levels = x * (top / np.abs(x).max(initial=1e-9))
    symbols: Symbols = np.floor(levels + rng.random(size)).clip(-top, top).astype(np.int8)
    return symbols


def signs(size: int, seed: int, share: float) -> Symbols:
    return np.where(np.random.default_rng(seed).random(size) < share, -1, 0).astype(np.int8)


def near(symbols: Symbols, bits: int, more: float = 0) -> None:
    data = RANS.pack_symbols(symbols, bits)
    assert len(data) <= RANS.max_symbol_bytes(symbols.size, bits) == 1 + packed_bytes(symbols.size, bits)
    assert len(data) <= 1.02 * entropy_bytes(symbols) + 16 + more
    assert np.array_equal(RANS.unpack_symbols(data, symbols.size, bits), symbols)


@few
@given(size=sizes, seed=seeds, density=densities)
def test_ternary_symbols_of_any_density_are_within_two_percent_and_16_bytes(size, seed, density) -> None:
    near(ternary(size, seed, density), 2)


@few
@given(size=sizes, seed=seeds, share=densities)
def test_signs_are_within_two_percent_and_16_bytes(size, seed, share) -> None:
    near(signs(size, seed, share), 1)


@few
@given(size=sizes, seed=seeds)
def test_normal_values_of_15_levels_are_within_two_percent_and_16_bytes(size, seed) -> None:
    near(normal(size, seed, 4), 4)


@few
@given(size=sizes, seed=seeds, bits=st.sampled_from([7, 8]))
def test_normal_values_of_many_levels_are_within_two_percent_and_16_bytes_and_what_their_frequencies_take(
    size, seed, bits
) -> None:
    """A short stream's entropy leaves out its 100 or 200 frequencies, and nobody can (Rissanen 1984)."""
    near(normal(size, seed, bits), bits, more=16 if size < 2000 else 0)


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.38, 0.5, 0.51, 0.7, 0.9, 0.99, 0.9999, 1])
def test_random_indices_of_any_share_are_within_two_percent_and_16_bytes(share: float) -> None:
    size = 1 << 20
    many = round(share * size)
    indices = np.sort(np.random.default_rng(5).choice(size, many, replace=False))
    entropy = (lgamma(size + 1) - lgamma(many + 1) - lgamma(size - many + 1)) / log(2) / 8
    data = RANS.pack_indices(indices)
    assert len(data) <= 1.02 * entropy + 16
    assert np.array_equal(RANS.unpack_indices(data, many, size), indices)


@pytest.mark.parametrize("least", [0, 20, 60, 126])
def test_where_large_symbols_are_more_frequent_the_largest_parameter_of_normal_is_taken_and_the_best(
    least: int,
) -> None:
    symbols = [(n >> 1) ^ -(n & 1) for n in range(255)]
    counts = [100 + 7 * (n % 5) + 300 * (abs(s) > least) for n, s in enumerate(symbols)]
    parameter, found = frequencies.fitting_normal(counts, symbols)
    assert parameter == frequencies.MAX_NORMAL
    costs = [frequencies.normal(parameter, tuple(symbols)).cost(counts) for parameter in range(0, 256, 5)]
    assert min(costs) > 0.999 * found.cost(counts)
    assert frequencies.fitting_normal(counts[::-1], symbols)[0] < frequencies.MAX_NORMAL


def test_equal_frequencies_of_a_number_of_symbols_that_is_no_power_of_two_have_a_short_head() -> None:
    symbols = np.repeat(np.arange(-20, 20, dtype=np.int8), 25)
    assert len(RANS.pack_symbols(symbols, 8)) <= entropy_bytes(symbols) + 9


def test_gaps_that_are_not_geometric_bring_their_frequencies_where_that_is_shorter() -> None:
    """All lie in a tenth of the blocks, as the largest values of a real update do."""
    rng, size = np.random.default_rng(2), 1 << 20
    inside = np.repeat(rng.random(size >> 10) < 0.1, 1 << 10)
    indices = np.flatnonzero((rng.random(size) < 0.2) & inside)
    share = indices.size / size
    entropy = size * (-share * np.log2(share) - (1 - share) * np.log2(1 - share)) / 8
    assert len(RANS.pack_indices(indices)) < 0.6 * entropy


def test_a_small_model_sends_few_bytes() -> None:
    """60 of 5000 values: 83 bytes are their entropy."""
    symbols = ternary(5000, 1, 0.0124)
    assert len(RANS.pack_symbols(symbols, 2)) <= entropy_bytes(symbols) + 6


@few
@given(gaps=st.lists(st.integers(0, 2**22), max_size=200), times=st.sampled_from([1, 30]), more=st.integers(0, 999))
def test_no_indices_take_more_than_the_most(gaps, times, more) -> None:
    indices = np.cumsum(np.array(gaps * times, np.int64) + 1) - 1
    indices = indices[indices < 1 << 24]
    size = (int(indices[-1]) if indices.size else 0) + 1 + more
    assert len(RANS.pack_indices(indices)) <= RANS.max_index_bytes(indices.size, size)


bytes_of = st.one_of(
    st.binary(max_size=300),
    st.lists(st.sampled_from([0, 0, 0, 0, 1, 255, 3]), max_size=300).map(bytes),
    st.lists(st.sampled_from([2, 2, 2, 2, 2, 0, 254]), max_size=300).map(bytes),
)
changes = st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=3)


def tried(right: bytes, cuts: list[tuple[int, int]]) -> list[bytes]:
    broken = bytearray(right)
    for where, what in cuts:
        if broken:
            broken[where % len(broken)] = what
    return [right, bytes(broken), right[:-1], right + b"\0", bytes(broken)[1:]]


@few
@given(given=bytes_of, bits=st.integers(1, 8), times=st.sampled_from([1, 7, 40]), cuts=changes)
def test_symbols_are_coded_alike_on_all_paths_and_streams_that_are_none_refused_alike(given, bits, times, cuts) -> None:
    symbols = np.frombuffer(given * times, np.int8) >> np.int8(8 - bits)
    size, places = symbols.size, np.flatnonzero(symbols)

    def read(data: bytes) -> bytes | str:
        try:
            found = RANS.unpack_symbols(data, size, bits)
        except BadPayload:
            return "refused"
        sparse = RANS.unpack_sparse(data, size, bits)
        if sparse is not None:
            assert np.array_equal(sparse[0], np.flatnonzero(found))
            assert np.array_equal(sparse[1], found[found != 0])
        return found.tobytes()

    results = list[tuple[bytes, list[bytes | str]]]()
    for path in PATHS:
        with native.using(path):
            right = RANS.pack_symbols(symbols, bits)
            assert RANS.pack_sparse(places, symbols[places], size, bits) == right, path
            results.append((right, [read(data) for data in tried(results[0][0] if results else right, cuts)]))
    assert results[0][1][0] == symbols.tobytes()
    assert all(result == results[0] for result in results)


@few
@given(
    gaps=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**9)), min_size=1, max_size=300),
    times=st.sampled_from([1, 20]),
    cuts=changes,
)
def test_indices_are_coded_alike_on_all_paths_and_streams_that_are_none_refused_alike(gaps, times, cuts) -> None:
    indices = np.cumsum(np.array(gaps * times, np.int64) + 1) - 1
    size = int(indices[-1]) + 1

    def read(data: bytes) -> bytes | str:
        try:
            return RANS.unpack_indices(data, indices.size, size).tobytes()
        except BadPayload:
            return "refused"

    results = list[tuple[bytes, list[bytes | str]]]()
    for path in PATHS:
        with native.using(path):
            right = RANS.pack_indices(indices)
            results.append((right, [read(data) for data in tried(right, cuts)]))
    assert results[0][1][0] == indices.tobytes()
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_long_stream_has_the_bytes_of_numpy_in_256_lanes(threads: int) -> None:
    symbols = ternary(1 << 20, 9, 0.6)
    with native.using("numpy"):
        right = RANS.pack_symbols(symbols, 2)
        assert np.array_equal(RANS.unpack_symbols(right, symbols.size, 2), symbols)
    with native.using_threads(threads):
        assert RANS.pack_symbols(symbols, 2) == right
        assert np.array_equal(RANS.unpack_symbols(right, symbols.size, 2), symbols)


@pytest.mark.parametrize("size", [2048 * 16 + 5, 2048 * 48 + 17, 2048 * 130 + 255])
def test_streams_of_sixteen_lanes_and_more_are_coded_and_refused_alike_on_all_paths(size: int) -> None:
    symbols = normal(size, 2, 4)
    results = list[tuple[bytes, list[bytes | None]]]()
    for path in PATHS:
        with native.using(path):
            right = RANS.pack_symbols(symbols, 4)
            read = list[bytes | None]()
            for data in (right, right[:-2], right[: len(right) // 2], right[:9], right[:200] + right[198:]):
                try:
                    read.append(RANS.unpack_symbols(data, size, 4).tobytes())
                except BadPayload:
                    read.append(None)
            results.append((right, read))
    assert results[0][1] == [symbols.tobytes(), None, None, None, None]
    assert all(result == results[0] for result in results)


STREAMS = {
    "sparse": (RANS.pack_symbols(ternary(500, 1, 0.1), 2), 500, 2),
    "dense": (RANS.pack_symbols(normal(900, 1, 4), 4), 900, 4),
    "normal": (RANS.pack_symbols(normal(3000, 1, 8), 8), 3000, 8),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_bit_that_flips_behind_the_header_changes_the_symbols_or_is_refused(name: str) -> None:
    """No two streams of one header have the same symbols."""
    data, items, bits = STREAMS[name]
    right = RANS.unpack_symbols(data, items, bits).tobytes()
    for bit in range(64, 8 * len(data), 7):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            assert RANS.unpack_symbols(bytes(broken), items, bits).tobytes() != right
        except BadPayload:
            continue


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "a form"),
        (b"\x03", "a form"),
        (b"\x08", "a form"),
        (b"\x24", "ends within a number"),
        (b"\x14\x33", "at most half"),
        (b"\x04\x00\x00", "holds something"),
        (b"\x14\x05\xd0", "the mean of gaps"),
        (b"\x14\x05\x10\x00", "has 1 states"),
        (b"\x14\x05\x10\x00\x00\x00\x00\x00", "a state"),
        (b"\x10" + bytes(99), "without frequencies"),
        (b"\x0c\x00\x05", "the background"),
        (b"\x21\x06\x40" + bytes(9), "levels are"),
        (b"\x21\x02", "cut off"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_rans_never_makes_is_refused_with_the_reason(path: str, data: bytes, why: str) -> None:
    with native.using(path), pytest.raises(BadPayload) as refused:
        RANS.unpack_symbols(data, 100, 2)
    assert why in f"{refused.value.what}: {refused.value.why}"


def test_a_vector_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        RANS.pack_indices(np.array([1 << 26]))
