"""Between frames and vectors: an ask's parts to the base model, a change to an answer's parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from thinwire.aggregation import encode_buffers, float_buffers, parse
from thinwire.aggregation.algorithms import algorithm_of, carried
from thinwire.aggregation.buffers import buffer_codec
from thinwire.aggregation.downlink import Shadow, is_number
from thinwire.aggregation.model_file import FULL
from thinwire.client.failures import CannotAnswer
from thinwire.core.errors import BadPayload, NonFiniteUpdate
from thinwire.core.layout import Layout, Segment
from thinwire.core.plan import RunPlan
from thinwire.core.types import Ask, Part, Payload, Vector

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
