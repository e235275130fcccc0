"""The streaming weighted mean: each update is added as it comes, so memory does not grow with the clients.

With d_i = change_i / a_i from each client, p_i = examples_i / all examples and staleness discounts s_i:

    change = (sum_j p_j a_j) * sum_i p_i s_i d_i          (FedNova, Wang et al. 2020)

The discount stands in the sum only: a stale update moves the model less, it does not make the others move it more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thinwire.compression.base import BoundCodec
from thinwire.compression.segmented import Bound
from thinwire.compression.spec import parse
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.layout import SEGMENT_FLOATS, Layout, Tensor
from thinwire.core.prng import Key
from thinwire.core.types import Arrived, Fixed, Payload, Vector

Frames = Callable[[], Iterator[Arrived]]


class WeightedMean:
    """A tally of one round. An update is folded wholly or not at all: its frames are checked before one is added."""

    def __init__(self, codec: BoundCodec, layout: Layout) -> None:
        self.codec, self.layout = codec, layout
        self.total: Vector = np.zeros(layout.size, np.float32)
        self.examples = 0
        self.normaliser = 0.0  # sum of examples_j * a_j
        self.count = 0

    def fold(self, frames: Frames, examples: int, discount: float, a: float) -> None:
        """Add one update; `frames` gives them in the order of segments, each time. BadPayload changes nothing."""
        if not (examples > 0 and discount >= 0 and a > 0 and np.isfinite([examples, discount, a]).all()):
            raise BadPayload(f"an update of {examples} examples, a = {a}", why="both are finite and above 0")
        weight = examples * discount
        *others, last = self.layout.segments
        payload = self._last(frames)
        # It is checked before it is added, and was the only one that is not checked yet: a model of one segment is
        # read once.
        self.codec.decode_add(payload, weight, self.total[last.span], segment=last.index)
        try:
            for segment, payload in zip(others, frames(), strict=False):
                self.codec.decode_add(payload, weight, self.total[segment.span], segment=segment.index)
        except (
            BadPayload
        ) as error:  # they were whole a moment ago, and now the sum is half changed: no such update is dropped
            raise DataLost("an update changed while it was added", why=str(error)) from error
        self.examples += examples
        self.normaliser += examples * a
        self.count += 1

    def _last(self, frames: Frames) -> Arrived:
        """The last segment's frame; BadPayload unless there is one for each, and all before it are whole and legal."""
        segments, found = self.layout.segments, 0
        payload: Arrived = b""
        for found, payload in enumerate(frames(), 1):
            if found < len(segments):
                self.codec.check(payload, found - 1)
        if found != len(segments):
            raise BadPayload(f"an update of {found} frames", why=f"the model has {len(segments)} segments")
        return payload

    def copy(self) -> WeightedMean:
        """The same tally, which goes on by itself."""
        made = copy(self)
        made.total = self.total.copy()
        return made

    def close(self) -> Vector | None:
        """The mean change, or None when nothing was folded. The tally's own memory is given away."""
        if self.examples == 0:
            return None
        self.total *= np.float32(self.normaliser / self.examples / self.examples)
        return self.total

    def memory(self, clients: int) -> float:
        """In models, for any number of clients: the sum, and one segment that is being read."""
        del clients
        return 1.0 + min(1.0, SEGMENT_FLOATS / max(1, self.layout.size))


# Buffers that are not trained: running means and variances, counters, and those that nothing changes.
#
# Means are averaged by weight; a variance by the law of total variance, with the mean beside it; integers by maximum.
# They travel as one frame of float32, whatever the update's codec: a mean of 101,325 with a deviation of 50, or a
# small value beside a large one, would be lost in fewer bits. Their bytes are counted like all others. Buffers of
# several integers or bools, of complex numbers, or of floats that are not all finite, are fixed: every client makes
# them, the layout's digest holds their values, and the aggregator keeps one copy beside the run's models for the
# exported file.


MEAN, VARIANCE = "running_mean", "running_var"
MAX_SPREAD = 2.0**120  # of a variance, and of a mean's square that is added to one: 2^7 of them are still a float32
WIDE_BITS = 32  # of an integer that is counted up without an end: half of its range is left to count on in
DIGEST = hashlib.sha256().digest_size


def float_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """The buffers that are averaged, in their order: one flat float32 vector."""
    return tuple(t for t in layout.buffers if t.dtype.startswith(("float", "bfloat")))


def float_values(layout: Layout, buffers: Vector) -> list[tuple[Tensor, Vector]]:
    """Each float buffer with its place in the buffers' vector, which holds nothing else."""
    found = float_buffers(layout)
    ends = np.cumsum([0, *(t.size for t in found)])
    return [(t, buffers[start : start + t.size]) for t, start in zip(found, ends[:-1], strict=True)]


def counters(layout: Layout) -> tuple[Tensor, ...]:
    """Integer buffers of one element: they travel as plain numbers."""
    return tuple(t for t in layout.buffers if not t.dtype.startswith(("float", "bfloat", "complex")) and t.size == 1)


def fixed_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """All other buffers: training may not change them."""
    others = {*layout.buffers} - {*float_buffers(layout), *counters(layout)}
    return tuple(t for t in layout.tensors if t.role == "fixed" or t in others)


def kept_type(t: Tensor) -> str:
    """The numpy type that holds this tensor's values; small floats that numpy lacks become float32."""
    return "float32" if t.dtype.startswith(("bfloat", "float8", "float4")) else t.dtype


def pack_fixed(values: Fixed) -> bytes:
    """Fixed tensors as safetensors behind a SHA-256; no bytes where there are none."""
    kept = save({name: np.ascontiguousarray(array) for name, array in values.items()})
    return hashlib.sha256(kept).digest() + kept if values else b""


def unpack_fixed(layout: Layout, data: bytes) -> Fixed:
    """Read what `pack_fixed` packed; BadPayload when it does not hold this layout's fixed buffers, whole."""
    if data and hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        raise BadPayload("the fixed tensors are damaged", why="their digest differs")
    try:
        found = load(data[DIGEST:]) if data else {}
    except SafetensorError as error:
        raise BadPayload("the fixed tensors are no safetensors", why=str(error)) from error
    fixed, frozen = fixed_buffers(layout), layout.of_role("frozen")
    wrong = [name for name in found if name not in {t.name for t in (*fixed, *frozen)}]
    wrong += [t.name for t in fixed if t.name not in found or found[t.name].dtype != kept_type(t)]
    wrong += [t.name for t in (*fixed, *frozen) if t.name in found and found[t.name].shape != t.shape]
    if wrong:
        raise BadPayload("the fixed tensors are not those of this layout", why=f"{wrong[0][:80]} is missing or another")
    return found


def buffer_layout(layout: Layout) -> Layout:
    """The averaged buffers as a layout of their own."""
    return Layout.of({t.name: t.shape for t in float_buffers(layout)})


def buffer_codec(layout: Layout) -> Bound:
    """The codec of all averaged buffers, up and down."""
    return parse("identity").bind(buffer_layout(layout))


def encode_buffers(layout: Layout, values: Vector) -> Payload:
    """Encode all averaged buffers as one frame (they must fit into one segment of 64 MiB)."""
    codec = buffer_codec(layout)
    return codec.encode(np.ascontiguousarray(values, np.float32), codec.init(), Key(0)).payload


class BufferMean:
    """The weighted mean of clients' buffers.

    Sums are of differences from the first client's values: a buffer that all clients have alike keeps its bits, and
    the spread of large means does not drown in their squares.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = buffer_layout(layout)
        self.codec = buffer_codec(layout)
        self.counted = {t.name: t.dtype for t in counters(layout)}
        self.first: NDArray[np.float64] | None = None
        self.total = np.zeros(self.layout.size)
        self.squares = np.zeros(self.layout.size)  # of the means' differences, where variances stand
        self.weight = 0.0
        self.counters: dict[str, int] = {}
        self._pairs = list(self._variances())

    def _variances(self) -> list[tuple[slice, slice]]:
        """(variance, its mean) as places in the flat vector."""
        places = {t.name: slice(t.offset, t.offset + t.size) for t in self.layout.trained}
        named = {name: name.removesuffix(VARIANCE) + MEAN for name in places if name.endswith(VARIANCE)}
        return [(places[var], places[mean]) for var, mean in named.items() if mean in places]

    def check(self, payload: Arrived, weight: float = 1.0) -> None:
        """BadPayload when it is not these buffers, or no mean that they are part of could be this model's."""
        if not self.layout.size:
            raise BadPayload("buffers of a model that has none")
        values = self.codec.decode(payload).astype(np.float64)
        for tensor in self.layout.trained:
            self._require(tensor, values[tensor.offset : tensor.offset + tensor.size])
        with np.errstate(over="ignore", invalid="ignore"):
            apart = values if self.first is None else values - self.first
            if not np.isfinite(self.total + weight * apart).all():
                raise BadPayload("buffers too large to be added", why=f"their weight is {weight:g}")

    def _require(self, tensor: Tensor, values: NDArray[np.float64]) -> None:
        """BadPayload for values that a running variance cannot have, or whose spread over devices it could not hold."""
        if not tensor.size or not tensor.name.endswith((MEAN, VARIANCE)):
            return  # they are finite, and so is their mean
        least, most = float(values.min()), float(values.max())
        if tensor.name.endswith(VARIANCE):
            if least < 0 or most > MAX_SPREAD:
                found = least if least < 0 else most
                raise BadPayload(f"{tensor.name} holds {found:g}", why=f"a variance lies in 0..{MAX_SPREAD:g}")
        elif max(-least, most) ** 2 > MAX_SPREAD:
            found = least if -least > most else most
            raise BadPayload(f"{tensor.name} holds {found:g}", why=f"a mean's square is at most {MAX_SPREAD:g}")

    def fold(self, payload: Arrived, weight: float) -> None:
        """Add what `check` found to be right."""
        values = self.codec.decode(payload).astype(np.float64)
        if self.first is None:
            self.first = values
        apart = values - self.first
        self.total += weight * apart
        for variance, mean in self._pairs:
            self.squares[variance] += weight * apart[mean] ** 2
        self.weight += weight

    def check_counters(self, seen: Mapping[str, int], before: Mapping[str, int]) -> None:
        """BadPayload for a value that its integer buffer cannot hold or count on from; `before`: what they were."""
        for name, value in seen.items():
            if name not in self.counted or value == before.get(name):
                continue
            least, most = _bounds(self.counted[name])
            if not least <= value <= most:
                raise BadPayload(f"{name} = {value}", why=f"one of {self.counted[name]} lies in {least}..{most}")

    def count(self, seen: Mapping[str, int]) -> None:
        """Integer buffers: the largest value counts; names that the model does not have are ignored."""
        for name, value in seen.items():
            if name in self.counted:
                self.counters[name] = max(value, self.counters.get(name, value))

    def copy(self) -> BufferMean:
        """The same mean so far, which goes on by itself."""
        made = copy(self)
        made.total, made.squares, made.counters = self.total.copy(), self.squares.copy(), dict(self.counters)
        return made

    def close(self, before: Vector) -> Vector:
        """The mean; `before` where nothing was folded. Var = E[var + mean^2] - E[mean]^2."""
        if self.first is None or self.weight == 0:
            return before
        apart = self.total / self.weight
        mean = np.where(apart == 0, self.first, self.first + apart)  # -0.0 + 0.0 is 0.0
        for variance, place in self._pairs:
            spread = self.squares[variance] / self.weight - apart[place] ** 2
            mean[variance] = np.where(spread > 0, mean[variance] + spread, mean[variance])
        return mean.astype(np.float32)


def _bounds(dtype: str) -> tuple[int, int]:
    """The least and the most that a device may make of an integer buffer."""
    if dtype == "bool":
        return 0, 1
    kind = np.iinfo(dtype) if dtype.startswith(("int", "uint")) else np.iinfo("int64")
    share = 2 if kind.bits >= WIDE_BITS else 1
    return int(kind.min) // share, int(kind.max) // share
