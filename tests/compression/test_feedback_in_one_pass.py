"""Feedback in one pass over a vector: its frame and what is left over are those of three passes, bit for bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.codec_examples import QUANTIZERS, SPARSIFIERS, SPECS, layout_of, made, takes_feedback
from thinwire.compression import NoGuarantee, feedback, native, parse
from thinwire.compression.feedback import ef21, inside
from thinwire.compression.native import using_threads
from thinwire.compression.vector_ops import CACHED
from thinwire.core import Key
from thinwire.core.types import Vector

FOLLOWED = [
    spec
    for spec in SPECS
    if takes_feedback(spec) and not isinstance(inside(parse(spec), layout_of(9, spec)).kind, NoGuarantee)
]
LONG = [*QUANTIZERS, *SPARSIFIERS, "topk(0.01) > int8 > rice"]


def with_residual(spec: str, x: Vector, held: Vector) -> tuple[bytes, bytes]:
    codec = feedback(parse(spec)).bind(layout_of(x.size, spec))
    sent = codec.encode(x.copy(), {**codec.init(), "residual": held.copy()}, Key(1))
    return sent.payload, sent.state["residual"].tobytes()


def with_reference(spec: str, x: Vector, held: Vector) -> tuple[bytes, bytes]:
    codec = ef21(parse(spec)).bind(layout_of(x.size, spec))
    sent = codec.encode(x.copy(), {**codec.init(), "reference": held.copy()}, Key(1))
    return sent.payload, sent.state["reference"].tobytes()


def in_steps(spec: str, x: Vector, held: Vector, sign: int) -> tuple[bytes, bytes]:
    """What the laws say, one after the other: p, C(p), and decoded with -1 into p or with 1 into the reference."""
    codec = inside(parse(spec), layout_of(x.size, spec))
    p = x + held if sign > 0 else x - held
    payload = codec.encode(p.copy(), codec.init(), Key(1)).payload
    after = p if sign > 0 else held.copy()
    codec.decode_add(payload, -sign, after)
    return payload, after.tobytes()


@pytest.mark.parametrize("spec", FOLLOWED)
@settings(max_examples=4, deadline=None)
@given(
    n=st.sampled_from([1, 65, 4095, 8193, 70001]), seed=st.integers(0, 99), shape=st.sampled_from(["normal", "ties"])
)
def test_what_is_left_is_what_was_given_less_what_is_decoded(spec: str, n: int, seed: int, shape: str) -> None:
    x, held = made(n, seed, shape, 0), made(n, seed + 1, "normal", 0)
    for path in native.available():
        with native.using(path):
            assert with_residual(spec, x, held) == in_steps(spec, x, held, 1), path
            assert with_reference(spec, x, held) == in_steps(spec, x, held, -1), path


@pytest.mark.parametrize("spec", LONG)
def test_a_vector_of_many_parts_is_fed_back_alike_on_every_path_and_number_of_threads(spec: str) -> None:
    x, held = made(3 * CACHED + 4099, 1, "normal", 0), made(3 * CACHED + 4099, 2, "normal", -3)
    expected = in_steps(spec, x, held, 1)
    for path in native.available():
        for threads in (1, 3):
            with native.using(path), using_threads(threads):
                assert with_residual(spec, x, held) == expected, (path, threads)
