"""The header of a safetensors file: names, types and shapes of its tensors, read before a tensor is.

The format: 8 bytes with the header's length N (little endian), N bytes of JSON, then the tensors one after the other.

Invariant: nothing is allocated for a length that the file's own size does not allow, and the tensors that the header
lists fill the rest of the file exactly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from thinwire.core.errors import PlanError

LENGTH_BYTES: Final = 8
MAX_HEADER: Final = 4 * 2**20  # bytes: 40 000 tensors with names of 60 letters
MAX_TENSORS: Final = 100_000
MAX_DIMENSIONS: Final = 16
ITEM_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header lists it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def header_length(first: bytes, total: int) -> int:
    """Return the bytes of a file's header from its first 8; `total` is the file's size. Raise `PlanError`."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER, total - LENGTH_BYTES):
        raise _refused(f"its first 8 bytes say that its header has {length} bytes")
    return length


def read_header(header: bytes, total: int) -> list[StoredTensor]:
    """Return the tensors that a header lists; raise `PlanError` unless they fill a file of `total` bytes.

    >>> read_header(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8 + 54 + 8)
    [StoredTensor(name='w', dtype='F32', shape=(2,))]
    """
    try:
        told = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _refused("its header is not JSON") from error
    if not isinstance(told, dict) or len(told) > MAX_TENSORS:
        raise _refused(f"its header is no table of at most {MAX_TENSORS} tensors")
    told.pop("__metadata__", None)
    places = sorted((_place(name, one) for name, one in told.items()), key=lambda found: found[1])
    at = 0
    for tensor, begin, end in places:
        if begin != at or end - begin != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
            raise _refused(f"the place of {tensor.name[:80]!r} does not fit its shape, or leaves a gap")
        at = end
    if at != total - LENGTH_BYTES - len(header):
        raise _refused(f"its tensors have {at} bytes, and {total - LENGTH_BYTES - len(header)} follow the header")
    return [tensor for tensor, _, _ in places]


def _place(name: str, one: Any) -> tuple[StoredTensor, int, int]:
    """Return a tensor with the bytes between which it lies."""
    if not isinstance(one, Mapping):
        raise _refused(f"{name[:80]!r} is no tensor")
    dtype, shape, offsets = one.get("dtype"), one.get("shape"), one.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _refused(f"{name[:80]!r} has the type {str(dtype)[:20]!r}")
    dimensions, place = _counts(shape), _counts(offsets)
    if dimensions is None or len(dimensions) > MAX_DIMENSIONS or place is None or len(place) != 2:
        raise _refused(f"shape or place of {name[:80]!r} are no whole numbers")
    return StoredTensor(name, dtype, tuple(dimensions)), place[0], place[1]


def _counts(value: Any) -> list[int] | None:
    """Return a list of whole numbers from 0 on; None if the value is none."""
    is_list = isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)
    return value if is_list else None


def _refused(why: str) -> PlanError:
    return PlanError("this is no model as .safetensors", why, "a file that thinwire runs model wrote, or safetensors")
