"""The model that was sent last, read and decoded once for all sessions of a process that are sent it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation import encode_buffers, float_buffers
from thinwire.aggregation.control_variates import Algorithm, algorithm_of, carried, followed
from thinwire.aggregation.downlink import FULL, Shadow, is_number
from thinwire.aggregation.mean import buffer_codec
from thinwire.aggregation.plan_codecs import encoder
from thinwire.client.errors import CannotAnswer
from thinwire.client.run_state import RunState
from thinwire.compression import parse
from thinwire.compression.feedback import MOMENTUM, REFERENCE, RESIDUAL, BoundFeedback, inside
from thinwire.core.errors import BadPayload, NonFiniteUpdate
from thinwire.core.layout import Layout, Segment
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.prng import Key
from thinwire.core.types import Ask, Part, Payload, State, Vector


class Bases:
    """Law: `take` does what `take_base` does. It keeps one model, so it is for many sessions and not for a device."""

    def __init__(self) -> None:
        self._sent: tuple[int, str, tuple[Part, ...]] | None = None
        self._params: Vector | None = None
        self._buffers: Vector | None = None

    def take(self, ask: Ask, bundle: Path | None, shadow: Shadow) -> Vector | None:
        sent = ask.base_version, ask.base_digest, ask.parts
        if sent == self._sent and self._params is not None:
            shadow.params, shadow.version = self._params, ask.base_version
            return self._buffers
        buffers = take_base(ask, bundle, shadow)
        if _whole(ask.parts):
            self._sent, self._params, self._buffers = sent, shadow.params, buffers
        return buffers


def _whole(parts: tuple[Part, ...]) -> bool:
    """Whether they are the same model for everybody, whichever he holds."""
    kinds = {part.name.partition("/")[0] for part in parts}
    return FULL in kinds and kinds <= {FULL, BUFFERS}


# From a change to an update's frames, and to what the device carries on to its next one.


PLACES = {RESIDUAL: "residual", REFERENCE: "residual", MOMENTUM: "momentum"}  # a codec's array -> the state's vector


def encode(
    change: Vector, state: RunState, spec: str, uplink: UplinkSection, layout: Layout, key: Key, round_number: int = 0
) -> tuple[list[Payload], RunState]:
    """The frame of each segment of the model, and the state after it. `change` is donated; `state` is only read.

    The residual is first aged by the rounds since the last encode. What `spec` knows of the last codec's own memory,
    by name and size, it goes on with: the rest of that is forgotten, the residual never.
    """
    codec, payloads, own = encoder(spec, uplink, layout), list[Payload](), dict[str, NDArray[Any]]()
    whole: dict[str, Vector] = {}
    for segment in layout.model_segments:
        held = _held(codec.init(segment.index), state, segment.index, segment.span)
        if isinstance(codec, BoundFeedback):
            held = codec.aged(held, uplink.feedback_decay, round_number - state.encoded_at)
        encoded = codec.encode(change[segment.span], held, key, segment.index)
        payloads.append(encoded.payload)
        for name, array in encoded.state.items():
            if name not in PLACES:
                own[f"{segment.index}/{name}"] = array
                continue
            into = whole.get(PLACES[name])
            if into is None:  # the change's own memory becomes the residual or the reference: one vector less
                into = whole[PLACES[name]] = np.empty(change.size, np.float32) if name == MOMENTUM else change
            if array.base is not into and array is not into:
                into[segment.span] = array
    made = replace(
        state, residual=whole.get("residual"), momentum=whole.get("momentum"), memory=own, encoded_at=round_number
    )
    return payloads, made


def _held(fresh: State, state: RunState, segment: int, span: slice) -> State:
    """What the codec begins with: of its arrays those that the state has."""
    held = dict(fresh)
    for name in fresh:
        kept: Mapping[str, Vector | None] = {"residual": state.residual, "momentum": state.momentum}
        if name not in PLACES:
            held[name] = state.memory.get(f"{segment}/{name}", fresh[name])
        elif (vector := kept[PLACES[name]]) is not None:
            held[name] = vector[span]
    return held


# Between frames and vectors: an ask's parts to the base model, a change to an answer's parts.


BUFFERS = "buffers"
OTHER_TENSORS = "this device's model has other tensors than the run's"
NORM_BLOCK = 1 << 16


def require_parts(ask: Ask, plan: RunPlan, model: Layout) -> None:
    """Raise `CannotAnswer` for announced parts that a model of this layout never needs; nothing of them need be here.

    Each part is at most what its codec can come to, and all of them what the model in full and its buffers do: an
    aggregator sends changes only where they are shorter (aggregation/downlink.py, `way`).
    """
    if not ask.parts:
        return
    if ask.kind not in ("train", "evaluate"):
        raise CannotAnswer("protocol", f"an assignment of the kind {ask.kind} has no parts, and {len(ask.parts)} came")
    if ask.layout_digest != model.digest:
        raise CannotAnswer("layout-mismatch", OTHER_TENSORS)
    layout, down = carried(algorithm_of(plan), model), plan.downlink
    buffers = buffer_codec(model).max_bytes() if float_buffers(model) else 0
    full, change = (parse(spec).bind(layout).max_bytes for spec in ("identity", down.codec))
    full_bytes = [full(segment.index) for segment in layout.segments]
    change_bytes = [change(segment.index) for segment in layout.segments] if down.compressed else []
    most = len(full_bytes) * (down.log_rounds if down.compressed else 1) + 1
    if len(ask.parts) > most or len({part.name for part in ask.parts}) < len(ask.parts):
        raise CannotAnswer(
            "protocol", f"{len(ask.parts)} parts are announced; this model has at most {most}, each once"
        )
    for part in ask.parts:
        allowed = buffers if part.name == BUFFERS else _most_bytes(part.name, full_bytes, change_bytes)
        if part.length > allowed:
            said = f"part {part.name[:40]} of {part.length:,} bytes is announced; this layout needs at most {allowed:,}"
            raise CannotAnswer("protocol", said)
    if (total := sum(part.length for part in ask.parts)) > (allowed := sum(full_bytes) + 2 * buffers):
        said = f"parts of {total:,} bytes in all are announced; this layout needs at most {allowed:,}"
        raise CannotAnswer("protocol", said)


def _most_bytes(name: str, full: Sequence[int], changes: Sequence[int]) -> int:
    """The largest frame that a part of this name can be; 0 where no part is called so."""
    way, _, index = name.partition("/")
    sizes = full if way == FULL else changes if is_number(way) else []
    return sizes[int(index)] if is_number(index) and int(index) < len(sizes) else 0


def parts_of(bundle: Path | None, parts: Sequence[Part]) -> Iterator[tuple[str, Payload]]:
    """(name, bytes) of each part, one at a time in memory; `BadPayload` for one that is not what its head says."""
    if not parts:
        return
    if bundle is None:
        raise BadPayload("an ask without its parts")
    with open(bundle, "rb") as file:
        for part in parts:
            data = file.read(part.length)
            if len(data) != part.length or hashlib.sha256(data).hexdigest() != part.sha256:
                raise BadPayload(f"the part {part.name} arrived damaged", why="its digest differs")
            yield part.name, data


def take_base(ask: Ask, bundle: Path | None, shadow: Shadow) -> Vector | None:
    """Bring the shadow to the ask's version; gives the float buffers that came with it. BadPayload: it is not that."""
    buffers: list[Vector] = []

    def frames() -> Iterator[tuple[str, Payload]]:
        for name, data in parts_of(bundle, ask.parts):
            if name == BUFFERS:
                buffers.append(buffer_codec(shadow.layout).decode(data))
            else:
                yield name, data

    try:
        shadow.apply(frames(), ask.base_version, ask.base_digest)
    except (ValueError, IndexError) as error:
        raise BadPayload("the model's parts are not those of this layout") from error
    return buffers[0] if buffers else None


def refund(
    bundle: Path | None,
    parts: Sequence[Part],
    spec: str,
    layout: Layout,
    residual: Vector | None,
    sign: float = 1.0,
    segments: Sequence[Segment] = (),
) -> Vector:
    """The residual with a dropped update put back: what was decoded from its frames, and nothing of its buffers.

    `sign` is -1 for what was moved by what was sent: ef21's reference, and what SCAFFOLD or FedDyn follows. `segments`
    are those that the vector is of; default: all.
    """
    wanted = {segment.index: segment for segment in segments or layout.segments}
    start, stop = min(s.start for s in wanted.values()), max(s.stop for s in wanted.values())
    back: Vector = residual.copy() if residual is not None else np.zeros(stop - start, np.float32)
    codec = parse(spec).bind(layout)
    for name, data in parts_of(bundle, parts):
        if name == BUFFERS or (segment := wanted.get(int(name.partition("/")[2]))) is None:
            continue
        codec.decode_add(data, sign, back[segment.start - start : segment.stop - start], segment=segment.index)
    return back


def packed(payloads: Sequence[Payload], layout: Layout, buffers: Vector | None) -> tuple[tuple[Part, ...], bytes]:
    """An answer's parts and its body: a frame for each segment, then the buffers where there are any to send."""
    named = [(f"frame/{index}", payload) for index, payload in enumerate(payloads)]
    if buffers is not None and float_buffers(layout):
        if not np.isfinite(buffers).all():
            raise NonFiniteUpdate(
                "a buffer holds NaN or infinity", why="training diverged", hint="a smaller [local] lr"
            )
        named.append((BUFFERS, encode_buffers(layout, buffers)))
    parts = tuple(Part(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in named)
    return parts, b"".join(data for _, data in named)


def norm(vector: Vector | None) -> float:
    """L2 in float64, block by block: the square of a large float32 is none any more.

    Without BLAS, whose threads wait for each other where training has the cores: 0.2 s instead of 1 ms was seen.
    """
    if vector is None:
        return 0.0
    blocks = (vector[at : at + NORM_BLOCK] for at in range(0, vector.size, NORM_BLOCK))
    return float(np.sqrt(sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)))


# What a device does for SCAFFOLD or FedDyn around its training: a correction before it, a second sum after it.


@dataclass(frozen=True)
class Following:
    """What SCAFFOLD or FedDyn needs for one ask: `own`, the sum of what was sent until now, and `common`, the mean of
    all devices' that came with the ask; None where `own` is not in it yet, or where none came.

    Law: `own` moves by what its frames decode to, which is what the aggregator adds: both ends know it whatever the
    codec leaves out, and that is a part of the next difference.
    """

    algorithm: Algorithm
    layout: Layout  # of what travels
    own: Vector
    common: Vector | None

    @classmethod
    def of(cls, algorithm: Algorithm, layout: Layout, own: Vector | None, params: Vector, counted: bool) -> Following:
        """`own` None: nothing was sent yet. `params` is what came. `counted`: whether this device is in the mean there;
        one without it may have in it who was shut out.
        """
        own = np.zeros(layout.model_size, np.float32) if own is None else own
        given = algorithm.control and counted
        return cls(algorithm, layout, own, params[layout.model_size :] if given else None)

    @property
    def shift(self) -> Vector:
        return self.algorithm.shift(self.own, self.common)

    def differences(self, change: Vector, spec: str, key: Key) -> list[Payload]:
        """The frames behind the model's, where there are any, of a change that is divided by its normaliser."""
        if (wanted := self.algorithm.wanted(self.own, self.common, change)) is None:
            return []
        wanted -= self.own
        codec, start = inside(parse(spec), self.layout), self.layout.model_size
        return [
            codec.encode(wanted[s.start - start : s.stop - start], codec.init(s.index), key, s.index).payload
            for s in self.layout.control_segments
        ]

    def moved(self, frames: list[Payload], spec: str) -> Vector:
        """The sum with an update's frames in it."""
        made, segments, codec = self.own.copy(), followed(self.algorithm, self.layout), parse(spec).bind(self.layout)
        start = segments[0].start
        for s in segments:
            codec.decode_add(frames[s.index], 1.0, made[s.start - start : s.stop - start], segment=s.index)
        return made
