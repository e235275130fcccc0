"""Files of runs with personal layers or a `context.state` on a device, until the device's owner deletes them.

`personal/RUN.safetensors` has a run's personal values since the run ended here, or newer runs displaced it, and the
arrays that the task's own train() kept in `context.state`. Another run
of the same id, as of an aggregator that was installed again, has `RUN.1.safetensors`. `personal/shared/RUN.safetensors`
has the shared part of the last model that the device received. Both together are the whole model (`whole_model`).

The shared part is stored when it arrives, and not fetched when the owner wants the whole model. The aggregator may be
offline, may have deleted the run, or may no longer have the version. And no aggregator has to give a device a model
without an assignment. The price is one more write of the model for an assignment, in runs with personal layers only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from thinwire.aggregation.mean import counters as counted
from thinwire.aggregation.mean import float_values, kept_type
from thinwire.client import outbox
from thinwire.client.run_state import (
    MARK,
    NOT_KNOWN,
    STATE,
    Arrays,
    ClientRunState,
    RunFolder,
    no_bytes,
    run_path,
    write_unsynced,
)
from thinwire.core.errors import DataLost, NotFound, PlanError
from thinwire.core.layout import Layout
from thinwire.core.personal_layers import kept_floats, personal_tensors, shared_layout
from thinwire.core.records import replace
from thinwire.core.statedir import private_folder, require_room, write_atomically

if TYPE_CHECKING:
    from thinwire.core.types import Assignment, Vector

FOLDER = "personal"  # in the client's folder: a file for each run that has ended
CONTEXT = "context/"  # before the names of arrays of `context.state`
SHARED = "shared"  # in `FOLDER`: the shared part of each run's model
MAX_RUNS = 64  # that have ended, of all tasks of a client
MAX_MODELS = 8  # runs whose shared part stays: those whose model arrived last
MAX_READS = 3  # of a state that a client may be committing
READ_ERRORS = (
    OSError,
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
)  # in a damaged file


@dataclass(frozen=True)
class PersonalValues:
    """The personal values of one run: arrays by the names of its personal tensors.

    `context` is the state of the task's own train(). `buffers` are the local buffers of shared layers, by name
    (`[local] buffers = "local"`). `counters` are the integer buffers of the whole model. `version` is that of the
    shared model with which they were trained, "" if not known.
    """

    run: str
    arrays: Arrays
    buffers: Arrays
    counters: Mapping[str, int]
    identity: str = ""
    version: str = ""
    context: Arrays = field(default_factory=dict)


def save_values(folder: Path, run: str, state: ClientRunState) -> None:
    """Save the personal values of a run that has ended to a file of their own; a second call changes nothing.

    Only the latest `MAX_RUNS` files stay, so that an aggregator cannot fill the disk with ended runs.
    """
    if not (state.personal or state.context):
        return
    shared = _shared_metadata(folder, run, state.identity)
    buffers = _named_buffers(shared, state)
    context = {f"{CONTEXT}{name}": array for name, array in state.context.items()}
    metadata = {
        "run": run, "identity": state.identity, "counters": json.dumps(dict(state.counters)),
        "buffers": json.dumps(sorted(buffers)), "context": json.dumps(sorted(context)),
        "version": shared.get("version", ""),
    }  # fmt: skip
    private_folder(folder / FOLDER)
    existing = [path for path in _files(folder, run) if _metadata(path).get("identity") == state.identity]
    free = (folder / FOLDER / f"{run}{f'.{n}' if n else ''}.safetensors" for n in itertools.count())
    path = existing[0] if existing else next(path for path in free if not path.exists())
    write_atomically(path, save({**state.personal, **buffers, **context}, metadata))
    _keep_latest(folder / FOLDER, MAX_RUNS, path)


def saved_values(folder: Path, run: str, identity: str) -> PersonalValues | None:
    """Return the values that `save_values` saved for this run; None if there are none, or if their file is damaged."""
    found = (_read(path) for path in _files(folder, run))
    return next((one for one in found if one is not None and one.identity == identity), None)


def _files(folder: Path, run: str) -> list[Path]:
    """Return the files of the runs that have had this id, the one written first before the others."""
    found = (folder / FOLDER).glob(f"{run}*.safetensors")
    own = (path for path in found if path.stem == run or path.stem.removeprefix(f"{run}.").isdecimal())
    return sorted(own, key=lambda path: path.stat().st_mtime_ns)


def _read(path: Path) -> PersonalValues | None:
    """Return the values of a file; None if it is damaged."""
    try:
        found, metadata = load_file(path), _metadata(path)
        local, kept = set(json.loads(metadata["buffers"])), set(json.loads(metadata["context"]))
        counters = {str(name): int(value) for name, value in json.loads(metadata["counters"]).items()}
        arrays = {name: array for name, array in found.items() if name not in local | kept}
        context = {name.removeprefix(CONTEXT): found[name] for name in kept}
        buffers = {name: found[name] for name in local}
        run, identity, version = (metadata[name] for name in ("run", "identity", "version"))
        return PersonalValues(run, arrays, buffers, counters, identity, version, context)
    except READ_ERRORS:
        return None


def values_of(folder: Path, run: str) -> PersonalValues | None:
    """Return the last personal values of a run, whether it has ended here or not; None if this disk has none.

    Of several runs that had this id, it is the last one.
    """
    try:
        path = run_path(folder, run)
    except DataLost:
        return None
    state, problems = RunFolder(path).load()
    for _ in range(MAX_READS - 1):  # a commit removes the files of the one before it
        if problems:
            state, problems = RunFolder(path).load()
    if not (state.personal or state.context):
        return next((one for file in reversed(_files(folder, run)) if (one := _read(file)) is not None), None)
    shared = _shared_metadata(folder, run, state.identity)
    buffers, version = _named_buffers(shared, state), shared.get("version", "")
    return PersonalValues(run, state.personal, buffers, state.counters, state.identity, version, state.context)


class SharedModels:
    """Stores the shared part of each model that arrives in a run with personal layers, by the names of its tensors.

    `layout_of` returns the whole layout of a task's model, `min_free` the bytes of the disk that stay free. The caller
    holds the lock of `folder`, in which no other process writes.

    Invariant: no assignment fails because its model was not stored. Then the one before it stays.
    """

    def __init__(
        self, folder: Path, layout_of: Callable[[str], Layout], min_free: Callable[[], int] = no_bytes
    ) -> None:
        self._folder, self._layout_of, self._min_free = folder, layout_of, min_free
        self._stored: dict[str, tuple[str, int]] = {}  # run -> identity and version of what its file has
        for name in (".*.safetensors.*", f"{SHARED}/.*.safetensors.*", f"{SHARED}/*.draft"):  # left by power cuts
            for path in (folder / FOLDER).glob(name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def keep(self, assignment: Assignment, globs: tuple[str, ...], params: Vector, buffers: Vector | None) -> None:
        """Store the model of an assignment whose plan names personal layers, unless its file has that version."""
        has = assignment.identity, assignment.base_version
        if self._stored.get(assignment.run) != has:
            local = {} if isinstance(assignment.plan, str) else assignment.plan.get("local", {})
            with contextlib.suppress(DataLost, PlanError):
                data = self._shared(assignment, globs, params, buffers)
                self._write(_shared_path(self._folder, assignment.run), data, local.get("durability") != "exit")
                self._stored[assignment.run] = has

    def _shared(self, assignment: Assignment, globs: tuple[str, ...], params: Vector, buffers: Vector | None) -> bytes:
        whole = self._layout_of(assignment.task)
        shared = shared_layout(whole, globs)
        tensors = {t.name: params[t.offset : t.offset + t.size].reshape(t.shape) for t in shared.trained}
        if buffers is not None:
            tensors |= {t.name: values.reshape(t.shape) for t, values in float_values(shared, buffers)}
        return save(tensors, {
            "run": assignment.run, "task": assignment.task, "identity": assignment.identity,
            "version": str(assignment.base_version), "globs": json.dumps(globs), "layout": whole.text,
        })  # fmt: skip

    def _write(self, path: Path, data: bytes, is_durable: bool) -> None:
        """Replace the file; the owner of a slow disk (`durability = "exit"`) does not wait until it is durable."""
        require_room(self._folder, len(data), self._min_free())
        private_folder(path.parent)
        if is_durable:
            write_atomically(path, data)
        else:
            draft = path.with_suffix(".draft")  # no `*.safetensors`: a crash may leave it
            write_unsynced(draft, data)
            draft.replace(path)
        _keep_latest(path.parent, MAX_MODELS, path)


@dataclass(frozen=True)
class WholeModel:
    """The whole model of a run on this device, by the names of the task's state_dict.

    The shared layers are those of model version `version`. `personal` are the names of the personal tensors, `missing`
    those of tensors that the task's model() makes: frozen ones, and buffers that training does not change.
    """

    run: str
    task: str
    version: str
    globs: tuple[str, ...]
    tensors: Arrays
    personal: list[str]
    missing: list[str]

    def export(self, path: Path) -> None:
        """Write a .safetensors file, which loads without Thinwire."""
        from thinwire import __version__

        write_atomically(path, save(dict(self.tensors), {
            "format": "pt", "thinwire": __version__, "run": self.run, "task": self.task, "version": self.version,
            "personal_layers": " ".join(self.globs), "personal": " ".join(self.personal),
        }), mode=0o600)  # fmt: skip


def whole_model(folder: Path, run: str) -> WholeModel:
    """Return the whole model of a run; `NotFound` says which part of it this device does not have."""
    values = values_of(folder, run)
    if values is None or not values.arrays:
        why, hint = "its plan has none, or nothing was trained here", _at_aggregator(run)
        if (folder / "runs" / run / MARK).exists():
            why, hint = 'its client has them in memory ([local] durability = "exit")', "stop the client first"
        elif _shared_path(folder, run).exists():
            why, hint = "no training of it has ended here yet", "again after its next round"
        raise NotFound(f"{run} has no personal layers on this device", why=why, hint=hint)
    try:
        metadata = _shared_metadata(folder, values.run, values.identity)
        layout, globs = Layout.from_json(json.loads(metadata["layout"])), tuple(json.loads(metadata["globs"]))
        found = {**load_file(_shared_path(folder, values.run)), **values.buffers, **values.arrays}
    except READ_ERRORS as error:
        version = f"model version {values.version}" if values.version else "a model version that is not known"
        raise NotFound(
            f"this device keeps no shared layers of {run}",
            why=f"its personal layers were trained with {version}; shared layers stay of {MAX_MODELS} runs",
            hint=_at_aggregator(run),
        ) from error
    personal = personal_tensors(layout, globs)
    if wrong := [t.name for t in kept_floats(personal) if t.name not in found or found[t.name].shape != t.shape]:
        raise NotFound(
            f"the personal layers of {run} do not fit its shared layers: {wrong[0]}",
            why="the task's code on this device has changed since they were trained",
            hint="again after the next round of the run",
        )
    made, numbers = dict[str, Any](), {t.name for t in counted(layout)}
    for t in layout.tensors:
        if t.name in numbers:
            made[t.name] = np.full(t.shape, values.counters.get(t.name, 0), kept_type(t))
        elif t.name in found:
            made[t.name] = np.ascontiguousarray(found[t.name], kept_type(t)).reshape(t.shape)
    missing = [t.name for t in layout.tensors if t.name not in made]
    made |= {other: made[name] for other, name in layout.aliases if name in made}
    return WholeModel(run, metadata["task"], metadata["version"], globs, made, [t.name for t in personal], missing)


def _at_aggregator(run: str) -> str:
    return f"its shared layers, on the aggregator's machine: thinwire runs model {run} --out FILE"


@dataclass(frozen=True)
class KeptRun:
    """Describes what this device has of one run beside the number of its updates.

    `personal` is the number of personal tensors with values, `version` that of the shared layers ("" without any), `at`
    the time of the last write in seconds since 1970. A run is open until the device knows of its end.
    """

    run: str
    is_open: bool
    personal: int
    version: str
    size_bytes: int
    at: float


def kept_runs(folder: Path) -> list[KeptRun]:
    """Return the runs of which this device has more than the number of its updates, the one written last first."""
    names = {path.name for path in (folder / "runs").glob("*/")}
    names |= {path.stem.partition(".")[0] for path in (folder / FOLDER).rglob("*.safetensors")}
    found = [one for name in names if (one := _kept_run(folder, name)) is not None]
    return sorted(found, key=lambda one: -one.at)


def _kept_run(folder: Path, run: str) -> KeptRun | None:
    files = [path for path in (*_files(folder, run), _shared_path(folder, run)) if path.exists()]
    state = [path for path in (folder / "runs" / run).glob("*") if path.is_file()]
    is_open = any(path.name != STATE for path in state)
    if not (files or is_open):
        return None
    values = values_of(folder, run)
    stats = [path.stat() for path in (*files, *(state if is_open else ())) if path.exists()]
    return KeptRun(
        run, is_open, len(values.arrays) if values else 0, _metadata(_shared_path(folder, run)).get("version", ""),
        sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0),
    )  # fmt: skip


def delete_run(folder: Path, run: str) -> None:
    """Delete what this device has of a run, and of others that had its id, except for the number of its updates.

    The caller has made sure that no client has an open run in memory. If such a run goes on, the device reports that it
    gave up its state, and begins again.
    """
    if any(path.name != STATE for path in (folder / "runs" / run).glob("*")):
        place = RunFolder(run_path(folder, run))
        place.commit(replace(outbox.end_run(place.load()[0]), lost="given-up", references_from=NOT_KNOWN))
    for path in (*_files(folder, run), _shared_path(folder, run)):
        path.unlink(missing_ok=True)


def _shared_path(folder: Path, run: str) -> Path:
    return folder / FOLDER / SHARED / f"{run}.safetensors"


def _metadata(path: Path) -> Mapping[str, str]:
    """Return the metadata of a file; nothing if it is missing or damaged."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def _shared_metadata(folder: Path, run: str, identity: str) -> Mapping[str, str]:
    """Return the metadata of a run's shared part; nothing if it is that of another run with the same id."""
    metadata = _metadata(_shared_path(folder, run))
    return metadata if metadata.get("identity") == identity else {}


def _named_buffers(shared: Mapping[str, str], state: ClientRunState) -> Arrays:
    """Return the state's local buffers by name; none if the names are not known."""
    if state.buffers is None or not shared:
        return {}
    try:
        layout = shared_layout(Layout.from_json(json.loads(shared["layout"])), tuple(json.loads(shared["globs"])))
        return {t.name: values.reshape(t.shape) for t, values in float_values(layout, state.buffers)}
    except (*READ_ERRORS, PlanError):
        return {}


def _keep_latest(folder: Path, most: int, written: Path) -> None:
    """Keep the file that was just written and the latest others: after a clock was set back, it looks older."""
    others = [path for path in folder.glob("*.safetensors") if path != written]
    for path in sorted(others, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(others) - most + 1)]:
        path.unlink(missing_ok=True)
