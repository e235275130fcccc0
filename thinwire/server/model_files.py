"""Models as .safetensors files with the names of the task's state_dict, which load without Thinwire.

Tied weights are stored under each of their names, so that `load_state_dict` takes the file unchanged. All buffers are
included. Frozen tensors are left out, because the task's model() makes them, unless it draws them at random.

`StoredModel` is a version of a run: that of a round, the best or the last. `read_model_file` reads a file as the first
model of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core.plan_names import named_model
from thinwire.core.statedir import AggregatorHome

if TYPE_CHECKING:
    from thinwire.core import Layout, RunPlan, Vector
    from thinwire.core.layout import Tensor
    from thinwire.core.types import Fixed
    from thinwire.store import ModelRow, RunRow, Store


FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
COMPLEX = ("C64",)


def write_model_file(
    path: Path,
    layout: Layout,
    params: Vector,
    buffers: Vector,
    counters: Mapping[str, int],
    fixed: Fixed,
    about: Mapping[str, str],
) -> list[str]:
    """Write the model atomically and return the tensors' names, sorted; `about` becomes the file's metadata."""
    from safetensors.numpy import save

    from thinwire.aggregation.downlink import named_tensors
    from thinwire.core.statedir import write_atomically

    tensors = named_tensors(layout, params, buffers, counters, fixed)
    metadata = {**about, "format": "pt", "tied": " ".join(f"{other}={name}" for other, name in layout.aliases)}
    write_atomically(path, save(tensors, metadata), mode=0o644)
    return sorted(tensors)


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


AVERAGE = "average"


@dataclass(frozen=True)
class StoredModel:
    """A model version with all its parts; the algorithm's own vectors behind the parameters are left out."""

    run: RunRow
    row: ModelRow
    layout: Layout
    params: Vector
    buffers: Vector
    fixed: Fixed
    metrics: Mapping[str, float]

    def about(self) -> dict[str, str]:
        """Return the metadata of the exported file."""
        from thinwire import __version__

        return {
            "thinwire": __version__,
            "run": self.run.run_id,
            "task": self.run.task,
            "version": str(self.row.version),
            "digest": self.row.digest,
            "layout_digest": self.layout.digest,
            "metrics": json.dumps(dict(self.metrics)),
            **({"buffers": said} if (said := self.statistics) else {}),
            **({"frozen": " ".join(frozen)} if (frozen := self.frozen) else {}),
            **({"personal_layers": " ".join(own)} if (own := self.personal_layers) else {}),
        }

    @property
    def statistics(self) -> str:
        """Return the source of the model's float buffers, such as BatchNorm statistics; "" without any."""
        from thinwire.aggregation import float_buffers

        kept = str(dict(self.run.plan["local"]).get("buffers", AVERAGE))
        if not float_buffers(self.layout):
            return ""
        if kept != AVERAGE:
            return f'those of the first model, not of any client: [local] buffers = "{kept}"'
        return "the mean over clients" if self.row.version else "those of the first model"

    @property
    def frozen(self) -> list[str]:
        """Return the names of the tensors that are not in the file."""
        return [t.name for t in self.layout.of_role("frozen") if t.name not in self.fixed]

    @property
    def personal_layers(self) -> list[str]:
        """Return the globs of the tensors that stay on each client; neither this model nor its file has them."""
        return [str(glob) for glob in dict(self.run.plan["local"]).get("personal_layers", ())]

    def export(self, path: Path) -> list[str]:
        """Write the model to a .safetensors file and return the tensors' names."""
        return write_model_file(
            path, self.layout, self.params, self.buffers, self.row.counters, self.fixed, self.about()
        )


def stored_model(store: Store, home: AggregatorHome, run_id: str, which: str) -> StoredModel:
    """Return a model version of a run; `which` is "last", "best" or the number of a round (0: the first model).

    `NotFound` if the version is the first model and `which` is not 0, so that nobody takes an untrained model by
    mistake; also if the plan did not keep that version.
    """
    run = store.run(run_id)
    version = _version(store, run, which)
    if version == 0 and which != "0":
        raise _untrained(run, which)
    return stored_version(store, home, run, version, which)


def stored_version(store: Store, home: AggregatorHome, run: RunRow, version: int, which: str = "") -> StoredModel:
    """Return a model version of a run by its number; `NotFound` if it is not kept. `which` is how a person named it."""
    from thinwire.aggregation.control_variates import algorithm_of, carried
    from thinwire.core import Layout, RunPlan
    from thinwire.core.errors import NotFound
    from thinwire.core.events import ModelStored
    from thinwire.server.model_store import Versions

    row = next((m for m in store.models(run.run_id) if m.version == version), None)
    layout = Layout.from_json(run.layout)
    travels = carried(algorithm_of(RunPlan.from_json(run.plan)), layout)
    folder = Versions(home.run(run.run_id), travels)
    if row is None or not folder.path(version).exists():
        raise NotFound(
            f"{run.run_id} no longer has the model of round {which or version}",
            why=f'its plan keeps "{run.plan["run"]["keep"]}"',
            hint='--round best or last; [run] keep = "all" keeps every round\'s',
        )
    stored = ModelStored(row.at, row.version, row.digest, row.file, row.parts, row.counters)
    params, buffers = folder.read(stored)
    fixed, metrics = folder.read_fixed(), _metrics(store, run, version)
    return StoredModel(run, row, layout, params[: layout.size], buffers, fixed, metrics)


def _untrained(run: RunRow, which: str) -> Exception:
    """Return the error for a version that is the first model."""
    from thinwire.core.errors import NotFound

    ways = f"--round 0, which is the model that it began with ([run] init: run:{run.run_id}@0)"
    if run.version:
        found = "best model" if which == "best" else f"model of round {which}"
        return NotFound(
            f"the {found} of {run.run_id} is the one that it began with",
            why="no later one was measured as better" if which == "best" else "no round until then made a step",
            hint=f"--round last; or {ways}",
        )
    return NotFound(
        f"{run.run_id} has no trained model: no round of it has made a step",
        why=f"it is {run.status}: {run.status_text}",
        hint=ways,
    )


def _version(store: Store, run: RunRow, which: str) -> int:
    """Return the version that `which` names; `NotFound` for a round that made none."""
    from thinwire.core.errors import NotFound, UsageError

    if which == "last":
        return run.version
    if which == "best":
        return run.version if run.best_version is None else run.best_version
    if not which.isdigit():
        raise UsageError(f"--round {which!r} is not valid", why="it is a number, best or last", hint="--round best")
    if which == "0":
        return 0
    made = {r.round: r.version for r in store.rounds(run.run_id)}
    version = made.get(int(which))
    if version is None and int(which) in made:
        raise NotFound(
            f"round {which} of {run.run_id} has made no model yet",
            why="it is open",
            hint=f"--round last; thinwire runs show {run.run_id}",
        )
    if version is None:
        raise NotFound(
            f"{run.run_id} has no closed round {which}",
            why=f"it closed {run.rounds_closed}",
            hint=f"thinwire runs show {run.run_id}",
        )
    return version


def _metrics(store: Store, run: RunRow, version: int) -> Mapping[str, float]:
    """Return the metrics of a version, which are stored with the round that made it."""
    if version == 0:
        return run.metrics0
    found = [r.decisive for r in store.rounds(run.run_id) if r.version == version and r.metrics]
    return found[0] if found else {}


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
    require_counted(plan, other.run)
    return other


def require_counted(plan: RunPlan, other: RunRow) -> None:
    """Raise `PlanError` if a private plan begins with a model of devices whose cost its population's ledger lacks."""
    from thinwire.core.errors import PlanError
    from thinwire.store.read_models import population_of, privacy_section

    if plan.privacy.mode == "off" or other.source != "devices":
        return
    population, mode = plan.privacy.population or plan.run.task, privacy_section(other).mode
    if mode == "off":
        why = "it tells of its clients' data without a bound, and so would every model that is made of it"
    elif mode == "example" != plan.privacy.mode:
        why = "its noise hides one record, and not all data of a client"
    elif population_of(other) != population:
        why = f"what it spent is counted in the population {population_of(other)}, and not in {population}"
    else:
        return
    raise PlanError(
        f"a private run that begins with the model of {other.run_id}",
        why,
        "leave [run] init out, or take a model of public data, or of a private run of the same population",
    )
