"""The catalog of codecs: role, kind, bits and paper of each name in a chain, and measurements on this machine.

`described` reads all of it from the code itself. `trials` encodes and decodes normal values and reports milliseconds,
bits and error, next to the time of a plain copy.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from thinwire.compression.base import BoundCodec, Codec, Contractive, ErrorBound, Unbiased
from thinwire.compression.feedback import feedback
from thinwire.compression.registry import steps
from thinwire.compression.spec import ALIASES, parse
from thinwire.compression.vector_ops import blocks
from thinwire.core.errors import CodecError, UsageError
from thinwire.core.layout import Layout
from thinwire.core.prng import Key
from thinwire.core.types import State, Vector

ROLES = ("quantizer", "sparsifier", "lowrank", "coder")
SIDE = 256
SAMPLE = SIDE * SIDE  # normal values in a square matrix, on which the bits are counted
ALIAS_EXAMPLES = {"dgc": "dgc(0.001)", "stc": "stc(0.01)", "fedpaq": "fedpaq(4)"}
PAPER = re.compile(r"([A-Z][\w-]+(?: et al\.|,? [A-Z]\w+ and [A-Z]\w+| and [A-Z]\w+)?),? \(?(\d{4})\b")


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
            text = inspect.getdoc(step) or ""
            example = parse(step.examples[0]).spec
            rows.append(_row(name, step.role, example, papers(text), text.split("\n", maxsplit=1)[0]))
        except CodecError as error:
            broken.append(_broken(name, f"{error.what}: {error.why}"))
        except Exception as error:  # another package's code may raise anything
            broken.append(_broken(name, f"{type(error).__name__}: {error}"))
    rows.sort(key=lambda row: ROLES.index(row.role))
    rows += broken
    for name, (stands_for, text) in ALIASES.items():
        example = ALIAS_EXAMPLES.get(name, name)
        rows.append(_row(name, "alias", example, papers(text), text, stands_for.format("_")))
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


def worded(kind: ErrorBound) -> str:
    """Return a kind as text.

    >>> worded(Contractive(0.01))
    'contractive, delta 0.01'
    """
    if isinstance(kind, Unbiased):
        return f"unbiased, omega {kind.omega:.3g}"
    return f"contractive, delta {kind.delta:.3g}" if isinstance(kind, Contractive) else "residual only"


def papers(text: str) -> str:
    """Return the authors with a year in a docstring.

    >>> papers("QSGD (Alistarh et al. 2017) as in Strom (2015)")
    'Alistarh et al. 2017; Strom 2015'
    """
    return "; ".join(dict.fromkeys(f"{who} {year}" for who, year in PAPER.findall(text)))


def as_json(row: CodecInfo) -> dict[str, Any]:
    """Return the row as a JSON object."""
    return dict(vars(row))


MOST_PARAMS = 200_000_000  # the largest model of an aggregator with 24 GiB
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
    if not 1 <= params <= MOST_PARAMS:
        raise UsageError(
            f"{params} parameters cannot be tried",
            why=f"1 to {MOST_PARAMS} fit a device and its aggregator",
            hint="--params 1000000",
        )
    layout = Layout.of(_shapes(params))
    draw = np.random.default_rng(1)
    xs = [draw.standard_normal(segment.size, np.float32) for segment in layout.segments]
    copies = [np.empty_like(x) for x in xs]
    copy_ms = sum(best(partial(np.copyto, to, x)) for to, x in zip(copies, xs, strict=True))
    found = [_trial(codec.bind(layout), xs, copies, copy_ms, fed=False)]
    try:
        found.append(_trial(feedback(codec).bind(layout), xs, copies, copy_ms, fed=True))
    except CodecError as error:
        found.append(Measurement(feedback=True, params=params, memcpy_ms=copy_ms, refused=f"{error.what}: {error.why}"))
    return found


def _shapes(params: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a nearly square matrix, which a low rank can factor, and of the remaining values.

    >>> _shapes(50_000)
    {'w': (224, 223), 'b': (48,)}
    """
    side = math.isqrt(params)
    rows, rest = divmod(params, side)
    return {name: shape for name, shape in (("w", (rows, side)), ("b", (rest,))) if shape[0]}


def _trial(bound: BoundCodec, xs: list[Vector], given: list[Vector], copy_ms: float, fed: bool) -> Measurement:
    """Return one measurement. `given` holds buffers for donated vectors; filling them is not timed."""
    encode_ms, states, payloads = 0.0, [], []
    for segment, (x, mine) in enumerate(zip(xs, given, strict=True)):
        state: State = bound.init(segment)
        times = []
        for _ in range(TRIES):
            np.copyto(mine, x)
            fresh = {name: array.copy() for name, array in state.items()}
            began = time.perf_counter()
            encoded = bound.encode(mine, fresh, Key(1), segment)
            times.append(1000 * (time.perf_counter() - began))
        encode_ms += min(times)
        states.append(state)
        payloads.append(encoded.payload)
    decode_ms, lost, whole = 0.0, 0.0, 0.0
    for segment, (x, into) in enumerate(zip(xs, given, strict=True)):
        payload = payloads[segment]
        decode_ms += best(partial(bound.decode_add, payload, 1.0, into, segment=segment))
        decoded = bound.decode(payload, segment)
        for a, b in blocks(x.size):
            lost += float(((decoded[a:b] - x[a:b]).astype(np.float64) ** 2).sum())
            whole += float((x[a:b].astype(np.float64) ** 2).sum())
    params = sum(x.size for x in xs)
    bits = 8 * sum(map(len, payloads)) / params
    error = float(np.sqrt(lost / whole)) if whole else 0.0
    return Measurement(fed, params, copy_ms, encode_ms, decode_ms, bits, error)


def best(work: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest of `TRIES` calls, after one to warm up."""
    work()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)
