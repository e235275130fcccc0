"""How near rice comes to the entropy of what it codes: for which shares, and that no parameter of it does better."""

from __future__ import annotations

from math import ceil, lgamma, log

import numpy as np
import pytest

from tests.support.codec_examples import made
from thinwire.compression import frame, parse
from thinwire.compression.base import packed_bytes
from thinwire.compression.codecs.delta_rice import BLOCK, Rice
from thinwire.core import Key, Layout

SIZE, ROOM = 1 << 20, 8  # bytes that a stream may be over its share of the entropy
LOW = [0.0001, 0.0009, 0.001, 0.004, 0.0075, 0.01, 0.02, 0.03, 0.04, 0.05]
HIGH = [0.058, 0.1, 0.114, 0.15, 0.2, 0.21, 0.3, 0.382, 0.45, 0.5]


def entropy_bytes(size: int, share: float) -> float:
    """Of a set of so many places of all sets of that size."""
    many = round(share * size)
    return (lgamma(size + 1) - lgamma(many + 1) - lgamma(size - many + 1)) / log(2) / 8


def coded(share: float) -> int:
    places = np.random.default_rng(round(1e6 * share)).choice(SIZE, round(share * SIZE), replace=False)
    return len(Rice().pack_indices(np.sort(places)))


@pytest.mark.parametrize("share", LOW)
def test_places_of_up_to_five_percent_are_within_two_percent_of_their_entropy(share: float) -> None:
    assert coded(share) <= 1.02 * entropy_bytes(SIZE, share) + ROOM


@pytest.mark.parametrize("share", HIGH)
def test_places_of_any_share_are_within_four_and_a_half_percent_of_their_entropy(share: float) -> None:
    assert coded(share) <= 1.045 * entropy_bytes(SIZE, share) + ROOM


@pytest.mark.parametrize("share", [*LOW, *HIGH])
def test_no_parameter_of_rice_would_have_made_the_gaps_shorter(share: float) -> None:
    """So the excess is the code's own: its parameters are powers of two (Golomb's would be any number)."""
    places = np.random.default_rng(1).choice(SIZE, round(share * SIZE), replace=False)
    gaps = np.asarray(np.diff(np.sort(places), prepend=-1) - 1, np.int64)
    shortest = 0
    for start in range(0, gaps.size, BLOCK):
        block = gaps[start : start + BLOCK]
        shortest += min(int((block >> k).sum()) + block.size * (k + 1) for k in range(25))
    assert len(Rice().pack_indices(np.sort(places))) <= -(-gaps.size // BLOCK) + shortest / 8 + 2


@pytest.mark.parametrize("shape", ["normal", "ties", "spike", "steep", "sparse"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symbols_are_never_longer_than_packed_but_for_a_byte_a_block(shape: str, bits: int) -> None:
    """No entropy coder: what rice does not suit, it leaves packed. `> zstd` behind it takes more of that away."""
    x = made(20_000, 1, shape, 0)
    symbols = np.round(x / np.abs(x).max() * (2 ** (bits - 1) - 1)).astype(np.int8)
    assert len(Rice().pack_symbols(symbols, bits)) <= packed_bytes(symbols.size, bits) + -(-symbols.size // BLOCK) + 1


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.04])
def test_the_frame_of_stc_is_within_two_percent_of_places_and_signs(ratio: float) -> None:
    codec = parse(f"topk({ratio}) > sign > rice").bind(Layout.of({"w": (SIZE,)}))
    payload = codec.encode(made(SIZE, 3, "normal", 0), codec.init(), Key(1)).payload
    sent = ceil(ratio * SIZE)
    scales = 8 * -(-sent // 4096)
    information = entropy_bytes(SIZE, ratio) + sent / 8 + scales
    assert len(payload) <= 1.02 * information + 3 * ROOM + frame.MAX_OVERHEAD
