"""Every kernel on every path that this machine has: the bytes and floats of numpy, which are the golden ones."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compression.write_golden import FOLDER, name_of
from tests.support.codec_examples import QUANTIZERS, SPECS, fixed_vector, is_ours_alone, layout_of, made, rotates
from thinwire.compression import feedback, native, parse
from thinwire.compression.codecs.delta_rice import Delta, Rice
from thinwire.compression.spec import PerTensorCodec
from thinwire.compression.vector_ops import CACHED
from thinwire.core import Key, Layout
from thinwire.core.errors import BadPayload, NonFiniteUpdate, UsageError
from thinwire.core.types import Vector

KERNELS = [path for path in native.available() if path != "numpy"]
BORDERS = [1, 2, 7, 63, 64, 65, 4095, 4096, 4097, 8191, 8193, 65535, 65537]  # of partial sums, buckets and blocks
FURTHER = ["qsgd(4, l2)", "sign(scaled)", "topk(0.1)", 'layers("a*"=int8; *=qsgd(4))']
ROTATING = [spec for spec in QUANTIZERS if rotates(spec)]
QUANTIZED = [spec for spec in SPECS if not isinstance(parse(spec), PerTensorCodec)]


@pytest.fixture(params=native.available())
def path(request):
    with native.using(request.param):
        yield request.param


@pytest.mark.parametrize("spec", SPECS)
def test_every_path_gives_the_golden_bytes_and_floats(spec: str) -> None:
    x, file = fixed_vector(), FOLDER / f"{name_of(spec)}.frame"
    codec, frame = parse(spec).bind(layout_of(x.size, spec)), file.read_bytes()
    for path in native.available():
        with native.using(path):
            if is_ours_alone(spec):
                assert codec.encode(x.copy(), codec.init(), Key(1, 2)).payload == frame, path
            assert codec.decode(frame).astype("<f4").tobytes() == file.with_suffix(".f4").read_bytes(), path


@st.composite
def awkward(draw: st.DrawFn) -> Vector:
    """Sizes around the borders, and values that a kernel may treat otherwise: denormals, -0, the largest, ties."""
    n = draw(st.sampled_from(BORDERS))
    x = made(
        n, draw(st.integers(0, 2**32)), draw(st.sampled_from(["normal", "ties", "spike", "steep", "sparse"])),
        draw(st.integers(-126, 127)),
    )  # fmt: skip
    some = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4028235e38, -3.4028235e38, 1.0, -0.5])
    for value in draw(st.lists(some, max_size=4)):
        x[draw(st.integers(0, n - 1))] = value
    if draw(st.booleans()):
        x[: n // 2] = 0  # whole buckets of nothing
    return x


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("spec", QUANTIZED)
@settings(max_examples=5, deadline=None)
@given(x=awkward(), weight=st.sampled_from([1.0, -1.0, 0.3]), word=st.integers(0, 2**32 - 1), cut=st.floats(0, 1))
def test_every_path_gives_what_numpy_gives(
    spec: str, fed: bool, x: Vector, weight: float, word: int, cut: float
) -> None:
    bound = parse(spec).bind(layout_of(x.size, spec))
    bound, span = bound.under_feedback() if fed else bound, slice(int(cut * x.size), x.size - int(cut * x.size) // 3)

    def both() -> tuple[bytes, bytes, bytes]:
        payload = bound.encode(x.copy(), bound.init(), Key(word)).payload
        into = np.ones(x.size, np.float32)
        bound.decode_add(payload, weight, into, span)
        return payload, into.tobytes(), bound.decode(payload).tobytes()

    with native.using("numpy"):
        expected = both()
    for path in KERNELS:
        with native.using(path):
            assert both() == expected, path


@pytest.mark.parametrize("spec", [*ROTATING, "natural"])
def test_what_is_drawn_for_a_value_does_not_depend_on_the_part_that_is_in_cache(spec: str, path: str) -> None:
    x = made(CACHED + 70_001, 1, "normal", 0)
    bound, found = feedback(parse(spec)).bind(layout_of(x.size, spec)), set()
    for here in ("numpy", path):
        with native.using(here):
            first = bound.encode(x.copy(), bound.init(), Key(1))
            found.add(first.payload + bound.encode(x.copy(), first.state, Key(2)).payload)
    assert len(found) == 1


@pytest.mark.parametrize("spec", [*QUANTIZERS, *FURTHER])
def test_what_is_not_finite_is_refused_wherever_it_stands(spec: str, path: str) -> None:
    right = made(9000, 1, "normal", 0)
    for codec in (parse(spec), feedback(parse(spec))):
        bound = codec.bind(layout_of(9000))
        for bad, place in itertools.product((np.nan, np.inf, -np.inf), (0, 4095, 4096, 8999)):
            x = right.copy()
            x[place] = bad
            with pytest.raises(NonFiniteUpdate):
                bound.encode(x, bound.init(), Key(1))


def test_parts_are_whole_blocks_that_cover_everything() -> None:
    with native.using_threads(3):
        cuts = native.parts(5, 5 + 3 * native.LEAST)
    assert len(cuts) == 3
    assert (cuts[0][0], cuts[-1][1]) == (5, 5 + 3 * native.LEAST)
    assert all(a[1] == b[0] and a[1] % native.GRAIN == 0 for a, b in itertools.pairwise(cuts))


def test_parts_between_tensors_begin_at_whole_bytes_of_packed_symbols() -> None:
    half = native.LEAST
    with native.using_threads(2):
        assert native.parts_between([0, 3, half - 5, half + 8, 2 * half]) == [(0, 3), (3, 4)]
        assert native.parts_between([0, half + 1, 2 * half]) == [(0, 2)]  # no tensor begins at one
        assert native.parts_between([0, 8, half]) == [(0, 2)]  # not worth a thread


@pytest.mark.parametrize("fed", [False, True])
def test_tensors_of_odd_sizes_have_their_own_scales_and_share_bytes(fed: bool, path: str, monkeypatch) -> None:
    monkeypatch.setattr(native, "LEAST", 8192)
    monkeypatch.setattr(native, "GRAIN", 4096)
    sizes = [3, 4096, 1, 5000, 12, 8192, 7, 9001]
    x = np.concatenate([made(size, size, "normal", size % 5) for size in sizes])
    layout = Layout.of({f"t{i}": (size,) for i, size in enumerate(sizes)})
    bound = parse("ternary").bind(layout)
    bound = bound.under_feedback() if fed else bound

    def result() -> tuple[bytes, bytes]:
        payload = bound.encode(x.copy(), bound.init(), Key(1)).payload
        into = np.ones(x.size, np.float32)
        bound.decode_add(payload, 0.3, into, slice(2, x.size - 5))
        return payload, into.tobytes()

    with native.using("numpy"):
        expected = result()
    for count in (1, 2, 3):
        with native.using_threads(count):
            assert result() == expected


@pytest.mark.skipif(not KERNELS, reason="no kernels were built here")
@pytest.mark.parametrize("number", [0, native.ABI + 1])
def test_a_library_with_another_abi_number_is_not_used_and_a_warning_tells_of_it(monkeypatch, number: int) -> None:
    assert native.library.__wrapped__() is not None
    monkeypatch.setattr(native, "abi_of", lambda _: number)
    with pytest.warns(RuntimeWarning, match=f"ABI {number}, this version of Thinwire needs {native.ABI}"):
        assert native.library.__wrapped__() is None


def test_the_abi_number_changes_with_the_signatures() -> None:
    """When a signature changes: the number here, in compression/native/__init__.py and csrc/paths.cpp, and the hash."""
    told = ";".join(
        f"{name} {result and result.__name__} {[argument.__name__ for argument in arguments]}"
        for name, (result, arguments) in sorted(native.SIGNATURES.items())
    )
    assert (native.ABI, hashlib.sha256(told.encode()).hexdigest()[:16]) == (7, "333cf81e7c1d91ed")


def test_a_path_that_is_not_here_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "mmx")
    with pytest.raises(UsageError, match="mmx"):
        native.chosen()


def test_the_environment_forces_numpy(monkeypatch) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "numpy")
    assert native.chosen() == "numpy"
    assert native.kernel("levels_encode") is None


@given(
    gaps=st.lists(st.integers(0, 2**9), min_size=1, max_size=300),
    times=st.sampled_from([1, 20, 4000]),
    cuts=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=3),
)
@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("coder", ["delta", "rice"])
def test_places_are_coded_alike_and_streams_that_are_none_refused_alike(coder: str, gaps, times, cuts) -> None:
    places = np.cumsum(np.array((gaps * times)[:9000], np.int64) + 1) - 1
    size = int(places[-1]) + 1
    pack, unpack = (Delta().pack, Delta().unpack) if coder == "delta" else (Rice().pack_indices, Rice().unpack_indices)

    def read(data: bytes) -> bytes | str:
        try:
            return unpack(data, places.size, size).tobytes()
        except BadPayload:
            return "refused"

    with native.using("numpy"):
        right = pack(places)
        broken = bytearray(right)
        for where, what in cuts:
            broken[where % len(broken)] = what
        tried = [right, bytes(broken), right[:-1], right + b"\0", bytes(broken)[1:]]
        expected = [read(data) for data in tried]
    assert expected[0] == places.tobytes()
    for path in KERNELS:
        with native.using(path):
            assert pack(places) == right, path
            assert [read(data) for data in tried] == expected, path


@given(
    symbols=st.binary(min_size=1, max_size=400),
    bits=st.integers(2, 8),
    times=st.sampled_from([1, 30]),
    cuts=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=3),
)
@settings(deadline=None, max_examples=60)
def test_symbols_are_coded_alike(symbols: bytes, bits: int, times: int, cuts) -> None:
    given = np.frombuffer(symbols * times, np.int8) >> np.int8(8 - bits)

    def read(data: bytes) -> bytes | str:
        try:
            return Rice().unpack_symbols(data, given.size, bits).tobytes()
        except BadPayload:
            return "refused"

    with native.using("numpy"):
        right = Rice().pack_symbols(given, bits)
        broken = bytearray(right)
        for where, what in cuts:
            broken[where % len(broken)] = what
        tried = [right, bytes(broken), right[:-1], right + b"\0"]
        expected = [read(data) for data in tried]
    assert expected[0] == given.tobytes()
    for path in KERNELS:
        with native.using(path):
            assert Rice().pack_symbols(given, bits) == right, path
            assert [read(data) for data in tried] == expected, path
