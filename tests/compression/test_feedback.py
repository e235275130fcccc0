"""Feedback around codecs that are not ours, and at the edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from thinwire.compression import BoundCodec, Contractive, Encoded, Everything, feedback, parse
from thinwire.core import Key, Layout
from thinwire.core.errors import BadPayload, NonFiniteUpdate
from thinwire.core.types import State, Vector

LAYOUT = Layout.of({"w": (50,)})


@dataclass(frozen=True)
class Halving:
    """A codec from elsewhere: sends half of each value, overwrites what it is given, and counts its calls."""

    layout: Layout = LAYOUT
    spec: str = "halving"
    kind = Contractive(0.75)

    def bind(self, layout: Layout) -> BoundCodec:
        return Halving(layout)

    def init(self, segment: int = 0) -> State:
        return {"calls": np.zeros(1, np.int64)}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        x *= np.float32(0.5)
        payload = x.tobytes()
        x[:] = np.nan
        state["calls"] += 1
        return Encoded(payload, state, Everything.SENT)

    def check(self, payload, segment: int = 0) -> None: ...
    def max_bytes(self, segment: int = 0) -> int:
        return 4 * self.layout.size

    def decode(self, payload, segment: int = 0) -> Vector:
        return np.frombuffer(payload, np.float32)

    def decode_add(self, payload, weight: float, into: Vector, span: slice = slice(None), segment: int = 0) -> None:
        into[span] += self.decode(payload)[span] * np.float32(weight)


def test_a_codec_that_overwrites_what_it_is_given_is_fed_back_right() -> None:
    codec = feedback(Halving()).bind(LAYOUT)
    first = codec.init()
    sent = codec.encode(np.ones(50, np.float32), first, Key(1))
    assert (sent.state["residual"] == 0.5).all()
    again = codec.encode(np.zeros(50, np.float32), sent.state, Key(2))
    assert (again.state["residual"] == 0.25).all()
    assert again.state["calls"] == 2
    assert first["calls"] == 0
    assert sent.state["calls"] == 1


def test_a_switch_keeps_the_residual_and_drops_what_the_new_codec_does_not_know() -> None:
    old, new = feedback(Halving()).bind(LAYOUT), feedback(parse("topk(0.1)")).bind(LAYOUT)
    sent = old.encode(np.ones(50, np.float32), old.init(), Key(1))
    switched = new.encode(np.zeros(50, np.float32), sent.state, Key(2))
    assert set(switched.state) == {"residual"}
    assert np.count_nonzero(switched.state["residual"]) == 45
    assert set(old.encode(np.zeros(50, np.float32), switched.state, Key(3)).state) == {"residual", "calls"}


def test_a_sum_that_overflows_is_refused_and_the_residual_is_as_it_was() -> None:
    codec = feedback(parse("int8")).bind(LAYOUT)
    state = codec.init()
    state["residual"][:] = 3e38
    with pytest.raises(NonFiniteUpdate):
        codec.encode(np.full(50, 3e38, np.float32), state, Key(1))
    assert (state["residual"] == np.float32(3e38)).all()


def test_a_refund_of_a_bad_frame_changes_nothing() -> None:
    codec = feedback(parse("topk(0.1)")).bind(LAYOUT)
    state = codec.encode(np.ones(50, np.float32), codec.init(), Key(1)).state
    before = state["residual"].copy()
    with pytest.raises(BadPayload):
        codec.restore_update(b"nothing", state)
    assert np.array_equal(state["residual"], before)


@pytest.mark.parametrize("x", [np.ones(49, np.float32), np.ones(50), np.ones((50, 1), np.float32)])
def test_a_vector_of_another_size_or_type_is_the_callers_mistake(x) -> None:
    codec = feedback(parse("int8")).bind(LAYOUT)
    with pytest.raises(ValueError, match="expected"):
        codec.encode(x, codec.init(), Key(1))


@pytest.mark.parametrize("value", [np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45, 2.0**-126])
def test_the_ends_of_float32_pass_through_every_quantizer(value: float) -> None:
    for spec in ("identity", "fp16", "int8", "topk(0.5) > int8", "topk(0.5) > fp16"):
        codec = parse(spec).bind(LAYOUT)
        payload = codec.encode(np.full(50, value, np.float32), {}, Key(1)).payload
        codec.check(payload)
        assert np.isfinite(codec.decode(payload)).all()
