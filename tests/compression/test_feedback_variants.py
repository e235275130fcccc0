"""Decay, momentum, differences to a reference, and codecs that are made contractions: the laws of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.codec_examples import SPECS, drawn, layout_of, made, rotates, takes_feedback, vectors
from thinwire.compression import BoundCodec, Contractive, Encoded, Everything, Unbiased, feedback, parse
from thinwire.compression.base import contraction
from thinwire.compression.feedback import ef21, inside
from thinwire.core import Key, Layout
from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.types import State, Vector

LAYOUT = Layout.of({"w": (400,)})
CONTRACTING = [
    spec for spec in SPECS
    if takes_feedback(spec) and contraction(inside(parse(spec), layout_of(600)).kind) > 0 and not drawn(spec)
]  # fmt: skip
few = settings(max_examples=8, deadline=None)


@few
@given(x=vectors(furthest=20), decay=st.floats(0, 1), rounds=st.integers(1, 6))
def test_of_a_residual_decay_to_the_power_of_its_age_is_left(x: Vector, decay: float, rounds: int) -> None:
    codec = feedback(parse("topk(0.1)")).bind(layout_of(x.size))
    state = codec.encode(x.copy(), codec.init(), Key(1)).state
    aged = codec.aged(state, decay, rounds)
    assert np.array_equal(aged["residual"], state["residual"] * np.float32(decay**rounds))
    assert codec.aged(state, 1.0, rounds) is state


@few
@given(seed=st.integers(0, 99), momentum=st.sampled_from([0.5, 0.9]), spec=st.sampled_from(["topk(0.1)", "sign"]))
def test_with_momentum_what_was_sent_and_what_is_left_are_the_sum_of_velocities(seed, momentum, spec) -> None:
    codec = feedback(parse(spec), momentum).bind(layout_of(300))
    state, velocity, total, sent = codec.init(), np.zeros(300), np.zeros(300), np.zeros(300)
    for step in range(20):
        x = made(300, seed + step, "normal", 0)
        velocity = momentum * velocity + x
        total += velocity
        encoded = codec.encode(x, state, Key(step))
        sent, state = sent + codec.decode(encoded.payload), encoded.state
    np.testing.assert_allclose(sent + state["residual"], total, atol=1e-3)
    np.testing.assert_allclose(state["momentum"], velocity, atol=1e-4)


def test_where_a_value_was_sent_a_masked_momentum_begins_again() -> None:
    codec = feedback(parse("topk(0.5)"), momentum=0.9, masked=True).bind(Layout.of({"w": (4,)}))
    encoded = codec.encode(np.array([4, 1, -3, 0.5], np.float32), codec.init(), Key(1))
    assert encoded.state["momentum"].tolist() == [0, 1, 0, 0.5]
    assert encoded.state["residual"].tolist() == [0, 1, 0, 0.5]
    again = codec.encode(np.zeros(4, np.float32), encoded.state, Key(2))
    np.testing.assert_allclose(codec.decode(again.payload), [0, 1.9, 0, 0.95], rtol=1e-6)


def test_a_velocity_that_overflows_is_refused_and_the_momentum_is_as_it_was() -> None:
    codec = feedback(parse("int8"), momentum=0.9).bind(Layout.of({"w": (4,)}))
    state = codec.init()
    state["momentum"][:] = 3e38
    with pytest.raises(NonFiniteUpdate):
        codec.encode(np.full(4, 3e38, np.float32), state, Key(1))
    assert (state["momentum"] == np.float32(3e38)).all()


def test_a_refund_leaves_the_momentum_alone() -> None:
    codec = feedback(parse("topk(0.1)"), momentum=0.9).bind(layout_of(300))
    sent = codec.encode(made(300, 1, "normal", 0), codec.init(), Key(1))
    back = codec.restore_update(sent.payload, sent.state)
    assert back["momentum"] is sent.state["momentum"]


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_under_0_or_from_1_on_is_refused(momentum: float) -> None:
    with pytest.raises(CodecError, match="momentum"):
        feedback(parse("int8"), momentum)


@pytest.mark.parametrize("spec", CONTRACTING)
@few
@given(x=vectors(furthest=40), seed=st.integers(0, 1000))
def test_a_reference_comes_nearer_to_what_it_follows_by_the_codecs_delta(spec: str, x: Vector, seed: int) -> None:
    codec = ef21(parse(spec)).bind(layout_of(x.size))
    if rotates(spec) and x.size < 1024:
        return  # see the law of kinds
    state = codec.init()
    state["reference"][:] = made(x.size, seed, "normal", 0)
    before = x.astype(np.float64) - state["reference"]
    state = codec.encode(x.copy(), state, Key(seed)).state
    after = x.astype(np.float64) - state["reference"]
    slack = np.spacing(np.abs(x).max() + 4) * np.sqrt(x.size) * 4
    delta = contraction(codec.kind) if not rotates(spec) else 0.0
    assert np.linalg.norm(after) <= np.sqrt(1 - delta) * np.linalg.norm(before) * (1 + 1e-5) + slack


@pytest.mark.parametrize("spec", ["topk(0.1)", "topk(0.04) > sign > rice", "qsgd(2)", "int8"])
def test_where_updates_settle_differences_die_out(spec: str) -> None:
    codec, x = ef21(parse(spec)).bind(layout_of(300)), made(300, 1, "normal", 0)
    state = codec.init()
    for step in range(300):
        state = codec.encode(x.copy(), state, Key(step)).state
    assert np.linalg.norm(state["reference"] - x) <= 0.01 * np.linalg.norm(x)


@few
@given(x=vectors(furthest=20))
def test_an_update_that_was_dropped_leaves_the_reference_as_it_was(x: Vector) -> None:
    codec = ef21(parse("topk(0.1) > int8")).bind(layout_of(x.size))
    sent = codec.encode(x, codec.init(), Key(1))
    assert not codec.restore_update(sent.payload, sent.state)["reference"].any()


def test_a_reference_survives_a_switch_of_codec_and_an_error() -> None:
    layout, x = layout_of(300), made(300, 1, "normal", 0)
    first, second = ef21(parse("topk(0.1)")).bind(layout), ef21(parse("identity")).bind(layout)
    state = first.encode(x.copy(), first.init(), Key(1)).state
    kept = state["reference"].copy()
    with pytest.raises(NonFiniteUpdate):
        second.encode(np.full(300, np.nan, np.float32), state, Key(2))
    assert np.array_equal(state["reference"], kept)
    np.testing.assert_allclose(second.encode(x.copy(), state, Key(2)).state["reference"], x, atol=1e-6)


def test_ef21_needs_every_call_to_contract() -> None:
    with pytest.raises(CodecError, match="may not converge"):
        ef21(parse("twobit(1)")).bind(layout_of(30))


@dataclass(frozen=True)
class Coins:
    """A codec from elsewhere, unbiased with omega = 3: sends a quarter of the values, four times as large."""

    layout: Layout = LAYOUT
    spec: str = "coins"
    kind = Unbiased(3.0)

    def bind(self, layout: Layout) -> BoundCodec:
        return Coins(layout)

    def init(self, segment: int = 0) -> State:
        return {}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        kept = np.random.default_rng(key.a).random(x.size) < 0.25
        return Encoded((x * kept * np.float32(4)).tobytes(), state, Everything.SENT)

    def check(self, payload, segment: int = 0) -> None: ...
    def max_bytes(self, segment: int = 0) -> int:
        return 4 * self.layout.size

    def decode(self, payload, segment: int = 0) -> Vector:
        return np.frombuffer(payload, np.float32)

    def decode_add(self, payload, weight: float, into: Vector, span: slice = slice(None), segment: int = 0) -> None:
        into[span] += self.decode(payload)[span] * np.float32(weight)


@pytest.mark.parametrize("around", [feedback, ef21])
def test_an_unbiased_codec_from_elsewhere_is_divided_by_one_and_omega(around) -> None:
    codec = around(Coins()).bind(LAYOUT)
    assert codec.kind == Contractive(0.25)
    state, largest = codec.init(), 0.0
    for step in range(500):
        x = made(400, step, "normal", 0)
        largest = max(largest, float(np.linalg.norm(x)))
        state = codec.encode(x, state, Key(step)).state
        assert all(np.linalg.norm(held) <= 8 * largest for held in state.values())
