"""The downlink: versions of a model replica that every device can hold bit for bit, and the model file.

    c_v = C(x_{v+1} - x^_v);  x^_{v+1} = x^_v + D(c_v)

The server trains x and keeps one replica x^, from which devices train. After a step it sends the encoded difference to
the replica instead of the model, and both ends add the decoded difference. What C leaves out stays in x - x^ and goes
with a later version: the replica is error feedback on the server's side (EF21-P, Gruntkowska, Tyurin and Richtarik
2023). With `identity` the replica is x itself and there are no changes to send.

A model file holds one version exactly as devices receive it: identity frames, one a segment, then the buffers. It is
written in one pass from the vector itself and read straight into one, so a model of 100 MB needs no second copy.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from thinwire.aggregation.mean import buffer_codec, float_buffers, float_values, kept_type, unpack_fixed
from thinwire.aggregation.mean import counters as counted
from thinwire.compression import frame
from thinwire.compression.base import BLOCK, BoundCodec, NoGuarantee, contraction
from thinwire.compression.chain import PLAIN
from thinwire.compression.codecs.powersgd import LowRank
from thinwire.compression.feedback import inside
from thinwire.compression.spec import chains, parse
from thinwire.core.errors import BadPayload, CodecError, DataLost
from thinwire.core.layout import Layout, Tensor
from thinwire.core.part_file import damaged_part
from thinwire.core.prng import Key, derive
from thinwire.core.statedir import disk_error, patiently, private_opener, sync_path
from thinwire.core.types import Fixed, Part, Payload, Vector

DIGITS = 18  # the most digits of a version's or a segment's number

Named = tuple[str, Payload]  # "full/SEGMENT" or "VERSION/SEGMENT", and its frame


def require_downlink(spec: str) -> None:
    """Raise CodecError for a codec that cannot carry the downlink, whatever tensors its rules match."""
    for chain in chains(parse(spec)):
        kind = chain.under_feedback().kind
        if isinstance(chain, LowRank):
            why = "it multiplies matrices, and another BLAS rounds another way: devices would not hold the same bits"
        elif isinstance(kind, NoGuarantee):
            why = "nothing is promised of one change, and the replica could move away from the model"
        elif contraction(kind) <= 0:
            why = "it is no contraction: the replica would move away from the model from change to change"
        else:
            continue
        raise CodecError(f"{chain.spec!r} cannot carry the downlink", why=why, hint="eden(0.3)")


@dataclass(frozen=True)
class Announcement:
    """A version of the replica, the SHA-256 of its float32 bytes, and the change that leads to it.

    Empty `changes` mean that devices need the full model.
    """

    version: int
    digest: str
    changes: tuple[Payload, ...]


class Downlink:
    """The server's end of the downlink.

    Invariant: a device that applies the changes in order, or downloads the replica, holds the replica's bits.
    """

    def __init__(self, layout: Layout, spec: str, replica: Vector, version: int = 0, seed: int = 0) -> None:
        self.layout, self.version = layout, version
        require_downlink(spec)
        self.codec = inside(parse(spec), layout)  # as under feedback: qsgd and ternary round to nearest
        self.exact = self.codec.spec == PLAIN
        self.replica = replica if self.exact else replica.copy()
        self.key = derive(Key(seed), "downlink")

    def publish(self, params: Vector, full: bool = False) -> Announcement:
        """Announce the next version, where `params` is x after the server's step.

        With `full`, the replica becomes x itself.
        """
        self.version += 1
        changes: tuple[Payload, ...] = ()
        if self.exact:
            self.replica = params
        elif full:
            self.replica = params.copy()
        else:
            changes = tuple(self._change(params, segment.index) for segment in self.layout.segments)
        return Announcement(self.version, digest(self.replica), changes)

    def _change(self, params: Vector, index: int) -> Payload:
        span = self.layout.segments[index].span
        key = derive(self.key, self.version)
        payload = self.codec.encode(params[span] - self.replica[span], self.codec.init(index), key, index).payload
        self.codec.decode_add(payload, 1.0, self.replica[span], segment=index)
        return payload


def changes_since(held: int | None, newest: int, sizes: Mapping[int, int], full: int) -> range | None:
    """Return the versions whose changes lead from `held` to `newest`, or None for the full model.

    None means that the full model is shorter or the only way. `sizes` holds the bytes of each logged version's change,
    `full` the bytes of the model.

    >>> changes_since(3, 5, {4: 10, 5: 10}, full=100), changes_since(2, 5, {4: 10, 5: 10}, full=100)
    (range(4, 6), None)
    >>> changes_since(3, 5, {4: 10, 5: 90}, full=100) is None
    True
    """
    if held is None or held > newest:
        return None
    versions = range(held + 1, newest + 1)
    if any(version not in sizes for version in versions) or sum(sizes[version] for version in versions) >= full:
        return None
    return versions


class ModelReplica:
    """The device's end of the downlink: its replica of the model and the version of it, or None without one."""

    def __init__(self, layout: Layout, spec: str, params: Vector | None = None, version: int | None = None) -> None:
        self.layout, self.spec = layout, spec
        self.params: Vector = np.zeros(layout.size, np.float32) if params is None else params
        self.version = version if params is not None else None

    @cached_property
    def codec(self) -> BoundCodec:
        """Return the codec of changes."""
        return parse(self.spec).bind(self.layout)

    @cached_property
    def full(self) -> BoundCodec:
        """Return the codec of a full model."""
        return parse(PLAIN).bind(self.layout)

    def apply(self, frames: Iterable[Named], version: int, expected_digest: str) -> Vector:
        """Bring the replica to `version`; raise BadPayload, with `params` as before, if the frames do not lead there.

        `params` is a new vector afterwards. Changes of versions up to the device's own are skipped.
        """
        made, held = None, self.version
        for name, payload in frames:
            base, _, index = name.partition("/")
            if not (is_number(index) and int(index) < len(self.layout.segments) and (base == FULL or is_number(base))):
                raise BadPayload(f"a part called {name!r}", why="it is full/SEGMENT or VERSION/SEGMENT")
            segment = self.layout.segments[int(index)]
            if base == FULL:
                made = np.zeros(self.layout.size, np.float32) if made is None else made
                made[segment.span] = self.full.decode(payload, segment.index)
            elif held is None:
                raise BadPayload("changes to a model that is not held")
            elif int(base) > held:
                made = self.params.copy() if made is None else made
                self.codec.decode_add(payload, 1.0, made[segment.span], segment=segment.index)
        made = self.params if made is None else made
        if digest(made) != expected_digest:
            raise BadPayload(f"the model is not version {version}", why="its digest differs", hint="request it in full")
        self.params, self.version = made, version
        return made


def is_number(text: str) -> bool:
    """Return True if `text` is a decimal number with no more digits than a version or a segment may have."""
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS


FULL, BUFFERS, FIXED = "full", "buffers", "fixed"


def digest(params: Vector) -> str:
    """Return the SHA-256 (hex) over the little-endian float32 bytes of a vector."""
    return hashlib.sha256(_bytes(params)).hexdigest()


def write_model(
    path: Path, layout: Layout, params: Vector, buffers: Vector, durable: bool = True
) -> tuple[list[Part], str]:
    """Write `full/SEGMENT` and, if there are any, `buffers`; return the parts and the digest of `params`.

    If `durable`, the file is synced under its name when this returns; otherwise it need not outlive this process.
    DataLost means that there is no file.
    """
    return patiently(lambda: _write_model(path, layout, params, buffers, durable))


def _write_model(path: Path, layout: Layout, params: Vector, buffers: Vector, durable: bool) -> tuple[list[Part], str]:
    parts, whole = [], hashlib.sha256()
    draft = path.with_name(f".{path.name}")
    try:
        with open(draft, "wb", opener=private_opener) as file:
            for segment in layout.segments:
                values = _bytes(params[segment.span])
                header = _header(layout, segment.index, len(values))
                own = hashlib.sha256(header)
                file.write(header)
                for start in range(0, len(values), 16 * BLOCK):
                    block = values[start : start + 16 * BLOCK]
                    own.update(block)
                    whole.update(block)
                    file.write(block)
                parts.append(Part(f"{FULL}/{segment.index}", len(header) + len(values), own.hexdigest()))
            if float_buffers(layout):
                payload = buffer_codec(layout).encode(buffers, {}, Key(0)).payload
                file.write(payload)
                parts.append(Part(BUFFERS, len(payload), hashlib.sha256(payload).hexdigest()))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            sync_path(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise disk_error(error, path) from error
    return parts, whole.hexdigest()


def read_model(path: Path, layout: Layout, parts: Sequence[Part]) -> tuple[Vector, Vector, str]:
    """Return (params, buffers, digest of params) of a model file.

    Raise DataLost unless it is a whole model of this layout.
    """
    names = [f"{FULL}/{segment.index}" for segment in layout.segments] + ([BUFFERS] if float_buffers(layout) else [])
    if [part.name for part in parts] != names:
        raise DataLost(f"{path.name} is no model of this layout", why=f"expected the parts {', '.join(names)[:80]}")
    params: Vector = np.empty(layout.size, "<f4")
    buffers: Vector = np.zeros(sum(t.size for t in float_buffers(layout)), np.float32)
    with path.open("rb") as file:
        for segment in layout.segments:
            values = _bytes(params[segment.span])
            header = _header(layout, segment.index, len(values))
            if file.read(len(header)) != header or file.readinto(values) != len(values):
                raise _damaged(path, f"{FULL}/{segment.index}")
        if float_buffers(layout):
            buffers = _read_buffers(file, path, layout, parts[-1])
    return params, buffers, digest(params)


def read_version(
    path: Path, layout: Layout, version: int, recorded: str, parts: Sequence[tuple[str, int, str]]
) -> tuple[Vector, Vector]:
    """Return (params, buffers) of a model version with its recorded digest and parts (name, length, SHA-256).

    Raise DataLost if its file is missing or differs from the record.
    """
    try:
        params, buffers, found = read_model(path, layout, [Part(*part) for part in parts])
    except OSError as error:
        raise DataLost(f"model version {version} is not readable", why=str(error), hint="restore a backup") from error
    if found != recorded:
        raise DataLost(
            f"model version {version} is damaged",
            why=f"its digest is {found[:12]}, recorded was {recorded[:12]}",
            hint="restore a backup, or start again from an older version: [run] init",
        )
    return params, buffers


def read_fixed(folder: Path, layout: Layout) -> Fixed:
    """Return the fixed tensors of a run from its folder; raise DataLost if reading fails."""
    path = folder / FIXED
    try:
        return unpack_fixed(layout, path.read_bytes() if path.exists() else b"")
    except (OSError, BadPayload, SafetensorError) as error:
        raise DataLost(
            "the run's tensors that no training changes are not readable", why=str(error), hint="restore a backup"
        ) from error


def named_tensors(
    layout: Layout, params: Vector, buffers: Vector, counters: Mapping[str, int], fixed: Fixed
) -> dict[str, NDArray[Any]]:
    """Return a model by the names of the task's state_dict, with tied weights under each name.

    Frozen tensors are missing unless `fixed` holds them. Small floats that numpy lacks become float32.
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
    if damaged_part(io.BytesIO(payload), [part]) is not None:
        raise _damaged(path, BUFFERS)
    try:
        return buffer_codec(layout).decode(payload)
    except BadPayload as error:
        raise _damaged(path, BUFFERS) from error


def _header(layout: Layout, segment: int, length: int) -> bytes:
    return frame.header(frame.codec_hash(parse(PLAIN).spec, layout.digest, segment), [(length, False)])


def _damaged(path: Path, part: str) -> DataLost:
    return DataLost(
        f"{path.name} is damaged", why=f"its part {part} is cut off or not what it was", hint="restore a backup"
    )


def _bytes(values: Vector) -> memoryview:
    """Return a vector's little-endian bytes, without a copy on a little-endian machine."""
    return memoryview(np.ascontiguousarray(values, "<f4").view(np.uint8).data)
