"""What a codec costs on this machine: milliseconds there and back, bits, and error, with a plain copy beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from thinwire.aggregation.codec import BoundCodec, Codec
from thinwire.aggregation.feedback import feedback
from thinwire.aggregation.vectors import blocks
from thinwire.core.errors import CodecError, UsageError
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.types import State, Vector

MOST_PARAMS = 200_000_000  # design, section 6: what an aggregator of 24 GiB takes
TRIES = 3


@dataclass(frozen=True)
class Trial:
    """One way of encoding `params` normal values; times are the best of `TRIES`, in ms of one thread or the plan's.

    `relative_error`: ||decoded - x|| / ||x||. `memcpy_ms`: copying the vector into warm memory in the same run.
    `refused`: why there is nothing to measure.
    """

    feedback: bool
    params: int
    memcpy_ms: float
    encode_ms: float | None = None
    decode_ms: float | None = None
    bits_per_param: float | None = None
    relative_error: float | None = None
    refused: str = ""


def trials(codec: Codec, params: int) -> list[Trial]:
    """Without feedback and with it."""
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
        found.append(Trial(feedback=True, params=params, memcpy_ms=copy_ms, refused=f"{error.what}: {error.why}"))
    return found


def _shapes(params: int) -> dict[str, tuple[int, ...]]:
    """A matrix that is nearly square, so that low rank finds one, and what is left over.

    >>> _shapes(50_000)
    {'w': (224, 223), 'b': (48,)}
    """
    side = math.isqrt(params)
    rows, rest = divmod(params, side)
    return {name: shape for name, shape in (("w", (rows, side)), ("b", (rest,))) if shape[0]}


def _trial(bound: BoundCodec, xs: list[Vector], given: list[Vector], copy_ms: float, fed: bool) -> Trial:
    """`given`: buffers for what is donated; their filling is not timed."""
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
    return Trial(fed, params, copy_ms, encode_ms, decode_ms, bits, error)


def best(work: Callable[[], object]) -> float:
    """Milliseconds of the quickest of `TRIES` and one to warm up."""
    work()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)
