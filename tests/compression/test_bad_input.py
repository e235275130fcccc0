"""What an encoder is given and should not be: it gives a result, or refuses by name, and then nothing is changed."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.codec_examples import SPECS, layout_of, made, takes_feedback
from thinwire.compression import feedback, native, parse
from thinwire.compression.base import BoundCodec
from thinwire.compression.feedback import ef21
from thinwire.core import Key, Layout
from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.types import State, Vector

N = 4500  # a bucket and a short one
GIVEN = made(N, 1, "normal", 0)
LARGEST, DENORMAL = np.finfo(np.float32).max, np.float32(1e-45)
SIGNALLING = np.array([0x7F800001], np.uint32).view(np.float32)[0]
AROUND: tuple[Callable, ...] = (lambda codec: codec, feedback, ef21)


# The other paths are compared with numpy by test_kernels.py, also on such values.
PATHS = tuple(dict.fromkeys((native.available()[0], "numpy")))


def on_each_path(test: Callable[[str], None]) -> Callable[[str], None]:
    """One test that goes through the paths; a failure says on which one."""

    @functools.wraps(test)
    def run(spec: str) -> None:
        for path in PATHS:
            with native.using(path):
                try:
                    test(spec)
                except BaseException as error:
                    error.add_note(f"on the path {path}")
                    raise

    return run


def bound(spec: str, layout: Layout) -> Iterator[BoundCodec]:
    """The codec alone and inside whatever may stand around it."""
    for around in AROUND:
        with contextlib.suppress(CodecError):
            yield around(parse(spec)).bind(layout)


def held(codec: BoundCodec, value: float = 0.0) -> State:
    state = codec.init()
    for name in ("residual", "reference"):
        if name in state:
            state[name][:] = value
    return state


def refused(codec: BoundCodec, x: Vector, state: State, error: type[Exception]) -> None:
    before = {name: array.tobytes() for name, array in state.items()}
    with pytest.raises(error):
        codec.encode(x, state, Key(1))
    assert {name: array.tobytes() for name, array in state.items()} == before


def taken(codec: BoundCodec, x: Vector, state: State) -> None:
    """A result whose numbers, and those kept for the next call, are all finite; or NonFiniteUpdate, nothing changed."""
    before = {name: array.tobytes() for name, array in state.items()}
    try:
        encoded = codec.encode(x, state, Key(1))
    except NonFiniteUpdate:
        assert {name: array.tobytes() for name, array in state.items()} == before
        return
    codec.check(encoded.payload)
    assert np.isfinite(codec.decode(encoded.payload)).all()
    assert all(np.isfinite(array).all() for array in encoded.state.values())


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_nan_and_infinity_are_refused_wherever_they_stand(spec: str) -> None:
    for codec in bound(spec, layout_of(N, spec)):
        for bad, place in itertools.product((np.nan, np.inf, -np.inf, SIGNALLING), (0, 4095, N - 1)):
            x = GIVEN.copy()
            x[place] = bad
            refused(codec, x, held(codec, 0.5), NonFiniteUpdate)


TINY: tuple[dict[str, tuple[int, ...]], ...] = (
    {"a": (0,)}, {"a": (1,)}, {"a": (0,), "b.bias": (1,), "c": (0, 3)}, {"a": (7,), "b.bias": (0,)}, {"a": (2, 2)},
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_empty_and_tiny_vectors_come_back(spec: str) -> None:
    for shapes in TINY:
        layout = Layout.of(shapes)
        for codec in bound(spec, layout):
            for value in (0.0, -2.5, LARGEST, DENORMAL):
                taken(codec, np.full(layout.size, value, np.float32), held(codec))


def extremes() -> dict[str, Vector]:
    signs = np.where(np.arange(N) % 3 == 0, -1, 1).astype(np.float32)
    mixed = made(N, 1, "normal", 0)
    mixed[::7] = DENORMAL
    last = np.zeros(N, np.float32)
    last[-1] = LARGEST
    return {
        "zeros": np.zeros(N, np.float32),
        "zeros of both signs": signs * np.float32(0),
        "denormals": signs * DENORMAL,
        "the largest denormals": signs * np.float32(1.1754942e-38),
        "denormals among others": mixed,
        "over half precision": made(N, 2, "normal", 17),
        "the largest": signs * LARGEST,
        "the largest at the end": last,
        "the largest beside the least": np.where(signs > 0, LARGEST, DENORMAL).astype(np.float32),
        "large ones": made(N, 3, "normal", 127),
    }


EXTREMES = extremes()
BESIDE_HELD = ("zeros", "denormals among others", "the largest", "the largest beside the least", "large ones")


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_extremes_are_finite_there_and_back_or_refused(spec: str) -> None:
    for codec in bound(spec, layout_of(N, spec)):
        for x in EXTREMES.values():
            taken(codec, x.copy(), held(codec))
        if codec.init().keys() & {"residual", "reference"}:  # sums and differences of extremes
            for name, value in itertools.product(BESIDE_HELD, (float(LARGEST), float(DENORMAL))):
                taken(codec, EXTREMES[name].copy(), held(codec, value))


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_what_is_no_vector_of_this_size_is_refused(spec: str) -> None:
    x = GIVEN[:300].copy()
    raw = np.zeros(4 * x.size + 1, np.uint8)[1:].view(np.float32)  # at an odd address
    raw[:] = x
    wrong: tuple[Any, ...] = (
        GIVEN[:600:2], x[::-1], x.astype(np.float64), x.astype(">f4"), x.astype(np.float16), x.astype(np.int32),
        x[:-1], np.append(x, x[:1]), x.reshape(3, 100), x.reshape(1, 300), raw, np.array(np.float32(1)),
    )  # fmt: skip
    for codec in bound(spec, layout_of(x.size, spec)):
        for bad in wrong:
            refused(codec, bad, held(codec, 0.5), ValueError)


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_what_is_held_and_is_no_vector_of_this_size_is_refused_before_a_kernel_reads_it(spec: str) -> None:
    """As a state is that was kept for another model: whoever has its address alone would read what is not its own."""
    x = GIVEN[:300].copy()
    wrong: tuple[Any, ...] = (
        x[:-1].copy(), x[:1].copy(), np.append(x, x[:1]), GIVEN[:600:2], x.astype(np.float64), x.reshape(1, 300),
    )  # fmt: skip
    layout = layout_of(x.size, spec)
    with_momentum = [feedback(parse(spec), 0.9).bind(layout)] if takes_feedback(spec) else []
    for codec in (*bound(spec, layout), *with_momentum):
        for name in codec.init().keys() & {"residual", "reference", "momentum"}:
            for bad in wrong:
                refused(codec, x.copy(), {**codec.init(), name: bad}, ValueError)


@pytest.mark.parametrize("spec", SPECS)
@on_each_path
def test_memory_that_may_not_be_written_is_never_written(spec: str) -> None:
    """A plain encoder only reads; one that gives the vector's memory to its residual refuses what it may not have."""
    given = GIVEN[:300].tobytes()
    before, x = bytes(bytearray(given)), np.frombuffer(given, np.float32)
    for number, codec in enumerate(bound(spec, layout_of(300, spec))):
        try:
            codec.encode(x, held(codec), Key(1))
        except ValueError:
            assert number, "alone it only reads"
        assert given == before
        payload = codec.encode(x.copy(), held(codec), Key(1)).payload
        intos: tuple[Any, ...] = (
            x, np.zeros(1201, np.uint8)[1:].view(np.float32), np.zeros(600, np.float32)[::2], np.zeros(300),
        )  # fmt: skip
        for into in intos:
            held_before = into.tobytes()
            with pytest.raises(ValueError, match="float32"):
                codec.decode_add(payload, 1.0, into)
            assert into.tobytes() == held_before
