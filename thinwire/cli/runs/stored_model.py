"""A model version out of a run's folder: by number of its round, the best, or the last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.places import aggregator_home
from thinwire.cli.runs.model_file import write_model_file

if TYPE_CHECKING:
    from thinwire.core import Layout, Vector
    from thinwire.core.types import Fixed
    from thinwire.store import ModelRow, RunRow, Store


AVERAGE = "average"


@dataclass(frozen=True)
class StoredModel:
    """A version with everything that a model consists of: what an algorithm keeps behind it is left out."""

    run: RunRow
    row: ModelRow
    layout: Layout
    params: Vector
    buffers: Vector
    fixed: Fixed
    metrics: Mapping[str, float]

    def about(self) -> dict[str, str]:
        """What the exported file says of itself."""
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
        }

    @property
    def statistics(self) -> str:
        """Whose float buffers (BatchNorm statistics and the like) the model has; "" of a model without any."""
        from thinwire.aggregation import float_buffers

        kept = str(dict(self.run.plan["local"]).get("buffers", AVERAGE))
        if not float_buffers(self.layout):
            return ""
        if kept != AVERAGE:
            return f'those of the first model, not of any client: [local] buffers = "{kept}"'
        return "the mean over clients" if self.row.version else "those of the first model"

    @property
    def frozen(self) -> list[str]:
        """Names of the tensors that are not in the file."""
        return [t.name for t in self.layout.of_role("frozen") if t.name not in self.fixed]

    def export(self, path: Path) -> list[str]:
        return write_model_file(
            path, self.layout, self.params, self.buffers, self.row.counters, self.fixed, self.about()
        )


def stored_model(store: Store, home: Path | None, run_id: str, which: str) -> StoredModel:
    """`which` is "last", "best" or a round's number (0: the first model).

    `NotFound` where this comes to the first model and 0 was not asked for: nobody takes an untrained model unawares.
    """
    from thinwire.aggregation.algorithms import algorithm_of, carried
    from thinwire.core import Layout, RunPlan
    from thinwire.core.errors import NotFound
    from thinwire.core.events import ModelStored
    from thinwire.server.model.versions import Versions

    run = store.run(run_id)
    version = _version(store, run, which)
    if version == 0 and which != "0":
        raise _untrained(run, which)
    row = next((m for m in store.models(run.run_id) if m.version == version), None)
    layout = Layout.from_json(run.layout)
    travels = carried(algorithm_of(RunPlan.from_json(run.plan)), layout)
    folder = Versions(aggregator_home(home).run(run.run_id), travels)
    if row is None or not folder.path(version).exists():
        raise NotFound(
            f"{run.run_id} no longer has the model of round {which}",
            why=f'its plan keeps "{run.plan["run"]["keep"]}"',
            hint='--round best or last; [run] keep = "all" keeps every round\'s',
        )
    stored = ModelStored(row.at, row.version, row.digest, row.file, row.parts, row.counters)
    params, buffers = folder.read(stored)
    fixed, metrics = folder.read_fixed(), _metrics(store, run, version)
    return StoredModel(run, row, layout, params[: layout.size], buffers, fixed, metrics)


def _untrained(run: RunRow, which: str) -> Exception:
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
    from thinwire.core.errors import NotFound, UsageError

    if which == "last":
        return run.version
    if which == "best":
        return run.version if run.best_version is None else run.best_version
    if not which.isdigit():
        raise UsageError(f"--round {which!r} cannot be", why="it is a number, best or last", hint="--round best")
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
    """What was measured of a version: stands beside the round that made it."""
    if version == 0:
        return run.metrics0
    found = [r.decisive for r in store.rounds(run.run_id) if r.version == version and r.metrics]
    return found[0] if found else {}
