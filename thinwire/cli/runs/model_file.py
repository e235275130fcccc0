"""A model as a .safetensors file, with the names of the task's state_dict: what anybody can load without Thinwire.

Tied weights stand under each of their names, so that `load_state_dict` takes the file as it is; all buffers are
included; frozen tensors are not, unless model() draws them at random (they are those of the task's own model).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
COMPLEX = ("C64",)

if TYPE_CHECKING:
    from thinwire.core import Layout, Vector
    from thinwire.core.layout import Tensor
    from thinwire.core.types import Fixed


def write_model_file(
    path: Path,
    layout: Layout,
    params: Vector,
    buffers: Vector,
    counters: Mapping[str, int],
    fixed: Fixed,
    about: Mapping[str, str],
) -> list[str]:
    """Write the model at once or not at all; gives the tensors' names. `about` becomes the file's metadata."""
    from safetensors.numpy import save

    from thinwire.aggregation.model_file import named_tensors
    from thinwire.core.home import write_atomically

    tensors = named_tensors(layout, params, buffers, counters, fixed)
    metadata = {**about, "format": "pt", "tied": " ".join(f"{other}={name}" for other, name in layout.aliases)}
    write_atomically(path, save(tensors, metadata), mode=0o644)
    return sorted(tensors)


def read_model_file(
    path: Path, layout: Layout, zeros: Vector, fixed: Fixed | None = None
) -> tuple[Vector, Vector, dict[str, int]]:
    """(params, buffers, counters) of a file for this layout; `zeros` is the buffers' vector where it has none.

    `TaskError` where the file has other fixed tensors than the task's model(): each client makes them for itself.
    """
    from safetensors import SafetensorError, safe_open

    from thinwire.aggregation import counters as counted
    from thinwire.aggregation.buffers import float_values
    from thinwire.core.errors import DataLost, TaskError

    try:
        with safe_open(path, framework="numpy") as file:
            there = set(file.keys())
            found = {t.name: _read(path, file, t) for t in layout.tensors if t.name in there}
    except (OSError, SafetensorError) as error:
        raise DataLost(f"cannot read the model {path}", why=str(error), hint="a .safetensors file") from error
    if wrong := [t.name for t in layout.trained if t.name not in found or found[t.name].shape != t.shape]:
        raise TaskError(
            f"{path} is not a model of this task",
            why=f"missing or of another shape: {', '.join(wrong[:5])}" + (" ..." if len(wrong) > 5 else ""),
            hint="the file that thinwire runs model wrote for the same task",
        )
    if wrong := [t.name for t in layout.trained if not np.isfinite(found[t.name]).all()]:
        raise TaskError(
            f"{path} holds NaN or infinity as float32",
            why=f"in {', '.join(wrong[:5])}" + (" ..." if len(wrong) > 5 else ""),
            hint="a file whose values are finite",
        )
    if other := [name for name, values in (fixed or {}).items() if name in found and not _same(found[name], values)]:
        raise TaskError(
            f"{path} has another {other[0]} than the task's model()",
            why="what no training changes does not travel: each client makes it in model()",
            hint="give model() the values of the file",
        )
    params = np.concatenate([np.empty(0, np.float32), *(_flat(found[t.name]) for t in layout.trained)])
    buffers = np.array(zeros)
    for t, values in float_values(layout, buffers):
        if t.name in found:
            values[:] = _flat(found[t.name])
    counters = {t.name: int(found[t.name].max()) for t in counted(layout) if t.name in found}
    return params, buffers, counters


def _read(path: Path, file: Any, t: Tensor) -> NDArray[Any]:
    """Return a tensor of an opened file: float32 for what the model has as floats, else its integers.

    `TaskError` where the file has it as a type that this would falsify, such as float8 or packed integers.
    """
    from thinwire.core.errors import TaskError

    dtype, floats = file.get_slice(t.name).get_dtype(), t.dtype.startswith(("float", "bfloat"))
    known = FLOATS if floats else COMPLEX if t.dtype.startswith("complex") else INTEGERS
    if dtype not in known:
        raise TaskError(
            f"{path} has the tensor {t.name} as {dtype}, and the model has it as {t.dtype}",
            why=f"it is read from {', '.join(known)}; nothing says what else would stand for",
            hint=f"convert it first: tensor.to(torch.{'float32' if floats else t.dtype})",
        )
    if dtype == "BF16":  # numpy has no such type: the upper half of a float32
        halves = _raw(path, t.name, "<u2").reshape(file.get_slice(t.name).get_shape())
        return (halves.astype("<u4") << 16).view("<f4")
    values: NDArray[Any] = file.get_tensor(t.name)
    with np.errstate(over="ignore"):  # a float64 that no float32 holds is infinite, which is refused
        return values.astype(np.float32, copy=False) if floats else values


def _raw(path: Path, name: str, dtype: str) -> NDArray[Any]:
    """Return a tensor's own bytes, flat; safetensors has checked the file's header before."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        return np.frombuffer(file.read(end - begin), dtype)


def _same(found: NDArray[Any], made: NDArray[Any]) -> bool:
    """Whether a file's tensor, as it was read, is bit for bit the one that model() makes: NaN too."""
    with np.errstate(over="ignore"):  # a float64 that no float32 holds was read as infinite
        return found.shape == made.shape and found.tobytes() == made.astype(found.dtype).tobytes()


def _flat(values: NDArray[Any]) -> Vector:
    return np.ascontiguousarray(values, np.float32).reshape(-1)
