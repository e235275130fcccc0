"""What stands beside ours decodes to what it should, and `benchmarks.peers` prints the document that others read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import OURS, PEERS, figures
from benchmarks.peers_in_torch import eight_bit, rotated, rounded, signs, sparse
from benchmarks.peers_in_torch.peer import Peer, sent_bytes
from tests.support.benchmark_document import document_of
from thinwire.compression.codecs.drive_eden import Drive, Eden
from thinwire.compression.rotation import signs as signs_of
from thinwire.core import Layout

ROOT = Path(__file__).parents[2]
LAYOUT = Layout.of({"w": (120, 250), "b": (37,)})  # no whole number of anybody's blocks
SIZE = LAYOUT.size
MOST = {  # relative error on normal values
    "fp16": 0.001, "bf16": 0.003, "int8": 0.1, "qsgd(4)": 1.4, "natural": 0.3, "ternary": 1.2, "sign": 0.65,
    "topk(0.01)": 0.97, "topk(0.01) > int8 > rice": 0.97, "threshold(2.6)": 0.97, "randk(0.01)": 1.0,
    "drive": 0.8, "eden(2)": 0.4, "eden(4)": 0.12, "powersgd(4)": 0.99,
}  # fmt: skip
COLUMNS = {
    "method", "who", "source", "data", "threads", "path", "encode_ms", "memcpy_ms", "encode_ratio", "bits_per_param",
    "relative_error", "fastest",
}  # fmt: skip


def peers() -> Iterator[tuple[str, Peer]]:
    for spec, of_segment in PEERS.items():
        for peer in of_segment(LAYOUT.segments[0]):
            yield spec, peer


def normal(seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(SIZE)


def back(peer: Peer, x: torch.Tensor) -> torch.Tensor:
    return peer.decode(peer.encode(x), x.numel())


@pytest.mark.parametrize(("spec", "peer"), [pytest.param(*pair, id=f"{pair[0]}: {pair[1].name}") for pair in peers()])
def test_a_peer_leaves_what_it_is_given_and_decodes_near_to_it(spec: str, peer: Peer) -> None:
    x = normal()
    given = x.clone()
    found = back(peer, x)
    assert torch.equal(x, given)
    assert found.shape == x.shape
    assert float((found - x).norm() / x.norm()) < MOST[spec]
    assert sent_bytes(peer.encode(x)) < 4 * SIZE


@pytest.mark.parametrize(("own", "peer"), [
    (Drive(), *rotated.DRIVE), (Eden(2), *rotated.EDEN2), (Eden(4), *rotated.EDEN4),
], ids=lambda one: getattr(one, "name", ""))  # fmt: skip
@pytest.mark.parametrize("seed", [1, 2])
def test_drive_and_eden_in_torch_decode_like_ours_where_both_turn_alike(
    own: Eden, peer: Peer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, x = 77, normal(seed)[: rotated.BLOCK] ** 3
    negative = torch.from_numpy(signs_of(0, x.numel(), word).astype(np.int64) != 0)
    monkeypatch.setattr(rotated, "signs", lambda: torch.where(negative, -1.0, 1.0))
    ours = torch.from_numpy(own.dequantize(*own.quantize(x.numpy(), word), slice(0, x.numel()), word))
    assert float((back(peer, x) - ours).norm() / ours.norm()) < 0.005, "rounding, of their scales and at a border"


@pytest.mark.parametrize("peer", [*rounded.QSGD4, *rounded.NATURAL], ids=lambda peer: peer.name)
def test_the_mean_of_many_encodings_is_the_vector(peer: Peer) -> None:
    x, count = normal(), 100
    mean = sum((back(peer, x) for _ in range(count)), torch.zeros(SIZE)) / count
    once = float((back(peer, x) - x).norm())
    assert float((mean - x).norm()) < 2 * once / count**0.5


def test_terngrad_is_unbiased_where_nothing_is_clipped() -> None:
    x = torch.rand(SIZE) - 0.5
    (peer,) = rounded.TERNARY
    mean = sum((back(peer, x) for _ in range(200)), torch.zeros(SIZE)) / 200
    assert float((mean - x).abs().mean()) < 0.03


def test_topk_keeps_the_largest_exactly_and_dgc_nearly_as_many() -> None:
    x = normal()
    topk, dgc = (back(peer, x) for peer in sparse.TOPK)
    count = sparse.kept(SIZE)
    least = x.abs().sort(descending=True).values[count - 1]
    assert torch.equal(topk, torch.where(x.abs() >= least, x, 0))
    assert 0.4 * count < int((dgc != 0).sum()) < 2 * count


def test_onebit_sends_the_means_of_both_sides() -> None:
    x = torch.tensor([1.0, 3.0, -2.0, -6.0, 0.0])
    _, _, onebit = signs.SIGN
    assert back(onebit, x).tolist() == pytest.approx([4 / 3, 4 / 3, -4, -4, 4 / 3])


def test_the_dynamic_map_has_256_values_of_both_signs_with_0_and_1() -> None:
    values = eight_bit.MAP.tolist()
    assert (len(values), len(set(values))) == (256, 256)
    assert {0.0, 1.0} <= set(values)
    assert sorted(-v for v in values if v not in (0.0, 1.0)) == [v for v in values if v not in (0.0, 1.0)]


def test_the_document_has_its_shape_and_names_the_fastest_peer_of_each_method() -> None:
    made = document_of("peers")
    assert all(set(row) == COLUMNS for row in made["rows"])
    for spec in PEERS:
        of_method = [row for row in made["rows"] if row["method"] == spec]
        own, *others = of_method
        assert own["who"] == OURS
        (fastest,) = (row for row in of_method if row["fastest"])
        assert fastest["encode_ms"] == min(row["encode_ms"] for row in others)
        assert made["figures"][f"ratio {spec}"] == pytest.approx(fastest["encode_ms"] / own["encode_ms"], rel=1e-5)


def test_a_peer_that_sends_or_loses_more_is_not_as_good() -> None:
    def row(who: str, ms: float, bits: float, error: float) -> dict[str, object]:
        return {
            "who": who, "method": "sign", "data": "normal", "threads": 1,
            "encode_ms": ms, "bits_per_param": bits, "relative_error": error,
        }  # fmt: skip

    found = [row(OURS, 2, 1, 0.6), row("bytes", 4, 8, 0.6), row("worse", 5, 1, 0.9), row("bits", 6, 1.02, 0.61)]
    assert figures(found) == {"ratio sign": 2.0, "ratio_as_good sign": 3.0}
