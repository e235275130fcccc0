"""The state that a task's own train() keeps between its assignments: named arrays of numbers (`context.state`).

The client sends it to training with an assignment and commits what comes back with the reply. Both ends copy and check
it here, and between their processes it travels as a description in the header and the arrays' bytes. Nothing is
pickled.

Invariant: nothing is allocated for a description before its names, types and bytes are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadTask, describe

Arrays = Mapping[str, "NDArray[Any]"]

DTYPES = tuple(
    f"<{kind}{size}" if size > 1 else f"|{kind}1"
    for kind, sizes in (("b", (1,)), ("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("f", (2, 4, 8)))
    for size in sizes
)
MAX_ARRAYS, MAX_LETTERS, MAX_DIMENSIONS = 1024, 64, 32
MB = 10**6
RESERVED = "__metadata__"  # in a safetensors file


def copied(state: Any, max_bytes: int) -> dict[str, NDArray[Any]]:
    """Return a copy of what train() left in `context.state`, sorted by name; numbers become arrays without dimensions.

    Raises `BadTask` for anything else than names and numeric arrays, and for more than `max_bytes`.
    """
    if not isinstance(state, Mapping):
        raise _refused(describe(state), "it is a dict of named arrays", 'context.state["mean"] = array')
    if len(state) > MAX_ARRAYS or not all(map(_is_name, state)):
        why = f"it has at most {MAX_ARRAYS} arrays, with names of 1 to {MAX_LETTERS} printable letters"
        raise _refused("too many arrays, or a name that is not valid", why, "fewer arrays, with short names")
    found = {name: _as_array(value) for name, value in sorted(state.items())}  # in a file they have no order
    if (size := sum(array.nbytes for array in found.values())) > max_bytes:
        raise _refused(
            "more than this device keeps",
            f"{size:,} bytes, and [policy] max_state_mb of client.toml allows {max_bytes / MB:g} MB",
            "keep less in it, or a larger max_state_mb in client.toml",
        )
    return {name: np.array(array, dtype=array.dtype.newbyteorder("<"), order="C") for name, array in found.items()}


def _as_array(value: Any) -> NDArray[Any]:
    if isinstance(value, (np.ndarray, np.generic, bool, int, float)):
        array = np.asarray(value)
        if array.dtype.newbyteorder("<").str in DTYPES:
            return array
    raise _refused(describe(value), "it holds numpy arrays of numbers: nothing is pickled", "tensor.cpu().numpy()")


def _refused(what: str, why: str, hint: str) -> BadTask:
    return BadTask(f"context.state holds {what}", why=why, hint=hint)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_LETTERS and name.isprintable() and name != RESERVED


def described(arrays: Arrays) -> list[list[Any]]:
    """Return the names, types and shapes of arrays as JSON."""
    return [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]


def allocated(raw: Any, max_bytes: int) -> dict[str, NDArray[Any]]:
    """Return empty arrays of this description; raise ValueError before anything is allocated if it is not valid."""
    if not isinstance(raw, list) or len(raw) > MAX_ARRAYS:
        raise ValueError("no description of arrays")
    total = 0
    for name, dtype, shape in raw:
        if not _is_name(name) or dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise ValueError("an array whose name, type or shape is not valid")
        if not all(type(length) is int and 0 <= length <= max_bytes for length in shape):
            raise ValueError("an array whose shape is not valid")
        total += math.prod(shape) * np.dtype(dtype).itemsize
    if total > max_bytes or len({name for name, _, _ in raw}) < len(raw):
        raise ValueError(f"arrays of {total} bytes, or with one name")
    return {name: np.empty(shape, np.dtype(dtype)) for name, dtype, shape in raw}


def are_equal(one: Arrays, other: Arrays) -> bool:
    """Return True if both have the same names, types, shapes and bits."""
    return sorted(described(one)) == sorted(described(other)) and all(
        array.tobytes() == other[name].tobytes() for name, array in one.items()
    )
