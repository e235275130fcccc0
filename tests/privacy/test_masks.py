"""Masks: bits that are final, the same on every path, uniform; and sums from which they cancel."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.privacy.write_golden import FILE, golden
from thinwire.compression import native
from thinwire.privacy import masks
from thinwire.privacy.masks import (
    Lanes,
    add_mask,
    add_masks,
    add_packed,
    centered,
    check_packed,
    lane_dtype,
    mask_key,
    pack,
    packed_size,
)
from thinwire.privacy.secret_rng import CHUNK, stream

KERNELS = [path for path in native.available() if path != "numpy"]
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
DTYPES = (np.uint16, np.uint32, np.uint64)
BORDERS = [0, 1, 2, 7, 8, 9, 63, 65, 4087, 4095, 4096, 4097, 4104, 8200, 12_289]  # of groups and buckets
h = bytes.fromhex


@pytest.fixture(params=native.available())
def path(request):
    with native.using(request.param):
        yield request.param


def lanes_of(count: int, dtype: type, seed: int = 1) -> NDArray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, count, dtype, endpoint=True)


def packed(lanes: NDArray, width: int) -> bytes:
    out = np.full(packed_size(lanes.size, width), 0xAA, np.uint8)
    pack(lanes, width, out)
    return out.tobytes()


def test_the_golden_bytes_are_given_on_every_path(path: str) -> None:
    assert golden() == json.loads(FILE.read_text())


def test_aes_256_in_counter_mode_is_that_of_nist() -> None:
    """NIST SP 800-38A, F.5.5."""
    key = h("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = h(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    expected = h(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    assert stream(key, 0xF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF).update(plain) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lane_has_the_bytes_of_its_place_in_the_stream(dtype: type) -> None:
    """Held against single blocks of AES."""
    first, count = 1000, 40
    size = np.dtype(dtype).itemsize
    block = Cipher(AES256(KEY), ECB()).encryptor()
    whole = b"".join(block.update(number.to_bytes(16, "big")) for number in range((first + count) * size // 16 + 1))
    lanes: Lanes = np.full(count, 5, dtype)
    add_mask(lanes, KEY, 1, first)
    for i, lane in enumerate(lanes.tolist()):
        raw = whole[(first + i) * size : (first + i + 1) * size]
        assert lane == (int.from_bytes(raw, "little") + 5) % 2 ** (8 * size)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), count=st.sampled_from([*BORDERS, CHUNK // 2 + 3]), start=st.integers(0, 99_999),
    signs=st.lists(st.sampled_from([1, -1]), max_size=4), cut=st.floats(0, 1),
)  # fmt: skip
def test_neither_path_nor_spans_nor_order_change_a_bit(dtype, count, start, signs, cut) -> None:
    plain = lanes_of(count, dtype)
    keyed = [(mask_key(KEY, bytes([i]), "update"), sign) for i, sign in enumerate(signs)]

    def whole() -> bytes:
        lanes = plain.copy()
        add_masks(lanes, keyed, start)
        return lanes.tobytes()

    with native.using("numpy"):
        expected = whole()
    for here in KERNELS:
        with native.using(here):
            assert whole() == expected, here
    lanes, middle = plain.copy(), int(cut * count)
    for key, sign in reversed(keyed):
        add_mask(lanes[middle:], key, sign, start + middle)
        add_mask(lanes[:middle], key, sign, start)
    assert lanes.tobytes() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_size_of_a_chunk_changes_no_bit(dtype: type, path: str, monkeypatch) -> None:
    def result() -> bytes:
        lanes: Lanes = np.zeros(5000, dtype)
        add_masks(lanes, [(KEY, 1), (OTHER, -1)], 3)
        return lanes.tobytes()

    expected = result()
    for chunk in (8, 24, 1 << 10):
        monkeypatch.setattr(masks, "CHUNK", chunk)
        assert result() == expected


def test_no_bit_depends_on_the_number_of_threads(path: str) -> None:
    count, found = native.LEAST * 2 + 5, set()
    for threads in (1, 2):
        with native.using_threads(threads):
            lanes = lanes_of(count, np.uint16)
            add_masks(lanes, [(KEY, 1)])
            sent = packed(lanes, 11)
            add_packed(sent, 11, lanes[: count - 3], 3)
            found.add((sent, lanes.tobytes()))
    assert len(found) == 1


@given(seed=st.integers(0, 2**32), clients=st.integers(2, 6), width=st.integers(1, 32))
@settings(max_examples=30, deadline=None)
def test_pairwise_masks_cancel_in_the_sum_of_packed_vectors(seed: int, clients: int, width: int) -> None:
    """As the aggregator adds them: each edge's mask is added by its lower end and subtracted by its higher one."""
    rng = np.random.default_rng(seed)
    plain = rng.integers(0, 2**32, (clients, 37), np.uint64) % np.uint64(2**width)
    total: Lanes = np.zeros(37, lane_dtype(width))
    for client in range(clients):
        lanes = plain[client].astype(lane_dtype(width))
        edges = [
            (peer, mask_key(bytes([min(client, peer), max(client, peer)]), b"", "update")) for peer in range(clients)
        ]
        add_masks(lanes, [(key, 1 if client < peer else -1) for peer, key in edges if peer != client])
        add_packed(packed(lanes, width), width, total)
    expected = plain.sum(axis=0) % np.uint64(2**width)
    assert (total % np.uint64(2**width) == expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_and_subtracted_is_unchanged(dtype: type, path: str) -> None:
    lanes = lanes_of(70_001, dtype)
    before = lanes.copy()
    add_mask(lanes, KEY, 1)
    assert (lanes != before).mean() > 0.99
    add_mask(lanes, KEY, -1)
    assert (lanes == before).all()


# Uniformity: 6 sigma of each bit, and of chi-square over the values of each byte of a lane. Keys are fixed, so a test
# that passes once passes for ever.
def looks_uniform(lanes: NDArray) -> bool:
    rows = lanes.view(np.uint8).reshape(lanes.size, lanes.itemsize)
    bits = np.unpackbits(rows, axis=1).mean(axis=0)
    expected = lanes.size / 256
    chi = [((np.bincount(byte, minlength=256) - expected) ** 2).sum() / expected for byte in rows.T]
    return bool((abs(bits - 0.5) < 3 / lanes.size**0.5).all() and (abs(np.array(chi) - 255) < 6 * 510**0.5).all())


COUNT = 1 << 18


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plain", [0, 12_345, "counting"])
def test_a_masked_vector_looks_uniform_whatever_it_holds(dtype: type, plain) -> None:
    lanes: Lanes = np.arange(COUNT).astype(dtype) if plain == "counting" else np.full(COUNT, plain, dtype)
    assert not looks_uniform(lanes)
    add_mask(lanes, KEY, 1)
    assert looks_uniform(lanes)


@pytest.mark.parametrize("width", [5, 12, 16, 17, 20, 32])
def test_a_packed_masked_vector_looks_uniform(width: int) -> None:
    lanes: Lanes = np.full(COUNT, 3, lane_dtype(width))
    add_mask(lanes, KEY, -1)
    assert looks_uniform(np.frombuffer(packed(lanes, width), np.uint8))


@pytest.mark.parametrize("plain", [0, 12_345])
@pytest.mark.parametrize("bits", [15, 14])
def test_the_test_of_uniformity_sees_masks_of_fewer_bits_than_the_lane(plain: int, bits: int) -> None:
    mask = np.zeros(COUNT, np.uint16)
    add_mask(mask, KEY, 1)
    assert not looks_uniform((mask & np.uint16(2**bits - 1)) + np.uint16(plain))
    assert looks_uniform(mask + np.uint16(plain))


def test_the_difference_of_two_vectors_of_one_edge_looks_uniform_and_is_plain_if_a_key_is_used_twice() -> None:
    rng = np.random.default_rng(1)
    updates = [rng.normal(0, 30, COUNT).astype(np.int16).view(np.uint16) for _ in range(2)]

    def difference(first: bytes, second: bytes) -> NDArray:
        one, other = updates[0].copy(), updates[1].copy()
        add_mask(one, first, 1)
        add_mask(other, second, 1)
        return one - other

    context, later = b"round 1", b"round 2"
    once = mask_key(KEY, context, "update")
    for another in (
        mask_key(KEY, later, "update"),
        mask_key(KEY, context, "scalars"),
        mask_key(OTHER, context, "update"),
    ):
        assert looks_uniform(difference(once, another))
    assert not looks_uniform(difference(once, once))
    assert (difference(once, once) == updates[0] - updates[1]).all()


@pytest.mark.parametrize("width", [5, 12, 17])
def test_a_span_behind_the_first_block_of_a_long_vector_is_added(width: int, path: str) -> None:
    lanes, start = lanes_of(200_003, lane_dtype(width)), 66_001
    into = lanes_of(lanes.size - start - 1, lane_dtype(width), 2)
    expected = into + (lanes[start:-1] & into.dtype.type(2**width - 1))
    add_packed(packed(lanes, width), width, into, start)
    assert (into == expected).all()


def test_a_mask_begins_at_the_first_lane_unless_a_start_is_named() -> None:
    found = np.zeros((4, 9), np.uint16)
    add_mask(found[0], KEY, 1)
    add_mask(found[1], KEY, 1, 0)
    add_masks(found[2], [(KEY, 1)])
    add_masks(found[3], [(KEY, 1)], 0)
    assert len({row.tobytes() for row in found}) == 1


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 32), count=st.sampled_from(BORDERS), seed=st.integers(0, 2**32),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip
def test_every_path_packs_and_adds_as_numpy_does(width, count, seed, cut) -> None:
    dtype = lane_dtype(width)
    lanes = lanes_of(count, dtype, seed)
    start, stop = sorted(int(each * count) for each in cut)

    def both() -> tuple[bytes, bytes]:
        sent, into = packed(lanes, width), lanes_of(stop - start, dtype, seed + 1)
        add_packed(sent, width, into, start)
        return sent, into.tobytes()

    with native.using("numpy"):
        expected = both()
    for here in KERNELS:
        with native.using(here):
            assert both() == expected, here
    kept = lanes[start:stop] & dtype(2**width - 1) if width < 32 else lanes[start:stop]
    assert (np.frombuffer(expected[1], dtype) == lanes_of(stop - start, dtype, seed + 1) + kept).all()
    assert int.from_bytes(expected[0], "little") == sum(
        int(lane) % 2**width << i * width for i, lane in enumerate(lanes.tolist()[:200])
    ) + (int.from_bytes(expected[0], "little") >> 200 * width << 200 * width)
    check_packed(expected[0], count, width)


@pytest.mark.parametrize("width", [1, 12, 15, 16, 17, 31, 32])
def test_kernels_write_nothing_outside_of_what_they_are_given(width: int, path: str) -> None:
    for count in (1, 8, 4095, 4096, 4097, 8192):
        lanes, size = lanes_of(count, lane_dtype(width)), packed_size(count, width)
        around = np.full(size + 64, 0x55, np.uint8)
        pack(lanes, width, around[32 : 32 + size])
        assert (around[:32] == 0x55).all()
        assert (around[32 + size :] == 0x55).all()
        into = np.zeros(count + 64, lanes.dtype)
        add_packed(around[32 : 32 + size], width, into[32 : 32 + count])
        assert not into[:32].any()
        assert not into[32 + count :].any()


@pytest.mark.parametrize("width", [64])
def test_weights_are_packed_whole(width: int, path: str) -> None:
    lanes = lanes_of(5, np.uint64)
    sent = packed(lanes, width)
    assert sent == lanes.astype("<u8").tobytes()
    into = lanes_of(3, np.uint64, 2)
    expected = into + lanes[1:4]
    add_packed(sent, width, into, 1)
    assert (into == expected).all()


@given(width=st.integers(1, 32), seed=st.integers(0, 2**32))
def test_a_lane_is_centered_whatever_its_upper_bits_are(width: int, seed: int) -> None:
    lanes = lanes_of(100, lane_dtype(width), seed)
    found = centered(lanes, width)
    assert found.dtype == np.int32
    for value, lane in zip(found.tolist(), lanes.tolist(), strict=True):
        assert -(2 ** (width - 1)) <= value < 2 ** (width - 1)
        assert (value - lane) % 2**width == 0


def test_weights_are_centered_in_64_bits() -> None:
    assert centered(np.array([2**64 - 1, 5, 2**63], np.uint64), 64).tolist() == [-1, 5, -(2**63)]


def test_lanes_are_as_narrow_as_the_width_allows() -> None:
    assert [lane_dtype(width) for width in (1, 16, 17, 32)] == [np.uint16, np.uint16, np.uint32, np.uint32]
    for width in (0, 33, -1):
        with pytest.raises(ValueError, match="width"):
            lane_dtype(width)


@pytest.mark.parametrize(
    "lanes", [np.zeros(4, np.int16), np.zeros(4, np.float32), np.zeros((2, 2), np.uint16), np.zeros(8, np.uint16)[::2],
              np.zeros(9, np.uint8)[1:].view(np.uint16)],
)  # fmt: skip
def test_an_array_that_is_no_lanes_is_refused(lanes: NDArray) -> None:
    for use in (
        lambda: add_mask(lanes, KEY, 1),
        lambda: pack(lanes, 9, np.zeros(5, np.uint8)),
        lambda: add_packed(bytes(5), 9, lanes),
        lambda: centered(lanes, 9),
    ):
        with pytest.raises(ValueError, match="lanes"):
            use()


def test_what_does_not_fit_is_refused() -> None:
    lanes = np.zeros(10, np.uint16)
    for sign in (0, 2):
        with pytest.raises(ValueError, match="subtracted"):
            add_mask(lanes, KEY, sign)
    with pytest.raises(ValueError, match="from a lane"):
        add_mask(lanes, KEY, 1, -1)
    for width in (0, 17):
        with pytest.raises(ValueError, match="width"):
            pack(lanes, width, np.zeros(22, np.uint8))
    for width, dtype in ((63, np.uint64), (32, np.uint64), (16, np.uint32), (64, np.uint32), (17, np.uint16)):
        with pytest.raises(ValueError, match="width"):
            add_packed(bytes(80), width, np.zeros(10, dtype))
    for size in (14, 16):
        with pytest.raises(ValueError, match="15 bytes"):
            pack(lanes, 12, np.zeros(size, np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        pack(lanes, 12, np.zeros(30, np.uint8)[::2])
    with pytest.raises(ValueError, match="15 bytes"):
        pack(lanes, 12, memoryview(bytes(15)))  # read only
    for sent, start in ((bytes(14), 0), (bytes(15), 1), (bytes(15), -1), (b"", 0)):
        with pytest.raises(ValueError, match="do not hold"):
            add_packed(sent, 12, lanes, start)


def test_a_packed_vector_of_another_length_or_with_bits_behind_it_is_refused() -> None:
    sent = packed(np.full(3, 0x1FFF, np.uint16), 13)
    check_packed(sent, 3, 13)
    for wrong in (sent[:-1], sent + b"\x00"):
        with pytest.raises(ValueError, match="take 5 bytes"):
            check_packed(wrong, 3, 13)
    with pytest.raises(ValueError, match="behind the last"):
        check_packed(sent[:-1] + bytes([sent[-1] | 0x80]), 3, 13)
