"""The conformance suite: the laws of what a codec does to vectors, each a test of one `spec`.

They cover bias, contraction, support, state and error feedback; `frame_suite.py` has the laws of frames. Thinwire's own
tests run both over the registry, the pytest plugin over another package's codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.compression import Everything, NoGuarantee, Unbiased, feedback, parse
from thinwire.compression.base import ErrorBound, contraction
from thinwire.compression.chain import Chain
from thinwire.compression.codecs.powersgd import LowRank
from thinwire.compression.feedback import BoundFeedback
from thinwire.compression.spec import chains
from thinwire.core import Key, Layout
from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.types import Vector


def rotates(spec: str) -> bool:
    """Return True if a quantizer of the codec rotates at random."""
    return any(isinstance(chain, Chain) and chain.quantizer.rotates for chain in chains(parse(spec)))


def drawn(spec: str) -> bool:
    """Return True if the indices are random: the kind then holds in expectation, and one value may be nearly all."""
    found = [chain.sparsifier for chain in chains(parse(spec)) if isinstance(chain, Chain)]
    return any(sparsifier is not None and sparsifier.seeded for sparsifier in found)


def has_low_rank(spec: str) -> bool:
    """Return True if the codec sends factors of matrices."""
    return any(isinstance(chain, LowRank) for chain in chains(parse(spec)))


def takes_feedback(spec: str) -> bool:
    """Return True unless error feedback refuses the codec, as it does where a residual would diverge."""
    try:
        return feedback(parse(spec)).bind(layout_of(600, spec)) is not None
    except CodecError:
        return False


def in_feedback(spec: str, layout: Layout) -> BoundFeedback:
    """Return the codec inside error feedback; skip the test if error feedback refuses it."""
    if not takes_feedback(spec):
        pytest.skip(f"error feedback refuses {spec}")
    return feedback(parse(spec)).bind(layout)


def dense(x: Vector) -> bool:
    """Return True if no few values hold most of the norm."""
    return bool(np.abs(x).max() <= 6 * np.sqrt(np.mean(x.astype(np.float64) ** 2)))


def layout_of(n: int, spec: str = "") -> Layout:
    """Return a layout of n values in three tensors whose names per-tensor rules can distinguish.

    For a low rank, some of the tensors are matrices.
    """
    third = n // 3
    if spec and has_low_rank(spec):
        side, rows = math.isqrt(n // 2), n // 16
        rest = n - side * side - rows * 4
        return Layout.of({"a.weight": (side, side), "b.bias": (rest,), "c.weight": (rows, 2, 2)})
    return Layout.of({"a.weight": (third,), "b.bias": (third,), "c.weight": (n - 2 * third,)})


def made(n: int, seed: int, shape: str, exponent: int) -> Vector:
    """Return a vector whose largest magnitude is about 2^exponent: exactly a power of two in all shapes but `equal`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    if shape == "equal":  # the largest rounding error for all values at once
        return np.copysign((1 + rng.random()) * 2.0 ** (exponent - 1), x).astype(np.float32)
    if shape == "ties":
        x = np.round(x)
    elif shape == "spike":
        x *= 1e-3
        x[seed % n] = -1.0
    elif shape == "steep":
        x *= 2.0 ** -rng.integers(0, 60, n)
    elif shape == "sparse":
        x[rng.random(n) < 0.95] = 0
    top = np.abs(x).max()
    scaled: Vector = (x * (2.0**exponent / (top or 1))).astype(np.float32)
    return scaled


@st.composite
def vectors(draw: st.DrawFn, most: int = 5000, furthest: int = 100) -> Vector:
    """Return a strategy of vectors of 1 to `most` values, with exponents up to `furthest`."""
    return made(
        n=draw(st.integers(1, most)),
        seed=draw(st.integers(0, 2**32)),
        shape=draw(st.sampled_from(["normal", "equal", "ties", "spike", "steep", "sparse"])),
        exponent=draw(st.integers(-furthest, furthest)),
    )


few, fewer = settings(max_examples=6, deadline=None), settings(max_examples=4, deadline=None)
MANY = 200  # values: for so many, six encodings are enough to estimate the mean error
NEARLY = 0.1  # the excess allowed over the error of a uniform rotation, which a Hadamard transform comes near


def test_its_spec_is_canonical(spec: str) -> None:
    """Parsing a canonical spec gives the same spec and an equal codec."""
    assert parse(parse(spec).spec) == parse(spec)
    assert parse(spec).spec == spec


@few
@given(n=st.integers(0, 9000))
def test_zero_stays_zero(spec: str, n: int) -> None:
    """Zeros decode to zeros."""
    codec = parse(spec).bind(Layout.of({"w": (n,)}) if n < 3 else layout_of(n, spec))
    if n:
        payload = codec.encode(np.zeros(n, np.float32), codec.init(), Key(1)).payload
        assert not codec.decode(payload).any()


@fewer
@given(x=vectors(), bad=st.sampled_from([np.nan, np.inf, -np.inf]), place=st.integers(0, 4999))
def test_what_is_not_finite_is_refused_and_nothing_is_changed(spec: str, x: Vector, bad: float, place: int) -> None:
    """NaN and infinity raise NonFiniteUpdate, and the state keeps its values."""
    bare = parse(spec).bind(layout_of(x.size, spec))
    codec = in_feedback(spec, bare.layout) if takes_feedback(spec) else bare
    state = {name: array + np.float32(0.5) for name, array in codec.init().items()}
    before = {name: array.copy() for name, array in state.items()}
    x[place % x.size] = bad
    with pytest.raises(NonFiniteUpdate):
        codec.encode(x, state, Key(1))
    assert all(np.array_equal(state[name], before[name]) for name in before)


@fewer
@given(x=vectors())
def test_the_same_key_gives_the_same_bytes_and_leaves_the_vector_alone(spec: str, x: Vector) -> None:
    """Encoding is a function of vector, state and key, and does not write to the vector."""
    codec, given_x = parse(spec).bind(layout_of(x.size, spec)), x.copy()
    first, again = (codec.encode(x, codec.init(), Key(3, 4)).payload for _ in range(2))
    assert first == again
    assert np.array_equal(x, given_x)


@settings(few, max_examples=8, derandomize=True)
@given(x=vectors())
def test_the_error_keeps_within_its_kind(spec: str, x: Vector) -> None:
    """The mean error over fixed keys keeps the bound of the kind, plus four standard deviations.

    The vectors are the same in every run. A codec without randomness gets only room for rounding: one that declares a
    contraction by 1/4096 and sends nothing fails.
    """
    codec = parse(spec).bind(layout_of(x.size, spec))

    def error(key: int) -> Vector:
        return codec.decode(codec.encode(x, codec.init(), Key(key)).payload) - x.astype(np.float64)

    _keeps_within(codec.kind, spec, x, error)


@settings(fewer, derandomize=True)
@given(x=vectors())
def test_what_is_left_keeps_within_the_kind_inside_a_residual(spec: str, x: Vector) -> None:
    """The residual keeps the bound of the kind inside error feedback."""
    codec = in_feedback(spec, layout_of(x.size, spec))

    def left(key: int) -> Vector:
        return codec.encode(x.copy(), codec.init(), Key(key)).state["residual"].astype(np.float64)

    _keeps_within(codec.inner.kind, spec, x, left)


def _keeps_within(kind: ErrorBound, spec: str, x: Vector, error: Callable[[int], Vector]) -> None:
    if isinstance(kind, NoGuarantee):
        return
    bound = kind.omega if isinstance(kind, Unbiased) else 1 - kind.delta
    if rotates(spec) and (x.size < 1024 or not dense(x)):
        return  # a Hadamard transform comes near a uniform rotation only on dense data
    keys = 200 if drawn(spec) or x.size < MANY else 6
    errors = [float((error(k) ** 2).sum()) for k in range(6)]
    if drawn(spec) or len(set(errors)) > 1:  # else no key changes anything
        errors += [float((error(k) ** 2).sum()) for k in range(6, keys)]
    whole = float((x.astype(np.float64) ** 2).sum())
    room = 4 * np.std(errors) / np.sqrt(len(errors))
    if drawn(spec):  # one value may hold nearly all of the norm, and no key may select it
        spread = abs(bound - 1) * bound**0.5 if isinstance(kind, Unbiased) else (bound * (1 - bound)) ** 0.5
        room = max(room, 4 * spread / keys**0.5 * whole)
    if rotates(spec):
        room += NEARLY * bound * whole
    assert np.mean(errors) <= bound * (1 + 1e-5) * whole + room


def test_the_mean_of_many_encodings_is_the_vector(spec: str) -> None:
    """The squared error of the mean over 400 fixed keys is at most 4/3 of what their own spread leaves.

    omega is no use here: it is a bound, and where it is large a codec that sends nothing would keep it.
    """
    x = made(600, seed=7, shape="normal", exponent=3).astype(np.float64)
    codec = parse(spec).bind(layout_of(x.size, spec))
    if not isinstance(codec.kind, Unbiased):
        return  # the codec does not declare itself unbiased
    keys, total, squares = 400, np.zeros(x.size), 0.0
    for k in range(keys):
        away = codec.decode(codec.encode(x.astype(np.float32), codec.init(), Key(k)).payload) - x
        total, squares = total + away, squares + float((away**2).sum())
    bias = float(((total / keys) ** 2).sum())
    spread = squares / keys - bias
    assert bias <= 4 / 3 * spread / keys + 1e-12 * float((x**2).sum())


@few
@given(x=vectors(), weight=st.sampled_from([1.0, -1.0, 0.5, 37.25]), cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_adding_spans_is_decoding_times_weight(spec: str, x: Vector, weight: float, cuts: list[int]) -> None:
    """Adding all spans to zeros gives the decoded vector times the weight."""
    codec = parse(spec).bind(layout_of(x.size, spec))
    payload = codec.encode(x, codec.init(), Key(9)).payload
    into = np.zeros(x.size, np.float32)
    borders = sorted({0, x.size, *(cut % (x.size + 1) for cut in cuts)})
    for start, stop in pairwise(borders):
        codec.decode_add(payload, weight, into, slice(start, stop))
    assert np.array_equal(into, codec.decode(payload) * np.float32(weight))


@few
@given(x=vectors())
def test_the_support_holds_all_that_was_sent(spec: str, x: Vector) -> None:
    """The support is sorted, and all values outside it decode to 0."""
    codec = parse(spec).bind(layout_of(x.size, spec))
    encoded = codec.encode(x, codec.init(), Key(1))
    decoded = codec.decode(encoded.payload)
    if encoded.support is Everything.SENT:
        return
    assert np.all(np.diff(encoded.support) > 0)
    outside = np.ones(x.size, bool)
    outside[encoded.support] = False
    assert not decoded[outside].any()


@few
@given(x=vectors(furthest=60), seed=st.integers(0, 1000))
def test_what_was_sent_and_what_is_left_are_what_was_given(spec: str, x: Vector, seed: int) -> None:
    """The decoded update plus the new residual is the update plus the old residual."""
    codec = in_feedback(spec, layout_of(x.size, spec))
    state = codec.init()
    state["residual"][:] = made(x.size, seed, "normal", 0)
    before = x.copy() + state["residual"]
    encoded = codec.encode(x, state, Key(seed))
    decoded = codec.decode(encoded.payload)
    ulp = np.spacing(np.maximum(np.abs(before), np.abs(decoded)))
    assert np.all(np.abs(decoded.astype(np.float64) + encoded.state["residual"] - before) <= 4 * ulp)


def test_under_feedback_the_sum_that_was_sent_follows_the_sum_that_was_given(spec: str) -> None:
    """Over 200 steps of one update the two sums differ by no more than the declared contraction allows.

    A residual is at most q (r + |x|) with q^2 = 1 - delta, so q / (1 - q) |x| (Karimireddy et al. 2019). Whatever is
    declared, less is lost than without memory; a codec that halves each error loses about what its first step lost.
    """
    codec, x = in_feedback(spec, layout_of(400, spec)), made(400, 7, "normal", 0)
    state, behind, gaps = codec.init(), np.zeros(400), list[float]()
    for step in range(200):
        encoded = codec.encode(x.copy(), state, Key(step))
        state, behind = encoded.state, behind + x - codec.decode(encoded.payload)
        gaps.append(float(np.linalg.norm(behind) / np.linalg.norm(x)))
    delta, first = contraction(codec.inner.kind), gaps[0]
    q = math.sqrt(1 - max(delta, 0))
    declared = (1 + NEARLY) * q * (1 + q) / delta if delta > 0 else math.inf
    halved = 2 * first / (1 - first) if delta > 1 / 2 and first < 1 else math.inf
    assert max(gaps) <= min(2 / 3 * len(gaps) * first, declared, halved) + 1e-5


def test_under_feedback_twice_what_was_sent_is_no_nearer(spec: str) -> None:
    """A codec that sends less than half of these values contracts too, and loses what it could send for nothing."""
    codec, alone = in_feedback(spec, layout := layout_of(400, spec)), parse(spec).bind(layout)
    tried = [equal := made(400, 7, "equal", 0), np.append(30 * equal[:1], equal[1:])]
    sent = [codec.decode(codec.encode(x.copy(), codec.init(), Key(1)).payload) for x in tried]
    if np.linalg.norm(sent[0]) < 0.9 * np.linalg.norm(alone.decode(alone.encode(equal, alone.init(), Key(1)).payload)):
        pytest.skip(f"error feedback sends a part of what {spec} gives, by its omega")
    assert any(np.linalg.norm(x - 2 * s) >= np.linalg.norm(x - s) for x, s in zip(tried, sent, strict=True))


def test_a_residual_survives_a_switch_of_codec(spec: str) -> None:
    """A second codec sends the residual that the first one left."""
    layout, x = layout_of(300, spec), made(300, 1, "normal", 0)
    first, second = in_feedback(spec, layout), feedback(parse("identity")).bind(layout)
    sent = first.encode(x.copy(), first.init(), Key(1))
    rest = second.encode(np.zeros(300, np.float32), sent.state, Key(2))
    total = first.decode(sent.payload) + second.decode(rest.payload)
    assert np.allclose(total, x, atol=1e-6)
    assert not rest.state["residual"].any()


def test_a_refund_goes_into_the_residual_alone(spec: str) -> None:
    """A refund returns a new residual and does not write to the old state."""
    layout, x = layout_of(300, spec), made(300, 1, "normal", 0)
    codec = in_feedback(spec, layout)
    sent = codec.encode(x.copy(), codec.init(), Key(1))
    kept = sent.state["residual"].copy()
    back = codec.restore_update(sent.payload, sent.state)
    assert np.allclose(back["residual"], x, atol=1e-6)
    assert np.array_equal(sent.state["residual"], kept)
