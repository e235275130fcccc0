"""The catalog of all codecs and coders: what the registry's stages are, and what they cost.

`steps` has the stages by name, ours and those of other packages.

`described` reads role, kind, bits and paper of each name from the code itself. `trials` encodes and decodes normal
values and reports milliseconds, bits and error, next to the time of a plain copy.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from thinwire.compression.base import (
    BoundCodec,
    Codec,
    Contractive,
    ErrorBound,
    Unbiased,
)
from thinwire.compression.codecs import registry
from thinwire.compression.feedback import feedback
from thinwire.compression.spec import ALIASES, parse
from thinwire.compression.vector_ops import blocks
from thinwire.core.errors import CodecError, UsageError
from thinwire.core.layout import Layout
from thinwire.core.prng import Key
from thinwire.core.types import Vector

steps = registry()  # the stages by name
ROLES = ("quantizer", "sparsifier", "lowrank", "coder")
SIDE = 256
SAMPLE = SIDE * SIDE  # normal values in a square matrix, on which the bits are counted


@dataclass(frozen=True)
class CodecInfo:
    """Describes one name of a chain, as `thinwire codecs list` shows it.

    `bits` are bits a parameter of `example`; `under_feedback` is its kind inside feedback, or the reason why feedback
    refuses it. A coder loses nothing and is shown in its example, so `kind` and `bits` are those of the chain in the
    example.
    """

    name: str
    role: str
    example: str
    kind: str
    under_feedback: str
    bits: float
    paper: str
    what: str
    stands_for: str = ""


def described() -> list[CodecInfo]:
    """Return all names that a chain may contain: codecs and coders in the order of their roles, then aliases.

    A broken codec of another package hides nothing else: its row says why it is broken.
    """
    rows, broken = list[CodecInfo](), list[CodecInfo]()
    for name in steps:
        try:
            step = steps[name]
            what = (inspect.getdoc(step) or "").split("\n", maxsplit=1)[0]
            rows.append(_row(name, step.role, parse(step.examples[0]).spec, step.paper, what))
        except CodecError as error:
            broken.append(_broken(name, f"{error.what}: {error.why}"))
        except Exception as error:  # another package's code may raise anything
            broken.append(_broken(name, f"{type(error).__name__}: {error}"))
    rows.sort(key=lambda row: ROLES.index(row.role))
    rows += broken
    for name, alias in ALIASES.items():
        rows.append(_row(name, "alias", alias.example, alias.paper, alias.what, alias.chain.format("_")))
    return rows


def _broken(name: str, why: str) -> CodecInfo:
    return CodecInfo(name, "broken", "", "", "", 0.0, "", why)


def _row(name: str, role: str, example: str, paper: str, what: str, stands_for: str = "") -> CodecInfo:
    codec = parse(example)
    bound = codec.bind(Layout.of({"w": (SIDE, SIDE)}))
    try:
        inside = worded(feedback(codec).bind(Layout.of({"w": (SIDE, SIDE)})).inner.kind)
    except CodecError as error:
        inside = f"refused: {error.why}"
    return CodecInfo(name, role, example, worded(bound.kind), inside, round(bits(example), 4), paper, what, stands_for)


@lru_cache
def bits(spec: str) -> float:
    """Return the bits a parameter of a codec on SAMPLE normal values; raise CodecError if the spec is invalid.

    >>> round(bits("fp16"), 1)
    16.0
    """
    bound = parse(spec).bind(Layout.of({"w": (SIDE, SIDE)}))
    x = np.random.default_rng(0).standard_normal(SAMPLE).astype(np.float32)
    return 8 * len(bound.encode(x, bound.init(), Key(1)).payload) / SAMPLE


@lru_cache
def frame_bytes(spec: str, layout: Layout) -> int:
    """Return the expected bytes of an update of this layout whose values are normally distributed.

    A small layout is encoded, since there the frames' headers and scales are a notable part; else `bits` counts.

    >>> frame_bytes("fp16", Layout.of({"w": (30, 20)})) - 2 * 600
    16
    """
    if layout.size > SAMPLE:
        return int(bits(spec) * layout.size / 8)
    bound, draw = parse(spec).bind(layout), np.random.default_rng(0)
    sizes = [segment.size for segment in layout.segments]
    drawn = [draw.standard_normal(size, np.float32) for size in sizes]
    return sum(len(bound.encode(x, bound.init(at), Key(1), at).payload) for at, x in enumerate(drawn))


def worded(kind: ErrorBound) -> str:
    """Return a kind as text.

    >>> worded(Contractive(0.01))
    'contractive, delta 0.01'
    """
    if isinstance(kind, Unbiased):
        return f"unbiased, omega {kind.omega:.3g}"
    return f"contractive, delta {kind.delta:.3g}" if isinstance(kind, Contractive) else "residual only"


MAX_PARAMS = 200_000_000  # the largest model of an aggregator with 24 GiB
TRIES = 3


@dataclass(frozen=True)
class Measurement:
    """A measurement of encoding and decoding `params` normal values; times are the best of `TRIES`, in milliseconds.

    One thread does the work, or as many as the plan says. `relative_error` is ||decoded - x|| / ||x||. `memcpy_ms` is
    the time to copy the vector into warm memory in the same run. `refused` says why there is nothing to measure.
    """

    feedback: bool
    params: int
    memcpy_ms: float
    encode_ms: float | None = None
    decode_ms: float | None = None
    bits_per_param: float | None = None
    relative_error: float | None = None
    refused: str = ""


def trials(codec: Codec, params: int) -> list[Measurement]:
    """Return a measurement without feedback and one with it."""
    if not 1 <= params <= MAX_PARAMS:
        raise UsageError(
            f"{params} parameters are not tried",
            why=f"1 to {MAX_PARAMS} fit a device and its aggregator",
            hint="--params 1000000",
        )
    layout = Layout.of(_shapes(params))
    draw = np.random.default_rng(1)
    xs = [draw.standard_normal(segment.size, np.float32) for segment in layout.segments]
    found = [_trial(codec.bind(layout), xs, fed=False)]
    try:
        found.append(_trial(feedback(codec).bind(layout), xs, fed=True))
    except CodecError as error:
        found.append(Measurement(True, params, found[0].memcpy_ms, refused=f"{error.what}: {error.why}"))
    return found


def _trial(bound: BoundCodec, xs: list[Vector], fed: bool) -> Measurement:
    done, params = measure_codec(bound, xs, 1 + TRIES), sum(x.size for x in xs)
    copy_ms, encode_ms, add_ms = (min(times[1:]) for times in (done.copy_ms, done.encode_ms, done.decode_add_ms))
    return Measurement(fed, params, copy_ms, encode_ms, add_ms, 8 * done.payload_bytes / params, done.relative_error)


def _shapes(params: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a nearly square matrix, which a low rank can factor, and of the remaining values.

    >>> _shapes(50_000)
    {'w': (224, 223), 'b': (48,)}
    """
    side = math.isqrt(params)
    rows, rest = divmod(params, side)
    return {name: shape for name, shape in (("w", (rows, side)), ("b", (rest,))) if shape[0]}


@dataclass(frozen=True)
class CodecTimes:
    """The milliseconds of each turn, from the first one on, which warms up; the size of the payloads, and their error.

    `copy_ms` are the times to copy the vectors into warm memory. `relative_error` is ||decoded - x|| / ||x||.
    """

    copy_ms: list[float]
    encode_ms: list[float]
    decode_add_ms: list[float]
    payload_bytes: int
    relative_error: float


def measure_codec(
    bound: BoundCodec, xs: Sequence[Vector], turns: int, slow_ms: float = math.inf, slow_turns: int = 0
) -> CodecTimes:
    """Copy, encode, decode and add the segments `xs` by turns: a machine that gets slower gets slower for all three.

    There are at most `slow_turns` if the first encode takes more than `slow_ms`. Making the encoder's state is not
    timed.
    """
    given = [np.empty_like(x) for x in xs]  # encode may overwrite them
    copy_ms, encode_ms, add_ms = list[float](), list[float](), list[float]()
    payloads = list[bytes]()
    while len(copy_ms) < turns:
        began = time.perf_counter()
        for mine, x in zip(given, xs, strict=True):
            np.copyto(mine, x)
        copied = time.perf_counter()
        states = [bound.init(i) for i in range(len(xs))]
        for array in (array for state in states for array in state.values()):
            array += 0  # zeros that were never touched have no memory yet
        ready = time.perf_counter()
        payloads = [bound.encode(given[i], states[i], Key(1), i).payload for i in range(len(xs))]
        encoded = time.perf_counter()
        for i, payload in enumerate(payloads):
            bound.decode_add(payload, 0.5, given[i], segment=i)
        add_ms.append(1000 * (time.perf_counter() - encoded))
        copy_ms.append(1000 * (copied - began))
        encode_ms.append(1000 * (encoded - ready))
        turns = min(turns, slow_turns) if encode_ms[0] > slow_ms else turns
    lost = whole = 0.0
    for i, x in enumerate(xs):
        decoded = bound.decode(payloads[i], i)
        for a, b in blocks(x.size):
            lost += float(((decoded[a:b] - x[a:b]).astype(np.float64) ** 2).sum())
            whole += float((x[a:b].astype(np.float64) ** 2).sum())
    error = float(np.sqrt(lost / whole)) if whole else 0.0
    return CodecTimes(copy_ms, encode_ms, add_ms, sum(map(len, payloads)), error)
