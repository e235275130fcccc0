"""The first model of a run: read from a .safetensors file, or from a version of another run (`[run] init`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.plan_names import named_model
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.stored_models import StoredModel, stored_model

if TYPE_CHECKING:
    from thinwire.core import Layout, RunPlan, Vector
    from thinwire.core.errors import ThinwireError
    from thinwire.core.layout import Tensor
    from thinwire.core.types import Fixed
    from thinwire.store import RunRow, Store


FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
COMPLEX = ("C64",)


def read_model_file(
    path: Path, layout: Layout, zeros: Vector, fixed: Fixed | None = None
) -> tuple[Vector, Vector, dict[str, int]]:
    """Return (params, buffers, counters) of a file for this layout; `zeros` are the buffers if the file has none.

    `TaskError` if tensors are missing, of another shape or not finite, or if a fixed tensor differs from the task's
    model(). Each client makes the fixed tensors for itself. `DataLost` if reading fails.
    """
    from safetensors import SafetensorError, safe_open

    from thinwire.aggregation import counters as counted
    from thinwire.aggregation.mean import float_values
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
    """Return a tensor of an open file: float32 for the model's floats, else its integers.

    `TaskError` if the file stores it as a type that this would falsify, such as float8 or packed integers.
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
    with np.errstate(over="ignore"):  # a float64 above float32's range becomes infinite, which is refused
        return values.astype(np.float32, copy=False) if floats else values


def _raw(path: Path, name: str, dtype: str) -> NDArray[Any]:
    """Return a tensor's own bytes, flat; safetensors has checked the file's header before."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + begin)
        return np.frombuffer(file.read(end - begin), dtype)


def _same(found: NDArray[Any], made: NDArray[Any]) -> bool:
    """Return True if a tensor that was read equals the one that model() makes bit for bit, NaN included."""
    with np.errstate(over="ignore"):  # a float64 above float32's range was read as infinite
        return found.shape == made.shape and found.tobytes() == made.astype(found.dtype).tobytes()


def _flat(values: NDArray[Any]) -> Vector:
    """Return a tensor as a flat float32 vector."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def model_of_run(store: Store, home: AggregatorHome, plan: RunPlan, layout: Layout | None) -> StoredModel:
    """Return the first model of a plan with `[run] init = "run:ID"`, or run:ID@ROUND.

    `TaskError` if its layout is not `layout`, `PlanError` if a private run would begin with an uncounted cost.
    """
    from thinwire.core.errors import TaskError

    named = named_model(plan.run.init)
    assert named is not None, "the caller has looked"
    other = stored_model(store, home, *named)
    if layout is not None and other.layout.digest != layout.digest:
        raise TaskError(
            f"the model of {other.run.run_id} is not one of this task",
            why="its tensors have other names or shapes",
            hint="the same task, or leave [run] init out",
        )
    require_counted(plan, other.run, named[1], store.run)
    return other


def require_counted(plan: RunPlan, other: RunRow, which: str, run_of: Callable[[str], RunRow]) -> None:
    """Raise `PlanError` if a private plan begins with a model of devices whose cost its population's ledger lacks.

    The first model of a run (`which` is "0") costs nothing if `thinwire run` made it by the task's model(). On a device
    model() might read that device's data. A simulated model tells of the model with which the simulation began, too.
    `run_of` returns a run by its id.
    """
    _require_counted_run(plan, other, which, run_of, f"the model of {other.run_id}")


def _require_counted_run(plan: RunPlan, other: RunRow, which: str, run_of: Callable[[str], RunRow], model: str) -> None:
    from thinwire.store.read_models import population_of, privacy_section

    init = str(other.plan["run"].get("init", ""))
    if plan.privacy.mode == "off" or (not init and (which == "0" or other.source == "sim")):
        return
    if other.source == "devices":
        _require_counted(plan, model, privacy_section(other).mode, population_of(other))
    elif named := named_model(init):
        _require_counted_run(plan, run_of(named[0]), named[1], run_of, f"{model}, which began with {init}")
    elif (path := Path(init).expanduser()).is_file():
        require_counted_file(plan, path)
    else:
        raise _uncounted(f"{model}, which began with {init}", "that file is not there, so nobody knows of which data")


def require_counted_file(plan: RunPlan, path: Path) -> None:
    """Raise `PlanError` as `require_counted` does for a file with a model of a run: its metadata say of which.

    A file of another program says nothing, and is its operator's word that it is of public data.
    """
    from safetensors import safe_open

    from thinwire.core.formatting import plain

    if plan.privacy.mode == "off":
        return
    with safe_open(path, framework="numpy") as file:
        about = file.metadata() or {}
    if "run" not in about:
        return
    model = f"a file of the model of {plain(about['run'][:80])}"
    if about.get("source") != "sim":
        _require_counted(plan, model, about.get("privacy", "off"), plain(about.get("population", "")[:80]))
    elif init := plain(about.get("init", "")[:80]):
        raise _uncounted(f"{model}, which began with {init}", "a file does not say of which data that model was")


def _require_counted(plan: RunPlan, model: str, mode: str, counted_in: str) -> None:
    population = plan.privacy.population or plan.run.task
    if mode == "off":
        why = "it tells of its clients' data without a bound, and so would every model that is made of it"
    elif mode == "example" != plan.privacy.mode:
        why = "its noise hides one record, and not all data of a client"
    elif counted_in != population:
        why = f"what it spent is counted in the population {counted_in}, and not in {population}"
    else:
        return
    raise _uncounted(model, why)


def _uncounted(model: str, why: str) -> ThinwireError:
    from thinwire.core.errors import PlanError

    return PlanError(
        f"a private run that begins with {model}",
        why,
        "leave [run] init out, or take a model of public data, or of a private run of the same population",
    )
