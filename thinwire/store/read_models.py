"""What is read of runs: plain frozen values, free of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from thinwire.core.events import RunStatus
from thinwire.core.fleet import DeviceRow, TaskReport
from thinwire.core.types import Equipment

Source = Literal["devices", "sim"]
Outcome = Literal["asked", "accepted", "folded", "late", "dropped", "failed", "over"]
RATES = ("down", "up")  # kinds of measures in bits/s
AT_ONCE_BYTES = 14_600  # TCP's first window (RFC 6928): so little takes as long on any bandwidth


@dataclass(frozen=True)
class RunRow:
    """A run as it is now. Times are wall-clock seconds; `wire_*` is None where no wire is (simulation).

    `identity`: 64 random bits in hex, by which a device tells a run from others of the same id in other state
    directories; "" for a simulation.

    `dense_*`: bytes of the same exchange in plain float32. `late`, `dropped`, `failed`: asks that ended so.
    """

    run_id: str
    task: str
    source: Source
    status: RunStatus
    status_text: str
    exit_code: int
    plan: dict[str, Any]
    layout: dict[str, Any]
    size: int
    task_report: TaskReport
    created_at: float
    started_at: float | None
    finished_at: float | None
    rounds_total: int
    rounds_closed: int
    version: int
    model_digest: str
    model_file: str
    best_version: int | None
    best_value: float | None
    metrics: dict[str, float]  # of the version measured last
    metrics0: dict[str, float]  # of the initial model; what `decisive` is of others
    spread0: dict[str, list[float]]
    folded_count: int
    late: int
    dropped: int
    failed: int
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    dense_up: int
    dense_down: int
    clipped: dict[str, Any] = field(default_factory=dict)  # of `metrics`, as in RoundRow
    notes: list[str] = field(default_factory=list)  # what the plan comes to here, for who follows the run
    identity: str = ""

    @property
    def decisive(self) -> dict[str, float]:
        """The metrics that `best` and `target` go by, which is what people are shown: no one client's are in them."""
        return {**self.metrics, **self.clipped.get("means", {})}


@dataclass(frozen=True)
class RoundRow:
    """One round. `late`, `dropped`, `failed` count this round's asks by what became of them, whenever it did.

    `folded` are the updates that made its step (late ones of earlier rounds among them); `metrics` and `spread`
    measure the version that it made. `clipped` is empty, or says of these metrics the `means` that `best` and `target`
    go by where clients' values were clipped, and by client (`clients`) which were. Bytes down are those of this round's
    asks, bytes up those of the answers that came in it, whenever they were asked for. `away`: each time that the
    aggregator ended while the round was open, [from, to] by the wall clock, and where that is known a third number, by
    how many seconds that clock was set in between; `missed_s`: for how long the run's clock stood still for that, which
    is also from the last event of the journal before it ended.
    """

    run_id: str
    round: int
    opened_at: float
    closed_at: float | None
    reason: str
    base_version: int
    version: int | None
    deadline_s: float
    codec: str
    target: int
    floor: int
    candidates: list[str]
    asked: list[str]
    not_asked: dict[str, str]  # device -> why
    folded: list[str]
    folded_count: int  # this round's own asks that were folded in time
    late: int
    dropped: int
    failed: int
    seconds: float | None
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    metrics: dict[str, float]
    spread: dict[str, list[float]]
    train_metrics: dict[str, float]
    spent: dict[str, float]
    slowest: str
    deadline_reason: str = ""
    codecs: dict[str, str] = field(default_factory=dict)  # device -> its own, where the plan has a ladder
    codec_reasons: dict[str, str] = field(default_factory=dict)
    drawn: str = ""  # how those who were asked were drawn, where not all had the same odds
    away: list[list[float]] = field(default_factory=list)
    missed_s: float = 0.0
    clipped: dict[str, Any] = field(default_factory=dict)
    ignored: int = 0  # metrics that its updates carried and that are not recorded: fewer than half carried each
    arrived: int = 0  # own asks whose answers are here and not folded yet, as far as is recorded; of an open round

    @property
    def decisive(self) -> dict[str, float]:
        """The metrics that `best` and `target` go by, which is what people are shown: no one client's are in them."""
        return {**self.metrics, **self.clipped.get("means", {})}

    @property
    def answered(self) -> int:
        """How many of those asked have answered so far; who failed has not."""
        return self.folded_count + self.arrived + self.dropped


@dataclass(frozen=True)
class UpdateRow:
    """One ask and what came of it. `*_at`: wall clock of the aggregator; `*_s`: the device's own stopwatch.

    `began_at` is the first byte of the answer, `failed_at` when it was known that none comes (None where an older
    aggregator did not keep that). `taken_at` is when the ask was taken up first, as far as that was seen, `pulled_at`
    when it was last: a device that is killed takes it up again when it is back. `metrics`: each sum over its count, as
    the device measured it. Of one asked in the middle of its round `asked_why` says what made it needed, and
    `instead_of` whose place it took; `work_reason` says why so many steps, where the plan leaves them to the device's
    speed.
    """

    run_id: str
    round: int
    device: str
    ask_id: str
    update_id: str
    outcome: Outcome
    reason: str
    folded_round: int | None
    staleness: int
    asked_at: float | None
    pulled_at: float | None
    began_at: float | None
    arrived_at: float | None
    download_s: float | None
    queue_s: float | None
    evaluate_s: float | None
    train_s: float | None
    encode_s: float | None
    examples: int
    steps: int
    norm: float | None
    residual_norm: float | None
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None
    requests: int
    metrics: dict[str, float]
    residual_ratio: float | None = None  # norm of the residual over that of the change, both as they were encoded
    asked_why: str = ""
    instead_of: str = ""
    work_reason: str = ""
    state_lost: str = ""  # what the device found of its state, where this is its first answer without what that held
    failed_at: float | None = None
    taken_at: float | None = None
    clipped: list[str] = field(default_factory=list)  # which of `metrics` were, in what `best` and `target` go by


@dataclass(frozen=True)
class MeasureRow:
    """What is known of one device: the last `samples` (how much, seconds) of `kind`, for `work` ("" for its link).

    Kinds: down, up (`p50`, `p90` in bits/s: nine of ten transfers had p90), rtt, step, evaluate, encode (seconds), pass
    (steps of an epoch). None while the samples do not say.
    """

    device: str
    kind: str
    work: str
    samples: list[list[float]]
    p50: float | None
    p90: float | None
    at: float

    @property
    def least(self) -> bool:
        """Whether a rate of it is only the least that it may be: all that was sent takes round trips alone."""
        return self.kind in RATES and all(size <= AT_ONCE_BYTES for size, _ in self.samples)


@dataclass(frozen=True)
class ClientRow:
    """A device's part in one run."""

    run_id: str
    device: str
    asked: int
    arrived: int
    folded_count: int
    late: int
    dropped: int
    failed: int
    sequence: int
    last_outcome: str
    last_at: float | None
    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None


@dataclass(frozen=True)
class ModelRow:
    """A model version; `file` lies in the run's folder."""

    run_id: str
    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]]
    counters: dict[str, int]
    at: float


# What is read of devices and people, and of what they did and want done: plain frozen values, free of the database.


InvitationState = Literal["open", "used", "expired", "withdrawn"]


@dataclass(frozen=True)
class DeviceInfo:
    """A device with what it did: `hello` as JSON, `updates` and `payload_up` over all runs on devices.

    `seen_at`: when it came last; `heard_at`: when it was last heard of, which of one that is online is at least that.
    """

    row: DeviceRow
    online: bool
    seen_at: float | None
    heard_at: float | None
    hello: dict[str, Any]
    updates: int
    payload_up: int
    last_outcome: str

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return list(self.hello.get("tasks", ()))

    @property
    def has(self) -> Equipment:
        said = self.hello.get("has", {})
        return Equipment(**{field.name: said.get(field.name) for field in fields(Equipment)})


@dataclass(frozen=True)
class Invited:
    """An invitation at the only moment at which its secret (32 hex digits) is known. `name` "": any that is free."""

    id: int
    secret: str
    name: str
    expires_at: float


@dataclass(frozen=True)
class InvitationRow:
    """An invitation as it is listed; `used_by` is the device that came with it."""

    id: int
    name: str
    state: InvitationState
    created_at: float
    expires_at: float
    approve_manually: bool
    who: str
    used_by: str
    used_at: float | None


@dataclass(frozen=True)
class DeviceAction:
    """What was done to a device's row: enrol, join, add, approve, revoke, leave, rename; or invite and withdraw."""

    at: float
    who: str
    device: str
    what: str
    detail: str


@dataclass(frozen=True)
class DoorNote:
    """A refusal of the door; `name` as it was said, which proves nothing, `why` as only the operator may know it."""

    at: float
    kind: str
    address: str
    name: str
    why: str


@dataclass(frozen=True)
class Order:
    """What a person wants done."""

    id: int
    kind: str
    run_id: str
    args: Mapping[str, Any]
    who: str
    at: float
