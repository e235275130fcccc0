"""The conformance suite of frames: a frame is as long as it says, and none does harm. Each law is a test of one `spec`.

Bytes that are no frame of the codec raise `BadPayload` and change nothing, whoever made them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from thinwire.compression import parse
from thinwire.compression.base import BoundCodec
from thinwire.compression.chain import Chain
from thinwire.compression.codecs import registry
from thinwire.conformance.codec_suite import few, layout_of, made, vectors
from thinwire.core import Key, Layout
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector


@few
@given(x=vectors())
def test_a_frame_is_at_most_as_long_as_it_says(spec: str, x: Vector) -> None:
    """A frame is at most `max_bytes` long, and `check` accepts it."""
    codec = parse(spec).bind(layout_of(x.size, spec))
    payload = codec.encode(x, codec.init(), Key(1)).payload
    assert len(payload) <= codec.max_bytes()
    codec.check(payload)


def test_a_frame_cut_anywhere_or_added_to_is_refused(spec: str) -> None:
    """A frame that was cut or extended raises BadPayload."""
    codec, payload = _encoded(spec, 700)
    for length in {*range(min(40, len(payload))), *range(40, len(payload), 97), len(payload) - 1}:
        _refused(codec, payload[:length])
    for more in (b"\0", payload, b"x" * 100_000):
        _refused(codec, payload + more)


def test_a_foreign_frame_is_refused(spec: str) -> None:
    """A frame of another codec, layout or version raises BadPayload."""
    codec, payload = _encoded(spec, 700)
    other = next(chain for chain in (step.examples[0] for step in registry().values()) if parse(chain).spec != spec)
    _refused(codec, _encoded(other, 700)[1])
    _refused(parse(spec).bind(Layout.of({"other": (700,)})), payload)
    _refused(codec, b"TW\x02" + payload[3:])
    _refused(codec, b"")


def test_three_hundred_broken_frames_change_nothing_or_decode_to_numbers(spec: str) -> None:
    """A frame with random damage raises BadPayload and changes nothing, or decodes to finite values."""
    codec, payload = _encoded(spec, 300)
    rng = np.random.default_rng(12)
    legal = 0
    for _ in range(300):
        broken = bytearray(payload)
        for _ in range(rng.integers(1, 4)):
            way, at = rng.integers(4), int(rng.integers(len(broken)))
            if way == 0:
                broken[at] ^= 1 << rng.integers(8)
            elif way == 1:
                broken[at] = rng.integers(256)
            elif way == 2:
                del broken[at : at + int(rng.integers(1, 9))]
                if not broken:
                    broken = bytearray(b"T")
            else:
                broken[at:at] = rng.bytes(int(rng.integers(1, 9)))
        into = np.ones(300, np.float32)
        try:
            codec.decode_add(bytes(broken), 1.0, into)
        except BadPayload:
            assert (into == 1).all()
        else:
            legal += 1
            assert np.isfinite(codec.decode(bytes(broken))).all()
    assert legal < 300


def test_a_compressed_stream_comes_back_whole_and_never_grows_beyond_what_it_may(spec: str) -> None:
    """A compressor restores its input, and raises BadPayload instead of returning more than `most` bytes."""
    codec = parse(spec)
    if not isinstance(codec, Chain) or codec.coded.last is None:
        return
    coders = codec.coded
    for data in (b"", b"x", bytes(100_000), made(3000, 5, "normal", 0).tobytes(), bytes(range(256)) * 40):
        stream = coders.shrink(data)
        assert len(stream.data) <= len(data)
        assert bytes(coders.grow(stream, len(data))) == data
        if stream.compressed:
            for most in (0, 1, len(data) - 1):
                with pytest.raises(BadPayload):
                    coders.grow(stream, most)


def _encoded(spec: str, n: int) -> tuple[BoundCodec, bytes]:
    codec = parse(spec).bind(layout_of(n, spec))
    return codec, bytes(codec.encode(made(n, 3, "normal", 0), codec.init(), Key(1)).payload)


def _refused(codec: BoundCodec, payload: bytes) -> None:
    into = np.ones(codec.layout.size, np.float32)
    with pytest.raises(BadPayload):
        codec.decode_add(payload, 1.0, into)
    with pytest.raises(BadPayload):
        codec.check(payload)
    assert (into == 1).all()
