"""Putting updates together: the weighted mean, buffers, the server's step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tests.support.codec_examples import made
from thinwire.aggregation import BufferMean, WeightedMean, encode_buffers, optimizers
from thinwire.aggregation.mean import counters
from thinwire.compression import feedback, parse
from thinwire.core import Key, Layout, Tensor
from thinwire.core.errors import BadPayload, CodecError

LAYOUT = Layout.of({"a": (60,), "b": (90,), "c": (50,)})


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 100)
    LAYOUT.__dict__.pop("segments", None)
    assert len(LAYOUT.segments) == 3


def frames_of(spec: str, x) -> list[bytes]:
    codec = parse(spec).bind(LAYOUT)
    return [codec.encode(x[s.span].copy(), {}, Key(1), s.index).payload for s in LAYOUT.segments]


def test_the_mean_is_normalised_weighted_and_discounted_as_the_design_says() -> None:
    tally = WeightedMean(parse("identity").bind(LAYOUT), LAYOUT)
    d = [made(200, seed, "normal", 0) for seed in range(3)]
    examples, discounts, a = [10, 30, 60], [1.0, 0.5, 1.0], [5.0, 10.0, 20.0]
    for x, n, s, normaliser in zip(d, examples, discounts, a, strict=True):
        frames = frames_of("identity", x)
        tally.fold(partial(iter, frames), n, s, normaliser)
    p = np.array(examples) / 100
    expected = (p @ a) * sum(p[i] * discounts[i] * d[i].astype(np.float64) for i in range(3))
    change = tally.close()
    assert change is not None
    assert np.allclose(change, expected, rtol=1e-5, atol=1e-5)


def test_a_tally_of_nothing_says_so() -> None:
    tally = WeightedMean(parse("identity").bind(LAYOUT), LAYOUT)
    assert tally.close() is None


@pytest.mark.parametrize("spec", ["identity", "topk(0.1) > int8 > zstd"])
def test_an_update_is_aggregated_wholly_or_not_at_all(spec: str) -> None:
    tally = WeightedMean(parse(spec).bind(LAYOUT), LAYOUT)
    good = frames_of(spec, made(200, 1, "normal", 0))
    tally.fold(lambda: iter(good), 5, 1.0, 1.0)
    before = tally.total.copy()
    for bad in (good[:2], [*good, good[0]], good[::-1], [*good[:2], good[2][:-1]], [good[0], good[0], good[2]], []):
        with pytest.raises(BadPayload):
            tally.fold(partial(iter, bad), 5, 1.0, 1.0)
    for examples, discount, a in ((0, 1.0, 1.0), (5, float("nan"), 1.0), (5, 1.0, 0.0), (5, 1.0, float("inf"))):
        with pytest.raises(BadPayload):
            tally.fold(lambda: iter(good), examples, discount, a)
    assert np.array_equal(tally.total, before)
    assert (tally.examples, tally.count) == (5, 1)


def test_the_last_frame_is_read_once_and_the_others_are_checked_before_any_is_added() -> None:
    codec, reads = parse("int8").bind(LAYOUT), list[int]()
    sent = [codec.encode(np.ones(s.size, np.float32), {}, Key(1), s.index).payload for s in LAYOUT.segments]

    def frames(count: int, first: int) -> Iterator[bytes]:
        for number in range(first, first + count):
            reads.append(number)
            yield sent[number]

    WeightedMean(codec, LAYOUT).fold(lambda: frames(len(sent), 0), 1, 1.0, 1.0)
    assert reads == [*range(len(sent)), *range(len(sent) - 1)]
    reads.clear()
    one = Layout.of({"w": (5,)})
    codec = parse("int8").bind(one)
    sent = [codec.encode(np.ones(5, np.float32), {}, Key(1)).payload]
    WeightedMean(codec, one).fold(lambda: frames(1, 0), 1, 1.0, 1.0)
    assert reads == [0]


def test_rounds_of_feedback_send_all_of_the_change_in_the_end() -> None:
    codec = feedback(parse("topk(0.1) > int8")).bind(LAYOUT)
    states = [codec.init(s.index) for s in LAYOUT.segments]
    change, total = made(200, 5, "normal", 0), np.zeros(200, np.float32)
    for round_ in range(60):
        for s in LAYOUT.segments:
            x = change[s.span].copy() if round_ == 0 else np.zeros(s.size, np.float32)
            sent = codec.encode(x, states[s.index], Key(round_), s.index)
            states[s.index] = sent.state
            codec.decode_add(sent.payload, 1.0, total[s.span], segment=s.index)
    assert np.allclose(total, change, atol=1e-5)


NORMED = Layout.build(
    [
        Tensor("w", (4,)),
        Tensor("bn.running_mean", (3,), "float32", "buffer"),
        Tensor("bn.running_var", (3,), "float32", "buffer"),
        Tensor("bn.num_batches_tracked", (), "int64", "buffer"),
        Tensor("lonely.running_var", (2,), "float32", "buffer"),
    ]
)


def test_variances_follow_the_law_of_total_variance() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.normal(shift, 1 + abs(shift), (n, 3)) for shift, n in ((0.0, 40), (2.0, 60), (-3.0, 100))]
    tally = BufferMean(NORMED)
    for group in groups:
        own = np.concatenate([group.mean(0), group.var(0), [1, 2]]).astype(np.float32)
        frame = encode_buffers(NORMED, own)
        tally.check(frame)
        tally.fold(frame, len(group))
    pooled = np.concatenate(groups)
    mean = tally.close(np.zeros(8, np.float32))
    assert np.allclose(mean[:3], pooled.mean(0), atol=1e-6)
    assert np.allclose(mean[3:6], pooled.var(0), rtol=1e-6)
    assert mean[6:].tolist() == [1, 2]


@pytest.mark.parametrize("offset", [0.0, 293.15, 101_325.0, 1.7e9])
def test_a_variance_keeps_its_value_beside_a_mean_that_is_large(offset: float) -> None:
    tally = BufferMean(NORMED)
    own = np.array([offset] * 3 + [1e-4, 1.0, 2500.0] + [4e8, 1e-8], np.float32)
    for examples in (40, 64, 200):
        tally.fold(encode_buffers(NORMED, own), examples)
    assert tally.close(own).tobytes() == own.tobytes()


def test_buffers_that_all_clients_have_alike_keep_their_bits() -> None:
    layout = Layout.build([Tensor("w", (4,)), Tensor("constant", (8,), "float32", "buffer")])
    own = np.array([0.485, 0.456, 1 / 3, -0.0, 1e-45, 3.4e38, -1.7e9, 65504.5], np.float32)
    tally = BufferMean(layout)
    for weight in (0.1, 1 / 3, 7.0, 1e9 * 0.3):
        frame = encode_buffers(layout, own)
        tally.check(frame)
        tally.fold(frame, weight)
    assert tally.close(np.zeros(8, np.float32)).tobytes() == own.tobytes()


def test_counters_count_by_maximum_and_foreign_names_are_ignored() -> None:
    tally = BufferMean(NORMED)
    tally.count({"bn.num_batches_tracked": 7, "else": 9})
    tally.count({"bn.num_batches_tracked": 5})
    assert tally.counters == {"bn.num_batches_tracked": 7}
    assert [t.name for t in counters(NORMED)] == ["bn.num_batches_tracked"]


def test_buffers_stay_where_no_client_sent_any() -> None:
    before = np.arange(8, dtype=np.float32)
    assert BufferMean(NORMED).close(before) is before


def test_buffers_of_another_model_are_refused() -> None:
    with pytest.raises(BadPayload):
        BufferMean(LAYOUT).check(encode_buffers(NORMED, np.zeros(8, np.float32)))
    with pytest.raises(BadPayload):
        BufferMean(NORMED).check(b"")


def test_fedavg_adds_lr_times_the_change_in_place() -> None:
    params = np.ones(200_000, np.float32)
    stepped, state = optimizers.find("fedavg")(lr=0.5).step(params, np.full(200_000, 2, np.float32), {})
    assert stepped is params
    assert (params == 2).all()
    assert state == {}
    with pytest.raises(CodecError, match="no server optimizer 'fedavgg'"):
        optimizers.find("fedavgg")
