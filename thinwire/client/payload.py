"""Convert between frames and vectors: an assignment's parts to the base model, a raw update to a reply's parts.

`update_replica` decodes the model that came with an assignment. `encode` makes the frames of an update and the state
after it, and `pack_reply` joins them into a reply's body. `restore_update` adds a dropped update to the residual.

`ControlVariate` is what a device does for SCAFFOLD or FedDyn around its training: a correction of the gradient before
it, and a second sum after it. `BaseModelCache` shares one decoded model between all handlers of a process, for
simulations.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation import encode_buffers, float_buffers
from thinwire.aggregation.control_variates import Algorithm, algorithm_of, own_segments, transmitted_layout
from thinwire.aggregation.downlink import FULL, ModelReplica, is_number
from thinwire.aggregation.mean import buffer_codec
from thinwire.aggregation.plan_codecs import encoder, keeps_residual
from thinwire.client.errors import CannotReply
from thinwire.client.run_state import ClientRunState
from thinwire.compression import parse
from thinwire.compression.feedback import MOMENTUM, REFERENCE, RESIDUAL, BoundFeedback, inside, matching_state
from thinwire.core.errors import BadPayload, NonFiniteUpdate
from thinwire.core.layout import Layout, Segment
from thinwire.core.part_file import damaged_part
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import UplinkSection
from thinwire.core.prng import Key
from thinwire.core.records import replace
from thinwire.core.types import Assignment, Part, Payload, State, Vector, Work

UpdateReplica = Callable[[Assignment, Path | None, ModelReplica], Vector | None]
KeepShared = Callable[[Assignment, tuple[str, ...], Vector, Vector | None], None]


class BaseModelCache:
    """Caches the model that was sent last, so that it is decoded once for all handlers of a process.

    It is for simulations: the handlers of a device have nothing to share.

    Invariant: `BaseModelCache.update_replica` has the effect of the function `update_replica`.
    """

    def __init__(self) -> None:
        self._sent: tuple[int, str, tuple[Part, ...]] | None = None
        self._params: Vector | None = None
        self._buffers: Vector | None = None

    def update_replica(self, assignment: Assignment, bundle: Path | None, replica: ModelReplica) -> Vector | None:
        """Bring the replica to the assignment's version; return the float buffers that came with it."""
        sent = assignment.base_version, assignment.base_digest, assignment.parts
        if sent == self._sent and self._params is not None:
            replica.params, replica.version = self._params, assignment.base_version
            return self._buffers
        buffers = update_replica(assignment, bundle, replica)
        if _whole(assignment.parts):
            self._sent, self._params, self._buffers = sent, replica.params, buffers
        return buffers


def _whole(parts: tuple[Part, ...]) -> bool:
    """Return True if the parts are the whole model, which is the same for every client."""
    kinds = {part.name.partition("/")[0] for part in parts}
    return FULL in kinds and kinds <= {FULL, BUFFERS}


PLACES = {RESIDUAL: "residual", REFERENCE: "residual", MOMENTUM: "momentum"}  # a codec's array -> a vector of RunState


def encode(
    raw_update: Vector,
    state: ClientRunState,
    spec: str,
    uplink: UplinkSection,
    layout: Layout,
    key: Key,
    round_number: int = 0,
) -> tuple[list[Payload], ClientRunState]:
    """Return the frame of each segment of the model, and the state after it; `raw_update` is donated.

    The residual first decays with the rounds since the last encode. The codec `spec` reuses those arrays of the last
    codec that have its names and sizes. The other arrays are forgotten; the residual never is.
    """
    codec, payloads, own = encoder(spec, uplink, layout), list[Payload](), dict[str, NDArray[Any]]()
    whole: dict[str, Vector] = {}
    for segment in layout.model_segments:
        before = matching_state(codec.init(segment.index), _codec_state(state, segment))
        if isinstance(codec, BoundFeedback):
            before = codec.aged(before, uplink.feedback_decay, round_number - state.encoded_at)
        encoded = codec.encode(raw_update[segment.span], before, key, segment.index)
        payloads.append(encoded.payload)
        for name, array in encoded.state.items():
            if name not in PLACES:
                own[f"{segment.index}/{name}"] = array
                continue
            into = whole.get(PLACES[name])
            if into is None:  # the raw update's buffer becomes the residual or the reference: one vector less
                into = whole[PLACES[name]] = np.empty(raw_update.size, np.float32) if name == MOMENTUM else raw_update
            if array.base is not into and array is not into:
                into[segment.span] = array
    made = replace(
        state, residual=whole.get("residual"), momentum=whole.get("momentum"), codec_arrays=own, encoded_at=round_number
    )
    return payloads, made


def _codec_state(state: ClientRunState, segment: Segment) -> State:
    """Return the arrays of a run's state that a codec may know, by their names in a codec's state."""
    prefix = f"{segment.index}/"
    found = {name.removeprefix(prefix): a for name, a in state.codec_arrays.items() if name.startswith(prefix)}
    vectors = {RESIDUAL: state.residual, REFERENCE: state.residual, MOMENTUM: state.momentum}
    return {**found, **{name: vector[segment.span] for name, vector in vectors.items() if vector is not None}}


BUFFERS = "buffers"
OTHER_TENSORS = "this device's model has other tensors than the run's"
NORM_BLOCK = 1 << 16


def require_parts(assignment: Assignment, plan: RunPlan, model: Layout) -> None:
    """Raise `CannotReply` for announced parts that a model of this layout never needs. No part has to be here.

    Each part is at most as large as its codec can make it. All together are at most the full model and its buffers,
    because an aggregator sends updates only if they are shorter (aggregation/downlink.py, `way`).
    """
    if not assignment.parts:
        return
    if assignment.kind not in ("train", "evaluate"):
        raise CannotReply(
            "protocol", f"an assignment of the kind {assignment.kind} has no parts, and {len(assignment.parts)} came"
        )
    if assignment.layout_digest != model.digest:
        raise CannotReply("layout-mismatch", OTHER_TENSORS)
    layout, down = transmitted_layout(algorithm_of(plan), model), plan.downlink
    buffers = buffer_codec(model).max_bytes() if float_buffers(model) else 0
    full, change = (parse(spec).bind(layout).max_bytes for spec in ("identity", down.codec))
    full_bytes = [full(segment.index) for segment in layout.segments]
    change_bytes = [change(segment.index) for segment in layout.segments] if down.compressed else []
    most = len(full_bytes) * (down.log_rounds if down.compressed else 1) + 1
    if len(assignment.parts) > most or len({part.name for part in assignment.parts}) < len(assignment.parts):
        raise CannotReply(
            "protocol", f"{len(assignment.parts)} parts are announced; this model has at most {most}, each once"
        )
    for part in assignment.parts:
        allowed = buffers if part.name == BUFFERS else _most_bytes(part.name, full_bytes, change_bytes)
        if part.length > allowed:
            said = f"part {part.name[:40]} of {part.length:,} bytes is announced; this layout needs at most {allowed:,}"
            raise CannotReply("protocol", said)
    if (total := sum(part.length for part in assignment.parts)) > (allowed := sum(full_bytes) + 2 * buffers):
        said = f"parts of {total:,} bytes in all are announced; this layout needs at most {allowed:,}"
        raise CannotReply("protocol", said)


def _most_bytes(name: str, full: Sequence[int], changes: Sequence[int]) -> int:
    """Return the bytes of the largest frame that a part of this name can be; 0 if no part has this name."""
    way, _, index = name.partition("/")
    sizes = full if way == FULL else changes if is_number(way) else []
    return sizes[int(index)] if is_number(index) and int(index) < len(sizes) else 0


MAX_STEPS = 2**40  # multiplied by the batch of a step, it still fits the integers of every machine


def require_work(assigned: Work, batch: int) -> None:
    """Raise `CannotReply` for steps or batches that no aggregator assigns: batches are the plan's, or smaller."""
    if not (1 <= assigned.batch <= batch and assigned.steps <= MAX_STEPS):
        said = f"{assigned.steps} steps with batches of {assigned.batch} examples; the plan has batches of {batch}"
        raise CannotReply("protocol", said)


def least_kept_bytes(plan: RunPlan, model: Layout) -> int:
    """Return the bytes of the vectors that a run keeps at least on a device that trains in it: residual and replica."""
    vectors = keeps_residual(plan) + plan.downlink.compressed
    return 4 * vectors * transmitted_layout(algorithm_of(plan), model).size


def parts_of(bundle: Path | bytes | None, parts: Sequence[Part]) -> Iterator[tuple[str, Payload]]:
    """Yield the name and bytes of each part, one at a time in memory; `BadPayload` if a digest differs.

    Parts without a byte need no bundle: some links make no file for them.
    """
    if not parts:
        return
    if bundle is None and any(part.length for part in parts):
        raise BadPayload("an assignment without its parts")
    with open(bundle, "rb") if isinstance(bundle, Path) else io.BytesIO(bundle or b"") as file:
        for part in parts:
            data = file.read(part.length)
            if damaged_part(io.BytesIO(data), [part]) is not None:
                raise BadPayload(f"the part {part.name} arrived damaged", why="its digest differs")
            yield part.name, data


def update_replica(assignment: Assignment, bundle: Path | None, replica: ModelReplica) -> Vector | None:
    """Bring the replica to the assignment's version, and return the float buffers that came with it.

    Raises `BadPayload` if the parts do not lead to that version.
    """
    buffers: list[Vector] = []

    def frames() -> Iterator[tuple[str, Payload]]:
        for name, data in parts_of(bundle, assignment.parts):
            if name == BUFFERS:
                buffers.append(buffer_codec(replica.layout).decode(data))
            else:
                yield name, data

    try:
        replica.apply(frames(), assignment.base_version, assignment.base_digest)
    except (ValueError, IndexError) as error:
        raise BadPayload("the model's parts are not those of this layout") from error
    return buffers[0] if buffers else None


def restore_update(
    bundle: Path | bytes | None,
    parts: Sequence[Part],
    spec: str,
    layout: Layout,
    residual: Vector | None,
    sign: float = 1.0,
    segments: Sequence[Segment] = (),
) -> Vector:
    """Return the residual plus the decoded frames of a dropped update, without its buffers.

    `sign` is -1 for a vector that moved by what was sent: the EF21 reference, and the control variate of SCAFFOLD or
    FedDyn. `segments` are those that the vector covers; default: all.
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


def pack_reply(payloads: Sequence[Payload], layout: Layout, buffers: Vector | None) -> tuple[tuple[Part, ...], bytes]:
    """Return a reply's parts and its body: a frame for each segment, then the buffers if there are any to send."""
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
    """Return the L2 norm in float64, computed block by block: the square of a large float32 is infinite.

    BLAS is not used. Its threads wait for each other while training has the cores: 0.2 s instead of 1 ms was measured.
    """
    if vector is None:
        return 0.0
    blocks = (vector[at : at + NORM_BLOCK] for at in range(0, vector.size, NORM_BLOCK))
    return float(np.sqrt(sum(float(np.square(block, dtype=np.float64).sum()) for block in blocks)))


@dataclass(frozen=True)
class ControlVariate:
    """The control variate of SCAFFOLD or FedDyn for one assignment.

    `own` is the sum of what this device has sent of it. `common` is the mean of all devices' that came with the
    assignment. It is None if `own` is not in it yet, or if none came.

    Invariant: `own` moves by what its frames decode to, which is what the aggregator adds. So both ends know it
    whatever the codec leaves out, and what was left out is part of the next difference.
    """

    algorithm: Algorithm
    layout: Layout  # of everything that is sent
    own: Vector
    common: Vector | None

    @classmethod
    def of(
        cls, algorithm: Algorithm, layout: Layout, own: Vector | None, params: Vector, counted: bool
    ) -> ControlVariate:
        """Return the control variate for an assignment; `params` is what came with it.

        `own` is None if nothing was sent yet. `counted` is True if this device is in the mean that came. A device that
        is not in it gets no `common`, because the mean may contain revoked devices.
        """
        own = np.zeros(layout.model_size, np.float32) if own is None else own
        given = algorithm.has_control_variate and counted
        return cls(algorithm, layout, own, params[layout.model_size :] if given else None)

    @property
    def shift(self) -> Vector:
        """Return the vector that is added to the gradient at every local step."""
        return self.algorithm.shift(self.own, self.common)

    def differences(self, raw_update: Vector, spec: str, key: Key) -> list[Payload]:
        """Return the frames behind the model's, if the algorithm sends any.

        `raw_update` is divided by its normaliser.
        """
        if (wanted := self.algorithm.next_own(self.own, self.common, raw_update)) is None:
            return []
        wanted -= self.own
        codec, start = inside(parse(spec), self.layout), self.layout.model_size
        return [
            codec.encode(wanted[s.start - start : s.stop - start], codec.init(s.index), key, s.index).payload
            for s in self.layout.control_segments
        ]

    def moved(self, frames: list[Payload], spec: str) -> Vector:
        """Return `own` after an update with these frames."""
        made, segments, codec = (
            self.own.copy(),
            own_segments(self.algorithm, self.layout),
            parse(spec).bind(self.layout),
        )
        start = segments[0].start
        for s in segments:
            codec.decode_add(frames[s.index], 1.0, made[s.start - start : s.stop - start], segment=s.index)
        return made
