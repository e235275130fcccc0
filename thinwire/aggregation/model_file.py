"""A model version as a file that is also what devices are sent: identity frames, one a segment, then the buffers.

It is written in one pass from the vector itself and read straight into one: a model of 100 MB needs no second copy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation import frame
from thinwire.aggregation.buffers import buffer_codec, float_buffers, float_values, kept_type
from thinwire.aggregation.buffers import counters as counted
from thinwire.aggregation.codec import BLOCK
from thinwire.aggregation.parse import parse
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.home import disk_error, private_opener, sync_folder
from thinwire.core.keys import Key
from thinwire.core.layout import Layout, Tensor
from thinwire.core.types import Fixed, Part, Vector

FULL, BUFFERS = "full", "buffers"


def digest(params: Vector) -> str:
    """SHA-256 (hex) over the little-endian float32 bytes of a vector."""
    return hashlib.sha256(_bytes(params)).hexdigest()


def write_model(
    path: Path, layout: Layout, params: Vector, buffers: Vector, durable: bool = True
) -> tuple[list[Part], str]:
    """Write `full/SEGMENT` and, where there are any, `buffers`; gives the parts and the digest of `params`.

    The file is durable under its name when this returns, and not there at all when it raises DataLost. Where it need
    not outlive this process (`durable` False) nothing is synced.
    """
    parts, whole = [], hashlib.sha256()
    draft = path.with_name(f".{path.name}")
    try:
        with open(draft, "wb", opener=private_opener) as file:
            for segment in layout.segments:
                values = _bytes(params[segment.span])
                head = _head(layout, segment.index, len(values))
                own = hashlib.sha256(head)
                file.write(head)
                for start in range(0, len(values), 16 * BLOCK):
                    block = values[start : start + 16 * BLOCK]
                    own.update(block)
                    whole.update(block)
                    file.write(block)
                parts.append(Part(f"{FULL}/{segment.index}", len(head) + len(values), own.hexdigest()))
            if float_buffers(layout):
                payload = buffer_codec(layout).encode(buffers, {}, Key(0)).payload
                file.write(payload)
                parts.append(Part(BUFFERS, len(payload), hashlib.sha256(payload).hexdigest()))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise disk_error(error, path) from error
    return parts, whole.hexdigest()


def read_model(path: Path, layout: Layout, parts: Sequence[Part]) -> tuple[Vector, Vector, str]:
    """(params, buffers, digest of params) of such a file; DataLost when it is not a model of this layout, whole."""
    names = [f"{FULL}/{segment.index}" for segment in layout.segments] + ([BUFFERS] if float_buffers(layout) else [])
    if [part.name for part in parts] != names:
        raise DataLost(f"{path.name} is no model of this layout", why=f"expected the parts {', '.join(names)[:80]}")
    params: Vector = np.empty(layout.size, "<f4")
    buffers: Vector = np.zeros(sum(t.size for t in float_buffers(layout)), np.float32)
    with path.open("rb") as file:
        for segment in layout.segments:
            values = _bytes(params[segment.span])
            head = _head(layout, segment.index, len(values))
            if file.read(len(head)) != head or file.readinto(values) != len(values):
                raise _damaged(path, f"{FULL}/{segment.index}")
        if float_buffers(layout):
            buffers = _read_buffers(file, path, layout, parts[-1])
    return params, buffers, digest(params)


def named_tensors(
    layout: Layout, params: Vector, buffers: Vector, counters: Mapping[str, int], fixed: Fixed
) -> dict[str, NDArray[Any]]:
    """A model by the names of the task's state_dict, tied weights under each name.

    Frozen tensors are missing, but for those that `fixed` holds. Small floats that numpy lacks become float32.
    """
    found = {t.name: _typed(t, params[t.offset : t.offset + t.size]) for t in layout.trained}
    found |= {t.name: _typed(t, values) for t, values in float_values(layout, buffers)}
    found |= {t.name: _typed(t, np.full(t.shape, counters.get(t.name, 0))) for t in counted(layout)}
    found |= {t.name: _typed(t, fixed[t.name]) for t in layout.tensors if t.name in fixed}
    return found | {other: found[name] for other, name in layout.aliases if name in found}


def _typed(t: Tensor, values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values, kept_type(t)).reshape(t.shape)


def _read_buffers(file: BinaryIO, path: Path, layout: Layout, part: Part) -> Vector:
    payload = file.read(part.length)
    if hashlib.sha256(payload).hexdigest() != part.sha256:
        raise _damaged(path, BUFFERS)
    try:
        return buffer_codec(layout).decode(payload)
    except BadPayload as error:
        raise _damaged(path, BUFFERS) from error


def _head(layout: Layout, segment: int, length: int) -> bytes:
    return frame.head(frame.codec_hash(parse("identity").spec, layout.digest, segment), [(length, False)])


def _damaged(path: Path, part: str) -> DataLost:
    return DataLost(
        f"{path.name} is damaged", why=f"its part {part} is cut off or not what it was", hint="restore a backup"
    )


def _bytes(values: Vector) -> memoryview:
    """A vector's own little-endian bytes, without a copy where the machine is little-endian."""
    return memoryview(np.ascontiguousarray(values, "<f4").view(np.uint8).data)
