"""The schemas of the API's responses about lists of runs, comparisons, plans that are checked, and ordered runs.

`*_at` are wall-clock seconds since 1970, `*_s` are durations in seconds; null is what is not known.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from thinwire.web.schemas import Answer


class RunLine(Answer):
    """A run as a line of the table of runs; `best` is the best value of the plan's `metric`, or the latest one."""

    run_id: str
    name: str = ""
    tags: tuple[str, ...] = ()
    status: str
    sentence: str
    task: str
    source: str
    rounds_closed: int
    rounds_total: int
    version: int
    metric: str
    best: float | None
    payload_up: int
    payload_down: int
    dense_up: int
    seconds: float | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    disk_bytes: int | None


class RunList(Answer):
    """A page of runs: those from the place `first` on, of `total` that match; `statuses` counts all runs."""

    total: int
    first: int
    statuses: dict[str, int]
    runs: list[RunLine]


class CurvePoint(Answer):
    """A measured round of a compared run: seconds and payload bytes until its end, and its metrics."""

    round: int
    seconds: float | None
    bytes: int | None
    metrics: dict[str, float]


class RunCurve(Answer):
    """The measured rounds of a compared run, at most 400 of them."""

    run_id: str
    points: list[CurvePoint]


class Compared(Answer):
    """Runs side by side, as `thinwire runs compare --json` prints them, and their curves.

    `apart` are stopped and failed runs. `differs` has the values of each key in which the plans differ, by run.
    """

    metric: str
    target: float | None
    metrics: list[str]
    rows: list[dict[str, Any]]
    apart: list[dict[str, Any]]
    differs: dict[str, dict[str, str]]
    curves: list[RunCurve]


class Given(BaseModel):
    """A plan to check, as TOML (`text`) or as values by section and key (`plan`)."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(default=None, max_length=64_000)
    plan: dict[str, Any] | None = None


class NewRun(BaseModel):
    """A plan to run, as values by section and key."""

    model_config = ConfigDict(extra="forbid")

    plan: dict[str, Any]


class Wrong(Answer):
    """A problem of a plan: its `place` is section and key, or empty; `hint` is what to try."""

    place: list[str]
    what: str
    why: str
    hint: str


class DeviceCost(Answer):
    """The usual seconds of one device in a round; `slow_s` is kept by nine of ten. `missing` was never measured."""

    device: str
    online: bool
    down_s: float | None
    train_s: float | None
    up_s: float | None
    round_s: float | None
    slow_s: float | None
    missing: str


class Cost(Answer):
    """The estimated cost of a run: bytes of one client in one round, and seconds by the measured links.

    `up_least` are the bytes at the most compressed codec of a ladder. `unknown` is the reason of what is null.
    """

    task: str
    parameters: int | None
    layout_from: str
    clients: int
    rounds: int
    up_bytes: int | None
    up_least: int | None
    down_bytes: int | None
    dense_bytes: int | None
    round_s: float | None
    run_s: float | None
    slowest: str
    measured: int
    unknown: str
    devices: list[DeviceCost]


class PlanChecked(Answer):
    """What was found of a plan. `given` are its keys that differ from their defaults, and `toml` is the same as text.

    `first_model` says where the first model would come from. `cost` is null while the plan has problems.
    """

    ok: bool
    problems: list[Wrong]
    given: dict[str, dict[str, Any]]
    toml: str
    digest: str
    first_model: str
    notes: list[str]
    cost: Cost | None


class KnownTasks(Answer):
    """The tasks that approved devices have, or that an earlier run had; by name, with the number of devices."""

    tasks: dict[str, int]


class Begun(Answer):
    """An order to start a run: `run_id` once it is in the queue, or `error`, `why` and `hint` if it was refused."""

    order: int
    run_id: str = ""
    error: str = ""
    why: str = ""
    hint: str = ""
