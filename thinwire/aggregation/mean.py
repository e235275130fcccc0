"""The streaming weighted mean of updates and of buffers: each update is added as it arrives.

Memory does not grow with the number of clients. With d_i = update_i / a_i from each client, p_i = examples_i / all
examples and staleness discounts s_i:

    change = (sum_j p_j a_j) * sum_i p_i s_i d_i          (FedNova, Wang et al. 2020)

The discount is in the sum only: a stale update moves the model less and does not make the others move it more.

Buffers are tensors that are not trained: running means and variances, counters, and constants. Means are averaged by
weight, variances by the law of total variance with their means, and integers by maximum. The averaged buffers travel as
one frame of float32, whatever the update's codec. Fewer bits would lose a mean of 101,325 with a deviation of 50, or a
small value next to a large one. Their bytes count like all others.

All other buffers are fixed: several integers or bools, complex numbers, and floats that are not all finite. Every
client makes them, and the layout's digest covers their values. The aggregator keeps one copy with the run's models for
the exported file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thinwire.compression.base import BoundCodec
from thinwire.compression.chain import SegmentedCodec
from thinwire.compression.spec import parse
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.layout import Layout, Tensor
from thinwire.core.prng import Key
from thinwire.core.types import Arrived, Fixed, Payload, Vector

Frames = Callable[[], Iterator[Arrived]]


class WeightedMean:
    """The weighted mean of one round.

    Invariant: an update is added completely or not at all, because all its frames are checked before one is added.
    """

    def __init__(self, codec: BoundCodec, layout: Layout) -> None:
        self.codec, self.layout = codec, layout
        self.total: Vector = np.zeros(layout.size, np.float32)
        self.examples = 0
        self.normaliser = 0.0  # sum of examples_j * a_j
        self.count = 0

    def fold(self, frames: Frames, examples: int, discount: float, a: float) -> None:
        """Add one update; BadPayload changes nothing.

        `frames` is called more than once and gives the frames in the order of segments. `discount` is the staleness
        discount and `a` the normaliser a_i. Raise DataLost if a frame changed between its check and its addition: the
        sum is half changed then.
        """
        if not (examples > 0 and discount >= 0 and a > 0 and all(map(math.isfinite, (examples, discount, a)))):
            raise BadPayload(f"an update of {examples} examples, a = {a}", why="both are finite and above 0")
        weight = examples * discount
        *others, last = self.layout.segments
        payload = self._last(frames)
        # `decode_add` checks this frame before it adds it. No other frame is unchecked, and a model of one segment is
        # read only once.
        self.codec.decode_add(payload, weight, self.total[last.span], segment=last.index)
        try:
            for segment, payload in zip(others, frames(), strict=False):
                self.codec.decode_add(payload, weight, self.total[segment.span], segment=segment.index)
        except BadPayload as error:  # the frames were checked, and the sum is half changed: it is too late for a drop
            raise DataLost("an update changed while it was added", why=str(error)) from error
        self.examples += examples
        self.normaliser += examples * a
        self.count += 1

    def _last(self, frames: Frames) -> Arrived:
        """Return the frame of the last segment, after a check of all frames before it.

        Raise BadPayload unless there is one frame for each segment.
        """
        segments, count = self.layout.segments, 0
        payload: Arrived = b""
        for count, payload in enumerate(frames(), 1):
            if count < len(segments):
                self.codec.check(payload, count - 1)
        if count != len(segments):
            raise BadPayload(f"an update of {count} frames", why=f"the model has {len(segments)} segments")
        return payload

    def copy(self) -> WeightedMean:
        """Return an independent copy."""
        made = copy(self)
        made.total = self.total.copy()
        return made

    def close(self) -> Vector | None:
        """Return the mean change, or None if there was no update. The caller owns the vector: this mean is finished."""
        if self.examples == 0:
            return None
        self.total *= np.float32(self.normaliser / self.examples / self.examples)
        return self.total


MEAN, VARIANCE = "running_mean", "running_var"
MAX_SPREAD = 2.0**120  # the largest variance, and square of a mean: the sum of 2^7 of them is still a finite float32
WIDE_BITS = 32  # integers of so many bits are counters without an end: half of their range is left for counting on
DIGEST = hashlib.sha256().digest_size


def float_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """Return the buffers that are averaged, in their order: together one flat float32 vector."""
    return tuple(t for t in layout.buffers if t.dtype.startswith(("float", "bfloat")))


def float_values(layout: Layout, buffers: Vector) -> list[tuple[Tensor, Vector]]:
    """Return each float buffer with its values in the flat vector of all averaged buffers."""
    averaged = float_buffers(layout)
    ends = np.cumsum([0, *(t.size for t in averaged)])
    return [(t, buffers[start : start + t.size]) for t, start in zip(averaged, ends[:-1], strict=True)]


def counters(layout: Layout) -> tuple[Tensor, ...]:
    """Return the integer buffers of one element, which travel as plain numbers."""
    return tuple(t for t in layout.buffers if not t.dtype.startswith(("float", "bfloat", "complex")) and t.size == 1)


def fixed_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """Return all other buffers, which training may not change."""
    others = {*layout.buffers} - {*float_buffers(layout), *counters(layout)}
    return tuple(t for t in layout.tensors if t.role == "fixed" or t in others)


def kept_type(t: Tensor) -> str:
    """Return the numpy type that holds this tensor's values: float32 for small floats that numpy lacks."""
    return "float32" if t.dtype.startswith(("bfloat", "float8", "float4")) else t.dtype


def pack_fixed(values: Fixed) -> bytes:
    """Return the fixed tensors as safetensors after their SHA-256, or no bytes if there are none."""
    kept = save({name: np.ascontiguousarray(array) for name, array in values.items()})
    return hashlib.sha256(kept).digest() + kept if values else b""


def unpack_fixed(layout: Layout, data: bytes) -> Fixed:
    """Return the fixed tensors that `pack_fixed` packed.

    Raise BadPayload if the data is damaged or does not hold all of this layout's fixed buffers.
    """
    if data and hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        raise BadPayload("the fixed tensors are damaged", why="their digest differs")
    try:
        values = load(data[DIGEST:]) if data else {}
    except SafetensorError as error:
        raise BadPayload("the fixed tensors are no safetensors", why=str(error)) from error
    fixed, frozen = fixed_buffers(layout), layout.of_role("frozen")
    wrong = [name for name in values if name not in {t.name for t in (*fixed, *frozen)}]
    wrong += [t.name for t in fixed if t.name not in values or values[t.name].dtype != kept_type(t)]
    wrong += [t.name for t in (*fixed, *frozen) if t.name in values and values[t.name].shape != t.shape]
    if wrong:
        raise BadPayload("the fixed tensors are not those of this layout", why=f"{wrong[0][:80]} is missing or another")
    return values


def buffer_layout(layout: Layout) -> Layout:
    """Return a layout of the averaged buffers alone."""
    return Layout.of({t.name: t.shape for t in float_buffers(layout)})


def buffer_codec(layout: Layout) -> SegmentedCodec:
    """Return the codec of all averaged buffers, for uplink and downlink."""
    return parse("identity").bind(buffer_layout(layout))


def encode_buffers(layout: Layout, values: Vector) -> Payload:
    """Encode all averaged buffers as one frame; they must fit into one segment of 64 MiB."""
    codec = buffer_codec(layout)
    return codec.encode(np.ascontiguousarray(values, np.float32), codec.init(), Key(0)).payload


class BufferMean:
    """The weighted mean of clients' buffers.

    Sums are of differences from the first client's values. So a buffer that is equal on all clients keeps its bits, and
    the squares of large means do not hide their spread.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = buffer_layout(layout)
        self.codec = buffer_codec(layout)
        self.counted = {t.name: t.dtype for t in counters(layout)}
        self.first: NDArray[np.float64] | None = None
        self.total = np.zeros(self.layout.size)
        self.squares = np.zeros(self.layout.size)  # sums of the means' squared differences, at the variances' indices
        self.weight = 0.0
        self.counters: dict[str, int] = {}
        self._pairs = list(self._variances())

    def _variances(self) -> list[tuple[slice, slice]]:
        """Return (variance, its mean) as slices of the flat vector."""
        places = {t.name: slice(t.offset, t.offset + t.size) for t in self.layout.trained}
        named = {name: name.removesuffix(VARIANCE) + MEAN for name in places if name.endswith(VARIANCE)}
        return [(places[var], places[mean]) for var, mean in named.items() if mean in places]

    def check(self, payload: Arrived) -> None:
        """Raise BadPayload if the payload is not these buffers, or if a mean with them could not be this model's."""
        if not self.layout.size:
            raise BadPayload("buffers of a model that has none")
        values = self.codec.decode(payload).astype(np.float64)  # finite: the codec refuses a frame with other values
        for tensor in self.layout.trained:
            self._require(tensor, values[tensor.offset : tensor.offset + tensor.size])

    def _require(self, tensor: Tensor, values: NDArray[np.float64]) -> None:
        """Raise BadPayload for impossible values of a running variance or mean.

        A variance is at least 0, and it must be able to hold the spread over devices.
        """
        if not tensor.size or not tensor.name.endswith((MEAN, VARIANCE)):
            return  # finite values have a finite mean
        least, most = float(values.min()), float(values.max())
        if tensor.name.endswith(VARIANCE):
            if least < 0 or most > MAX_SPREAD:
                worst = least if least < 0 else most
                raise BadPayload(f"{tensor.name} holds {worst:g}", why=f"a variance lies in 0..{MAX_SPREAD:g}")
        elif max(-least, most) ** 2 > MAX_SPREAD:
            worst = least if -least > most else most
            raise BadPayload(f"{tensor.name} holds {worst:g}", why=f"a mean's square is at most {MAX_SPREAD:g}")

    def fold(self, payload: Arrived, weight: float) -> None:
        """Add buffers that `check` accepted."""
        values = self.codec.decode(payload).astype(np.float64)
        if self.first is None:
            self.first = values
        apart = values - self.first
        self.total += weight * apart
        for variance, mean in self._pairs:
            self.squares[variance] += weight * apart[mean] ** 2
        self.weight += weight

    def check_counters(self, seen: Mapping[str, int], before: Mapping[str, int]) -> None:
        """Raise BadPayload for a value that its integer buffer cannot hold or count on from.

        A value equal to the one in `before` is always accepted.
        """
        for name, value in seen.items():
            if name not in self.counted or value == before.get(name):
                continue
            least, most = _bounds(self.counted[name])
            if not least <= value <= most:
                raise BadPayload(f"{name} = {value}", why=f"one of {self.counted[name]} lies in {least}..{most}")

    def count(self, seen: Mapping[str, int]) -> None:
        """Keep the largest value of each integer buffer; names that the model does not have are ignored."""
        for name, value in seen.items():
            if name in self.counted:
                self.counters[name] = max(value, self.counters.get(name, value))

    def copy(self) -> BufferMean:
        """Return an independent copy."""
        made = copy(self)
        made.total, made.squares, made.counters = self.total.copy(), self.squares.copy(), dict(self.counters)
        return made

    def close(self, before: Vector) -> Vector:
        """Return the mean, or `before` if there were no buffers. Var = E[var + mean^2] - E[mean]^2."""
        if self.first is None or self.weight == 0:
            return before
        apart = self.total / self.weight
        mean = np.where(apart == 0, self.first, self.first + apart)  # -0.0 + 0.0 is 0.0
        for variance, place in self._pairs:
            spread = self.squares[variance] / self.weight - apart[place] ** 2
            mean[variance] = np.where(spread > 0, mean[variance] + spread, mean[variance])
        return mean.astype(np.float32)


def _bounds(dtype: str) -> tuple[int, int]:
    """Return the smallest and the largest value that a device may give an integer buffer."""
    if dtype == "bool":
        return 0, 1
    kind = np.iinfo(dtype) if dtype.startswith(("int", "uint")) else np.iinfo("int64")
    share = 2 if kind.bits >= WIDE_BITS else 1
    return int(kind.min) // share, int(kind.max) // share
