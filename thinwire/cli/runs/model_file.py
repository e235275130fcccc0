"""A model as a .safetensors file, with the names of the task's state_dict: what anybody can load without Thinwire.

Tied weights stand under each of their names, so that `load_state_dict` takes the file as it is; buffers and integer
counters are included; frozen tensors are not (they never leave the device and are those of the task's own model).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thinwire.core import Layout, Vector
    from thinwire.core.layout import Tensor


def write_model_file(
    path: Path, layout: Layout, params: Vector, buffers: Vector, counters: Mapping[str, int], about: Mapping[str, str]
) -> list[str]:
    """Write the model at once or not at all; gives the tensors' names. `about` becomes the file's metadata."""
    from safetensors.numpy import save

    from thinwire.aggregation import counters as counted
    from thinwire.core.home import write_atomically

    tensors = {t.name: _stored(t, params[t.offset : t.offset + t.size]) for t in layout.trained}
    tensors |= {t.name: _stored(t, values) for t, values in _float_buffers(layout, buffers)}
    tensors |= {t.name: _stored(t, np.full(t.shape, counters.get(t.name, 0))) for t in counted(layout)}
    tensors |= {other: tensors[name] for other, name in layout.aliases if name in tensors}
    metadata = {**about, "format": "pt", "tied": " ".join(f"{other}={name}" for other, name in layout.aliases)}
    write_atomically(path, save(tensors, metadata), mode=0o644)
    return sorted(tensors)


def read_model_file(path: Path, layout: Layout, zeros: Vector) -> tuple[Vector, Vector, dict[str, int]]:
    """(params, buffers, counters) of a file for this layout; `zeros` is the buffers' vector where it has none."""
    from safetensors import SafetensorError, safe_open

    from thinwire.aggregation import counters as counted
    from thinwire.core.errors import DataLost, TaskError

    try:
        with safe_open(path, framework="numpy") as file:
            there = set(file.keys())
            found = {t.name: file.get_tensor(t.name) for t in layout.tensors if t.name in there}
    except (OSError, SafetensorError) as error:
        raise DataLost(f"cannot read the model {path}", why=str(error), hint="a .safetensors file") from error
    if wrong := [t.name for t in layout.trained if t.name not in found or found[t.name].shape != t.shape]:
        raise TaskError(
            f"{path} is not a model of this task",
            why=f"missing or of another shape: {', '.join(wrong[:5])}" + (" ..." if len(wrong) > 5 else ""),
            hint="the file that thinwire runs model wrote for the same task",
        )
    params = np.concatenate([np.empty(0, np.float32), *(_flat(found[t.name]) for t in layout.trained)])
    buffers = np.array(zeros)
    for t, values in _float_buffers(layout, buffers):
        if t.name in found:
            values[:] = _flat(found[t.name])
    counters = {t.name: int(found[t.name].max()) for t in counted(layout) if t.name in found}
    return params, buffers, counters


def _float_buffers(layout: Layout, buffers: Vector) -> list[tuple[Tensor, Vector]]:
    """Each float buffer with its place in the buffers' vector, which holds no integers."""
    from thinwire.aggregation import float_buffers

    found = float_buffers(layout)
    ends = np.cumsum([0, *(t.size for t in found)])
    return [(t, buffers[start : start + t.size]) for t, start in zip(found, ends[:-1], strict=True)]


def _flat(values: NDArray[Any]) -> Vector:
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def _stored(t: Tensor, values: NDArray[Any]) -> NDArray[Any]:
    """A tensor as numpy has it: bfloat16, which numpy lacks, is kept as float32, which loses nothing."""
    dtype = "float32" if t.dtype == "bfloat16" else t.dtype
    return np.ascontiguousarray(values, dtype).reshape(t.shape)
