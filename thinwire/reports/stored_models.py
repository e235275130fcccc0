"""The model versions of a run as .safetensors files with the names of the state_dict, which load without Thinwire.

Tied weights are stored under each of their names, so that `load_state_dict` takes the file unchanged. All buffers are
included. Frozen tensors are left out, because the task's model() makes them, unless it draws them at random. Personal
layers are left out too: they never leave their clients.

`StoredModel` is a version of a run: that of a round, the best or the last. `kept_models` lists the versions whose files
are still there. `thinwire runs model` and the dashboard's download write the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire.core.statedir import AggregatorHome
from thinwire.core.tensor_header import LENGTH_BYTES

if TYPE_CHECKING:
    from thinwire.core import Layout, Vector
    from thinwire.core.types import Fixed
    from thinwire.store import ModelRow, RunRow, Store

AVERAGE: Final = "average"
ALIGNED: Final = 8  # bytes: the format pads its header, so that tensors can be mapped
LONGEST_NUMBER: Final = 10  # digits of a round, and more than any has
MAX_LISTED: Final = 20  # newest versions of a list: with `[run] keep = "all"` a run has one a round


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
        """Return the metadata of the exported file; the last ones say whether a private run may begin with it."""
        from thinwire import __version__
        from thinwire.store.read_models import population_of, privacy_section

        init = str(self.run.plan["run"].get("init", ""))

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
            "source": self.run.source,
            "privacy": privacy_section(self.run).mode,
            "population": population_of(self.run),
            **({"init": init} if init and self.run.source == "sim" else {}),
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

    def to_safetensors(self) -> tuple[bytes, list[str]]:
        """Return the bytes of the .safetensors file, and the names of its tensors, sorted; `about` is its metadata."""
        from safetensors.numpy import save

        from thinwire.aggregation.downlink import named_tensors

        tensors = named_tensors(self.layout, self.params, self.buffers, self.row.counters, self.fixed)
        tied = " ".join(f"{other}={name}" for other, name in self.layout.aliases)
        return _in_order(save(tensors, {**self.about(), "format": "pt", "tied": tied})), sorted(tensors)

    def export(self, path: Path) -> list[str]:
        """Write the model atomically to a .safetensors file and return the tensors' names."""
        from thinwire.core.statedir import write_atomically

        data, names = self.to_safetensors()
        write_atomically(path, data, mode=0o644)
        return names


def _in_order(data: bytes) -> bytes:
    """Return a .safetensors file with its metadata sorted: the library writes them in another order each time."""
    end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    header = json.loads(data[LENGTH_BYTES:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNED)
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, memoryview(data)[end:]))


@dataclass(frozen=True)
class KeptModel:
    """Holds a model version whose file is there; `round` made it, 0 for the first model. `size` is in bytes, as stored.

    `metrics` are those of the version, empty if it was not evaluated or if the run is private.
    """

    version: int
    round: int
    metrics: Mapping[str, float]
    size: int
    best: bool
    latest: bool


def kept_models(store: Store, home: AggregatorHome, run: RunRow, most: int = MAX_LISTED) -> list[KeptModel]:
    """Return the kept versions of a run, newest first: `most` of them, and the best one."""
    found = kept_versions(home, run.run_id)
    shown = {*found[-most:], *({run.best_version} & set(found) if run.best_version is not None else ())}
    made = _rounds_by_version(store, run, shown)
    return [
        KeptModel(
            row.version, made[row.version][0] if row.version else 0,
            run.metrics0 if row.version == 0 else made[row.version][1], sum(length for _, length, _ in row.parts),
            best=row.version == run.best_version, latest=row.version == run.version,
        )
        for row in reversed(store.models(run.run_id, shown))
        if row.version == 0 or row.version in made
    ]  # fmt: skip


def kept_versions(home: AggregatorHome, run_id: str) -> list[int]:
    """Return the versions of a run whose files are there, in order; a version that is not released yet is hidden."""
    stems = (path.stem[1:] for path in (home.root / "runs" / run_id).glob("v*.model"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def _rounds_by_version(
    store: Store, run: RunRow, versions: Collection[int]
) -> dict[int, tuple[int, Mapping[str, float]]]:
    """Return the number of the round that made each version, and the version's metrics."""
    made: dict[int, tuple[int, Mapping[str, float]]] = {}
    for row in store.rounds_with(run.run_id, versions):
        assert row.version is not None
        number, metrics = made.get(row.version, (row.round, {}))
        made[row.version] = number, metrics or (row.decisive if row.metrics else {})
    return made


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
    from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
    from thinwire.aggregation.downlink import read_fixed, read_version
    from thinwire.core import Layout, RunPlan
    from thinwire.core.errors import NotFound

    rows, folder = store.models(run.run_id, [version]), home.root / "runs" / run.run_id
    layout = Layout.from_json(run.layout)
    travels = transmitted_layout(algorithm_of(RunPlan.from_json(run.plan)), layout)
    if not rows or not (folder / rows[0].file).exists():
        raise NotFound(
            f"{run.run_id} no longer has the model of round {which or version}",
            why=f'its plan keeps "{run.plan["run"]["keep"]}"',
            hint='--round best or last; [run] keep = "all" keeps every round\'s',
        )
    [row] = rows
    params, buffers = read_version(folder / row.file, travels, row.version, row.digest, row.parts)
    fixed, metrics = read_fixed(folder, travels), _metrics(store, run, version)
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
    if not (which.isascii() and which.isdigit() and len(which) < LONGEST_NUMBER):
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
    return _rounds_by_version(store, run, [version]).get(version, (0, {}))[1]
