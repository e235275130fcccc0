"""Where a run's first model comes from: the task, a file, another run, or later a device ([run] init)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.client.initial import Initial
    from thinwire.core import RunPlan, Vector
    from thinwire.store import Store


def first_model(
    store: Store, home: Path | None, plan: RunPlan, file: Path, made: Initial
) -> tuple[Vector, Vector, Mapping[str, int]]:
    """(params, buffers, counters) that the plan says to begin with; a relative file stands beside the plan or here."""
    from thinwire.cli.runs.model_file import read_model_file
    from thinwire.cli.runs.stored_model import stored_model
    from thinwire.core.errors import TaskError

    init = plan.run.init
    if init in ("", "device"):  # the device's own is asked for when the run begins
        return made.vector, made.buffers, made.counters
    if init.startswith("run:"):
        name, _, which = init.removeprefix("run:").partition("@")
        other = stored_model(store, home, name, which or "last")
        if other.layout.digest != made.layout.digest:
            raise TaskError(
                f"the model of {other.run.run_id} is not one of this task",
                why="its tensors have other names or shapes",
                hint="the same task, or leave [run] init out",
            )
        return other.params, other.buffers, other.row.counters
    path = Path(init).expanduser()
    beside = file.absolute().parent / path
    return read_model_file(beside if beside.exists() else path, made.layout, made.buffers, made.fixed)
