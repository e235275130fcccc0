"""powersgd(rank) against its paper: what low rank it has is sent whole, and a warm start finds the best."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.codec_examples import has_low_rank
from thinwire.aggregation.downlink import Downlink
from thinwire.compression import feedback, native, parse
from thinwire.core import Key, Layout
from thinwire.core.errors import CodecError

LAYOUT = Layout.of({"w": (60, 10, 4), "b": (60,)})


def low(rank: int, seed: int = 1) -> np.ndarray:
    """A vector of LAYOUT whose matrix has this rank."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((60, rank)) @ rng.standard_normal((rank, 40))
    return np.concatenate([matrix.reshape(-1), rng.standard_normal(60)]).astype(np.float32)


@pytest.mark.parametrize("rank", [0, 1, 3, 4])
def test_a_matrix_of_that_rank_or_less_and_all_that_is_no_matrix_come_back(rank: int) -> None:
    codec, x = parse("powersgd(4)").bind(LAYOUT), low(rank)
    decoded = codec.decode(codec.encode(x, codec.init(), Key(1)).payload)
    np.testing.assert_allclose(decoded[:2400], x[:2400], atol=1e-4)
    assert decoded[2400:].tobytes() == x[2400:].tobytes()


def test_a_warm_start_comes_to_the_best_of_its_rank() -> None:
    codec, rng = parse("powersgd(2)").bind(LAYOUT), np.random.default_rng(5)
    x = low(2) * 3 + rng.standard_normal(2460).astype(np.float32)
    values = np.linalg.svd(x[:2400].reshape(60, 40), compute_uv=False)
    best, state, error = float(np.sqrt((values[2:] ** 2).sum())), codec.init(), []
    for step in range(8):
        encoded = codec.encode(x.copy(), state, Key(step))
        state = encoded.state
        error.append(float(np.linalg.norm(codec.decode(encoded.payload) - x)))
    assert error[-1] <= best * 1.001
    assert error[-1] < error[0]


def test_the_frame_is_as_long_as_both_factors_and_the_rest() -> None:
    codec = parse("powersgd(2)").bind(LAYOUT)
    payload = codec.encode(low(2), codec.init(), Key(1)).payload
    assert (60 + 40) * 2 * 4 + 60 * 4 <= len(payload) <= (60 + 40) * 2 * 4 + 60 * 4 + 24


def test_after_a_call_with_zeros_it_still_finds_every_direction() -> None:
    codec = parse("powersgd(4)").bind(LAYOUT)
    state = codec.encode(np.zeros(2460, np.float32), codec.init(), Key(1)).state
    x = low(4)
    np.testing.assert_allclose(codec.decode(codec.encode(x, state, Key(2)).payload), x, atol=1e-4)


@pytest.mark.parametrize("spec", ["int8", "powersgd(2)", "powersgd(2) > fp16"])
def test_a_switch_of_codec_keeps_q_where_the_new_chain_has_an_equal_step(spec: str) -> None:
    first, second = feedback(parse("powersgd(2)")).bind(LAYOUT), feedback(parse(spec)).bind(LAYOUT)
    state = first.encode(low(5), first.init(), Key(1)).state
    (name,) = first.inner.init()
    kept = state[name].copy()
    after = second.encode(np.zeros(2460, np.float32), state, Key(2)).state
    assert np.array_equal(state[name], kept)
    assert (name in after) == has_low_rank(spec)


def test_a_slice_of_a_large_tensor_is_a_matrix_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 1000)
    layout = Layout.of({"w": (60, 40)})
    codec, x = parse("powersgd(3)").bind(layout), low(3)[:2400]
    for segment in layout.segments:
        payload = codec.encode(x[segment.span].copy(), codec.init(segment.index), Key(1), segment.index).payload
        np.testing.assert_allclose(codec.decode(payload, segment.index), x[segment.span], atol=1e-4)
        assert len(payload) < 4 * segment.size / 2


def test_it_stands_in_a_rule_by_layer() -> None:
    codec = parse('layers("b"=fp16; *=powersgd(4))').bind(LAYOUT)
    x = low(4)
    np.testing.assert_allclose(codec.decode(codec.encode(x, codec.init(), Key(1)).payload), x, atol=2e-3)


@pytest.mark.parametrize("spec", ["powersgd(4) > int8", "powersgd(4) > rice", "topk(0.1) > powersgd(4)", "powersgd(0)"])
def test_what_makes_no_sense_is_refused_with_what_does(spec: str) -> None:
    with pytest.raises(CodecError) as refused:
        parse(spec)
    parse(refused.value.hint)


def test_it_never_carries_the_downlink() -> None:
    with pytest.raises(CodecError, match="cannot carry the downlink"):
        Downlink(LAYOUT, "powersgd(4)", np.zeros(2460, np.float32))


@pytest.mark.parametrize("exponent", [-90, -20, 0, 20, 90])
def test_cast_factors_keep_their_precision_whatever_the_updates_size(exponent: int) -> None:
    codec, x = parse("powersgd(4) > fp16").bind(LAYOUT), low(3) * np.float32(2.0**exponent)
    decoded = codec.decode(codec.encode(x.copy(), codec.init(), Key(1)).payload)
    assert np.linalg.norm(decoded / 2.0**exponent - x / 2.0**exponent) <= 2e-3 * np.linalg.norm(x / 2.0**exponent)


@pytest.mark.parametrize("path", native.available())
@pytest.mark.parametrize("spec", ["powersgd(1)", "powersgd(4)", "powersgd(7)", "powersgd(2) > fp16"])
def test_what_is_left_is_what_was_given_less_what_is_decoded(spec: str, path: str) -> None:
    codec, x, held = parse(spec).bind(LAYOUT), low(6), low(6, seed=2)
    fed = feedback(parse(spec)).bind(LAYOUT)
    with native.using(path):
        sent = fed.encode(x.copy(), {**fed.init(), "residual": held}, Key(1))
        left = x + held
        codec.decode_add(sent.payload, -1.0, left)
    with native.using("numpy"):
        same = x + held
        codec.decode_add(sent.payload, -1.0, same)
        again = codec.encode(x + held, codec.init(), Key(1))
    assert sent.state["residual"].tobytes() == left.tobytes() == same.tobytes()
    assert all(np.array_equal(sent.state[name], kept) for name, kept in again.state.items())
