"""Frames that somebody made who wants to do harm: what a decoder is given in the tests and in `make fuzz`.

Every kind starts from a frame that is right, so that it comes as deep into a decoder as it can; its header is right too
unless the header is what is attacked. Some of what comes out is legal all the same: a symbol's bit may be flipped.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from backports import zstd

from tests.support.codec_examples import layout_of, made
from thinwire.compression import frame, parse
from thinwire.compression.base import BoundCodec
from thinwire.compression.frame import Stream
from thinwire.core import Key, Layout

Streams = list[Stream]
OTHERS = ("identity", "fp16", "int8", "topk(0.1) > rice", "eden(2)", "randk(0.1)", "threshold(2.5)")
WITHOUT_SIZE: dict[int, int] = {zstd.CompressionParameter.content_size_flag: 0}
WORDS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 24, (1 << 24) - 1]
FLOATS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -1.0,
    -0.0,
    1e-45,
    2.0**-126,
    2.0**-110,
    3.4028235e38,
    2.0**127,
    1.0,
]
VARINTS = [
    b"\xff\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80\x00", b"\x80\x80\x00",
    b"\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x10", b"\x00", b"\x01", b"\xff",
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A decoder, frames that it takes, and one of another codec."""

    codec: BoundCodec
    frames: tuple[bytes, ...]
    bound: bytes
    streams: tuple[tuple[Stream, ...], ...]  # of each frame
    foreign: tuple[bytes, ...]

    @classmethod
    def of(cls, spec: str, n: int) -> Target:
        codec = parse(spec).bind(layout_of(n, spec))
        right = [_encoded(codec, n, key, shape) for key, shape in enumerate(("normal", "sparse", "steep"))]
        bound = frame.codec_hash(codec.spec, codec.layout.digest, 0)
        count, _ = frame.read_varint(memoryview(right[0]), len(frame.MAGIC) + 1 + frame.HASH_BYTES)
        streams = tuple(
            tuple(Stream(bytes(s.data), s.compressed) for s in frame.unpack(one, bound, count)) for one in right
        )
        other = Layout.of({"other": (n,)})
        foreign = [_encoded(parse(name).bind(other), n, 1, "normal") for name in OTHERS]
        foreign += [frame.pack(frame.codec_hash(codec.spec, codec.layout.digest, 1), streams[0])]
        return cls(codec, tuple(right), bound, streams, tuple(foreign))

    def hostile(self, rng: random.Random) -> bytes:
        """The next one: two kinds of harm at a time now and then."""
        if rng.random() < 0.35:
            return rng.choice(WHOLE)(rng, self)
        streams = list(rng.choice(self.streams))
        for _ in range(1 if rng.random() < 0.8 else 2):
            if streams:
                at = rng.randrange(len(streams))
                streams[at] = rng.choice(ONE)(rng, streams[at])
        return packed(self.bound, streams)


@cache
def target(spec: str, n: int) -> Target:
    return Target.of(spec, n)


def _encoded(codec: BoundCodec, n: int, key: int, shape: str) -> bytes:
    return bytes(codec.encode(made(n, key, shape, 0), codec.init(), Key(key)).payload)


def packed(bound: bytes, streams: Streams) -> bytes:
    """`frame.pack` without its own care: lengths are said as they are, however long."""
    lengths = b"".join(frame.varint(len(s.data) * 2 + s.compressed) for s in streams)
    header = frame.MAGIC + bytes([frame.VERSION]) + bound + frame.varint(len(streams)) + lengths
    return b"".join([header, *(bytes(s.data) for s in streams)])


# Of the whole frame


def flipped(rng: random.Random, to: Target) -> bytes:
    broken = bytearray(rng.choice(to.frames))
    for _ in range(rng.choice([1, 1, 2, 8])):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def truncated(rng: random.Random, to: Target) -> bytes:
    right = rng.choice(to.frames)
    return right[: rng.randrange(len(right))]


def oversized(rng: random.Random, to: Target) -> bytes:
    right = rng.choice(to.frames)
    return right + rng.choice([b"\0", b"\xff" * 9, right, bytes(rng.choice([100, 100_000]))])


def cut_out(rng: random.Random, to: Target) -> bytes:
    right, size = rng.choice(to.frames), rng.randrange(1, 9)
    at = rng.randrange(len(right))
    return right[:at] + rng.choice([b"", rng.randbytes(size)]) + right[at + rng.choice([0, size]) :]


def foreign(rng: random.Random, to: Target) -> bytes:
    other = rng.choice(to.foreign)
    return rng.choice([other, other[:3] + to.bound + other[11:]])


def unsaid(rng: random.Random, to: Target) -> bytes:
    """Random bytes behind a header that is right, or behind none."""
    start = frame.MAGIC + bytes([frame.VERSION]) + to.bound
    return rng.choice([b"", b"TW", b"TW\x01", b"TW\x02" + to.bound, start, start]) + rng.randbytes(rng.randrange(200))


def claimed(rng: random.Random, to: Target) -> bytes:
    """A number of streams or a length that is not there, that overflows, or that is not in its shortest form."""
    right = rng.choice(to.frames)
    start = len(frame.MAGIC) + 1 + frame.HASH_BYTES + rng.randrange(1 + len(to.streams[0]))
    return right[:start] + rng.choice(VARINTS) + right[start + rng.choice([0, 1, 2]) :]


def fewer_or_more(rng: random.Random, to: Target) -> bytes:
    streams = list(rng.choice(to.streams))
    way = rng.randrange(4)
    if way == 0:
        streams.append(rng.choice(streams))
    elif way == 1:
        streams.pop(rng.randrange(len(streams)))
    elif way == 2:
        rng.shuffle(streams)
    else:
        streams = [rng.choice(streams)] * rng.choice([1, 127, 128, 300])
    return packed(to.bound, streams)


# Of one stream


def noise(rng: random.Random, of: Stream) -> Stream:
    return Stream(rng.randbytes(len(of.data)), of.compressed)


def filled(rng: random.Random, of: Stream) -> Stream:
    return Stream(bytes([rng.choice([0, 1, 0x55, 0x7F, 0x80, 0xFE, 0xFF])]) * len(of.data), of.compressed)


def resized(rng: random.Random, of: Stream) -> Stream:
    data = bytes(of.data)
    size = rng.choice(
        [0, 1, len(data) - 1, len(data) + 1, 2 * len(data), len(data) + 4096, rng.randrange(1 + len(data))]
    )
    more = rng.choice([b"\0", b"\xff", data or b"\0"])
    return Stream((data + more * -(-max(0, size - len(data)) // len(more)))[: max(0, size)], of.compressed)


def one_byte(rng: random.Random, of: Stream) -> Stream:
    data = bytearray(of.data)
    for _ in range(rng.choice([1, 1, 3])):
        if data:
            data[rng.randrange(len(data))] = rng.choice([0, 1, 24, 25, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)])
    return Stream(bytes(data), of.compressed)


def odd_float(rng: random.Random, of: Stream) -> Stream:
    """NaN, infinity, negative, denormal or too large, where a float32 or a half may stand."""
    data, value = bytearray(of.data), rng.choice(FLOATS)
    form = rng.choice(["<f", "<f", "<e"])
    try:
        said = struct.pack(form, value)
    except OverflowError:
        said = struct.pack("<f", value)
    if len(data) >= len(said):
        at = rng.randrange(len(data) - len(said) + 1) // len(said) * len(said)
        data[at : at + len(said)] = said
    return Stream(bytes(data), of.compressed)


def odd_word(rng: random.Random, of: Stream) -> Stream:
    """A word, or a number of places, that cannot be; it stands at the beginning."""
    return Stream(struct.pack("<I", rng.choice(WORDS)) + bytes(of.data)[4:], of.compressed)


def padded(rng: random.Random, of: Stream) -> Stream:
    """Bits behind the last symbol."""
    data = bytearray(of.data)
    if data:
        data[-1] |= 0xFF << rng.randrange(8) & 0xFF
    return Stream(bytes(data), of.compressed)


def odd_places(rng: random.Random, of: Stream) -> Stream:
    """Gaps that lead out of the vector, that overflow, that stand for a place twice, or that could be shorter."""
    count, out = len(of.data), bytearray()
    far = rng.randrange(1 + count)
    for i in range(count):
        out += rng.choice(VARINTS) if i == far else b"\0"
    return Stream(bytes(out[: rng.choice([count, len(out)])]), of.compressed)


def odd_parameter(rng: random.Random, of: Stream) -> Stream:
    """A rice parameter that changes where everything behind it stands; with or without a count before it."""
    data = bytearray(of.data)
    at = rng.choice([0, 0, 1, 4])
    if at < len(data):
        data[at] = rng.choice([0, 1, 7, 8, 23, 24, 25, 31, 32, 63, 64, 128, 254, 255])
    return Stream(bytes(data), of.compressed)


@cache
def bombs() -> tuple[bytes, ...]:
    """Of zstd: what says that it is huge, what does not say it, what says less or more than it is."""
    small = zstd.compress(bytes(300))
    lie = bytearray(zstd.compress(bytes(70_000)))
    lie[5:9] = struct.pack("<I", 300)  # the size that a frame of this length says there
    return (
        zstd.compress(bytes(1 << 26), 19), zstd.compress(bytes(1 << 20), options=WITHOUT_SIZE), small, small[:-3],
        small + b"more",
        small + small, b"", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\x04\0\0\0skip", bytes(lie),
        struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 60), zstd.compress(b""),
        zstd.compress(bytes(300), zstd_dict=zstd.ZstdDict(bytes(range(256)) * 8, is_raw=True)),
    )  # fmt: skip


def bomb(rng: random.Random, of: Stream) -> Stream:
    return Stream(rng.choice(bombs()), rng.random() < 0.9)


def zipped(rng: random.Random, of: Stream) -> Stream:
    """Harm that comes compressed, and says of itself what it is."""
    data = bytes(of.data)
    if of.compressed:
        try:
            size = zstd.get_frame_info(data).decompressed_size or 0
            data = zstd.decompress(data) if 0 < size < 1 << 20 else data
        except zstd.ZstdError:  # harmed before
            data = bytes(of.data)
    inside = rng.choice([noise, filled, resized, one_byte, odd_float, padded, odd_places, odd_word])(rng, Stream(data))
    return Stream(zstd.compress(bytes(inside.data), 1), True)


def mislabelled(rng: random.Random, of: Stream) -> Stream:
    return Stream(of.data, not of.compressed)


Kind = Callable[[random.Random, Target], bytes]
WHOLE: tuple[Kind, ...] = (flipped, flipped, truncated, oversized, cut_out, foreign, unsaid, claimed, fewer_or_more)
ONE: tuple[Callable[[random.Random, Stream], Stream], ...] = (
    noise, filled, resized, one_byte, one_byte, odd_float, odd_float, odd_word, padded, odd_places, odd_parameter,
    bomb, zipped, mislabelled,
)  # fmt: skip


def refused(codec: BoundCodec, payload: bytes, start: int, stop: int, weight: float = 0.5) -> bytes | None:
    """What a frame adds to ones between two places; None: BadPayload, and nothing was changed.

    AssertionError where a decoder does anything else: both of its ways must say the same, and it gives numbers.
    """
    from thinwire.core.errors import BadPayload

    into = np.ones(codec.layout.size, np.float32)
    try:
        codec.decode_add(payload, weight, into, slice(start, stop))
    except BadPayload:
        assert (into == 1).all(), "a frame was refused when something of it had been added"
        try:
            codec.check(payload)
        except BadPayload:
            return None
        raise AssertionError("check takes what decode_add refuses") from None
    codec.check(payload)
    assert (into[:start] == 1).all(), "something was added before the span"
    assert (into[stop:] == 1).all(), "something was added behind the span"
    found = codec.decode(payload)
    assert np.isfinite(found).all(), "a frame decodes to what is no number"
    return into.tobytes() + found.tobytes()
