"""Frames that are not ours raise BadPayload, before memory is taken and before anything is changed."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from backports import zstd

from tests.support.codec_examples import layout_of, made
from tests.support.hostile_frames import WITHOUT_SIZE
from thinwire.compression import frame, native, parse
from thinwire.compression.codecs.delta_rice import Delta
from thinwire.compression.frame import Stream
from thinwire.core import Key, Layout
from thinwire.core.errors import BadPayload

N = 700
X = made(N, 3, "normal", 0)


def bound(spec: str, n: int = N):
    codec = parse(spec).bind(layout_of(n, spec))
    return codec, codec.encode(made(n, 3, "normal", 0), codec.init(), Key(1)).payload


def refuse(codec, payload) -> None:
    into = np.ones(codec.layout.size, np.float32)
    for call in (lambda: codec.decode_add(payload, 1.0, into), lambda: codec.check(payload)):
        with pytest.raises(BadPayload):
            call()
    assert (into == 1).all()


def test_a_frame_of_another_segment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.core.layout.SEGMENT_FLOATS", 100)
    codec = parse("identity").bind(Layout.of({"a": (100,), "b": (100,)}))
    payload = codec.encode(X[:100].copy(), {}, Key(1), 0).payload
    codec.check(payload, 0)
    with pytest.raises(BadPayload, match="another codec, model or segment"):
        codec.check(payload, 1)


def forged(codec, streams: list[Stream]) -> bytes:
    header = frame.codec_hash(codec.spec, codec.layout.digest, 0)
    return frame.pack(header, streams)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    for spec, symbol, scale in (("identity", "<f4", None), ("fp16", "<f2", b"\0"), ("int8", None, "<f4")):
        codec = parse(spec).bind(Layout.of({"w": (10,)}))
        symbols = np.full(10, value, symbol).tobytes() if symbol else bytes(10)
        scales = [] if scale is None else [scale if isinstance(scale, bytes) else np.array([value], scale).tobytes()]
        refuse(codec, forged(codec, [Stream(symbols), *map(Stream, scales)]))


@pytest.mark.parametrize(
    ("spec", "symbols", "scales"),
    [
        ("int8", b"\x80" * 10, struct.pack("<f", 1)),
        ("int8", bytes(10), struct.pack("<f", -1)),
        ("int8", bytes(10), struct.pack("<f", 3e38)),
        ("int8", bytes(10), struct.pack("<f", 1e-45)),
        ("fp16", bytes(20), b"\x7f"),
        ("fp16", bytes(20), b"\x80"),
    ],
)
def test_a_symbol_or_scale_that_no_encoder_makes_is_refused(spec: str, symbols: bytes, scales: bytes) -> None:
    codec = parse(spec).bind(Layout.of({"w": (10,)}))
    refuse(codec, forged(codec, [Stream(symbols), Stream(scales)]))


@pytest.mark.parametrize(
    "places",
    [
        b"\x00\x64",  # the second one is 101 of 100
        b"\x00\xff\xff\xff\x7f",  # far out of range
        b"\x00\xff\xff\xff\xff\x0f",  # more than a segment can have
        b"\x00\x80\x00",  # not the shortest form
        b"\x00",  # one too few
        b"\x00\x00\x00",  # one too many
        b"\x00\x80",  # cut off
        b"\xff" * 8,
    ],
)
def test_places_that_cannot_be_are_refused(places: bytes) -> None:
    codec = parse("topk(0.02)").bind(Layout.of({"w": (100,)}))
    refuse(codec, forged(codec, [Stream(places), Stream(bytes(8))]))
    codec.check(forged(codec, [Stream(b"\x00\x62"), Stream(bytes(8))]))


def test_gaps_come_back_for_any_rising_places() -> None:
    rng = np.random.default_rng(0)
    for size, count in ((1, 1), (2**24, 1), (2**24, 500), (300, 300), (20_000, 150)):
        places = np.sort(rng.choice(size, count, replace=False))
        packed = Delta().pack(places)
        assert np.array_equal(Delta().unpack(packed, count, size), places)
        assert len(packed) <= Delta().max_bytes(count, size)
    last = np.array([2**24 - 1])
    assert np.array_equal(Delta().unpack(Delta().pack(last), 1, 2**24), last)


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff", b"\x80\x00", b"\xff\xff\xff\x7f"])
def test_a_length_that_cannot_be_is_refused(length: bytes) -> None:
    codec, payload = bound("identity")
    start = len(frame.header(frame.codec_hash(codec.spec, codec.layout.digest, 0), [(1, False)])) - 1
    refuse(codec, payload[:start] + length + payload[start + 2 :])


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    codec = parse("int8 > zstd").bind(Layout.of({"w": (1000,)}))
    scales = Stream(struct.pack("<f", 1))
    bombs = [
        zstd.compress(bytes(2**26), 19),
        zstd.compress(bytes(2**20), options=WITHOUT_SIZE),
        zstd.compress(bytes(1000))[:-3],
        zstd.compress(bytes(1000)) + b"more",
        zstd.compress(bytes(999)),
        zstd.compress(b""),
        b"not zstd",
    ]
    for bomb in bombs:
        payload = forged(codec, [Stream(bomb, compressed=True), scales])
        tracemalloc.start()
        refuse(codec, payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200_000
    codec.check(forged(codec, [Stream(zstd.compress(bytes(1000)), compressed=True), scales]))


def test_a_compressed_stream_is_refused_where_the_chain_has_no_zstd() -> None:
    codec = parse("int8").bind(Layout.of({"w": (1000,)}))
    zipped = Stream(zstd.compress(bytes(1000)), compressed=True)
    refuse(codec, forged(codec, [zipped, Stream(struct.pack("<f", 1))]))


@pytest.mark.parametrize("n", [1, 100, 5000, 2**20])
def test_a_frame_has_at_most_24_bytes_of_its_own_and_4_for_each_further_stream(n: int) -> None:
    x = np.ones(n, np.float32)
    for spec, streams in (("identity", 1), ("int8", 2), ("topk(0.5) > int8", 3)):
        codec = parse(spec).bind(Layout.of({"w": (n,)}))
        payload = codec.encode(x, {}, Key(1)).payload
        read = frame.unpack(payload, frame.codec_hash(spec, codec.layout.digest, 0), streams)
        assert len(payload) - sum(len(stream.data) for stream in read) <= 24 + 4 * (streams - 1)


@pytest.mark.parametrize("path", native.available())
@pytest.mark.parametrize("spec", ["threshold(2) > rice", "threshold(2)", "threshold(2) > int8 > rice"])
def test_a_number_of_places_that_a_short_frame_claims_takes_no_memory(spec: str, path: str) -> None:
    codec = parse(spec).bind(Layout.of({"w": (1 << 24,)}))
    for places in (bytes(10), bytes(4096) + b"\x01" * 2000, b"\xff" * 5000):
        others = [Stream(b"")] * (codec.groups[0][0].chain.streams(1) - 1)
        streams = [Stream(struct.pack("<I", 1 << 24) + places), *others]
        with native.using(path):
            tracemalloc.start()
            with pytest.raises(BadPayload):
                codec.check(forged(codec, streams))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1 << 20
