"""Read models: frozen values of runs, devices and users, independent of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from thinwire.core.equipment import Equipment
from thinwire.core.events import RunStatus
from thinwire.core.fleet import DeviceRow, TaskReport
from thinwire.core.formatting import Reasons
from thinwire.core.run_events import plan_of_start

if TYPE_CHECKING:
    from thinwire.core.plan_values import PrivacySection

Source = Literal["devices", "sim"]
AssignmentOutcome = Literal["selected", "accepted", "aggregated", "aggregated-late", "dropped", "failed", "over"]
RATES = ("down", "up")  # kinds of measurements in bits/s
LINK_KINDS = (*RATES, "rtt")  # kinds of measurements that do not depend on the work
MEMORY_TEXT = "waiting for memory"  # the status text of a queued run that does not fit beside others begins so
AT_ONCE_BYTES = 14_600  # TCP's initial window (RFC 6928): fewer bytes take equally long at any bandwidth


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Holds bytes in both directions.

    `payload` are those in frames, and up in all messages of secure rounds; `wire` on the devices' sockets, None without
    a network.
    """

    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """Holds counts of assignments by outcome: `aggregated_count` of `aggregated`, and `late` of `aggregated-late`."""

    aggregated_count: int
    late: int
    dropped: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Holds the metrics of a model version, `clipped` as `RoundRow` describes."""

    metrics: dict[str, float]
    clipped: dict[str, Any] = field(default_factory=dict)

    @property
    def decisive(self) -> dict[str, float]:
        """Return the metrics on which `best` and `target` are decided, and which users see.

        No single client's values are in them.
        """
        return {**self.metrics, **self.clipped.get("means", {})}


@dataclass(frozen=True, kw_only=True)
class RunRow(Traffic, Outcomes, Measured):
    """Holds a run as it is now. Times are wall-clock seconds; `wire_*` is None without a network (simulation).

    `identity` is 64 random bits in hex, "" for a simulation. By it a device tells a run from a run of the same id in
    another state directory. `dense_*` are the bytes of the same transfers in plain float32.
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
    metrics0: dict[str, float]  # of the initial model, as `decisive` is of the others
    spread0: dict[str, list[float]]
    dense_up: int
    dense_down: int
    notes: list[Reasons] = field(default_factory=list)  # for users who follow the run
    totals: dict[str, Any] = field(default_factory=dict, compare=False)  # `RunTotals` of its closed rounds, as JSON
    identity: str = ""
    name: str = ""  # that a person gave it
    tags: list[str] = field(default_factory=list)
    archived_at: float | None = None
    deleted_at: float | None = None  # then only this row is left, and the devices' parts in the run
    deleted_by: str = ""

    @property
    def is_extended(self) -> bool:
        """Return True if the run was given more rounds after an end."""
        return any(code == "extended" for note in self.notes for code, _ in note)

    @property
    def first_plan(self) -> dict[str, Any]:
        """Return the plan that the run was started with: `plan` without what its extensions changed."""
        return plan_of_start(self.plan, self.notes)


@dataclass(frozen=True, kw_only=True)
class RoundRow(Traffic, Outcomes, Measured):
    """Holds a round. `late`, `dropped` and `failed` count this round's assignments by outcome, whenever it was decided.

    The field `aggregated` lists the updates aggregated in this round, including late ones of earlier rounds. `metrics`
    and `spread` measure the version that the round made. `clipped` is {} or, if clients' values were clipped, holds
    `means` and `clients`: the metrics on which `best` and `target` are decided, and the clipped metrics by client.

    Bytes down are those of this round's assignments. Bytes up are those of the replies that arrived in it, whichever
    round they belong to.

    `secure_sum` is {} or, once a round with secure aggregation has removed the masks, holds `survivors` (the clients in
    the sum), `weight`, `norm` of the mean update, `clip`, `next_clip`, `elapsed_s` and `unmask_s`.

    `downtimes` lists the aggregator's downtimes during the round as [from, to] by the wall clock. `missed_s` is the
    time for which the run's clock stood still because of them. It includes the time between the journal's last event
    and the aggregator's end.
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
    target_updates: int
    min_updates: int
    considered: int  # devices that were online or busy when it opened
    selected: list[str]
    not_selected: dict[str, Reasons]  # device -> reasons, but for those that were not sampled
    aggregated: list[str]
    seconds: float | None
    spread: dict[str, list[float]]
    train_metrics: dict[str, float]
    spent: dict[str, float]
    slowest: str
    deadline_reason: Reasons = ()
    codecs: dict[str, str] = field(default_factory=dict)  # device -> its codec, if the plan has a codec ladder
    codec_reasons: dict[str, Reasons] = field(default_factory=dict)
    sampling: Reasons = ()  # selection reason, if the weights were not uniform
    downtimes: list[list[float]] = field(default_factory=list)
    missed_s: float = 0.0
    ignored: int = 0  # number of metrics not recorded, since fewer than half of its updates carried them
    secure_sum: dict[str, Any] = field(default_factory=dict)
    detail: str = ""  # why a round with secure aggregation has no sum
    explanation: dict[str, Any] = field(default_factory=dict)  # of a closed round; store/explaining.py reads it
    until_s: float | None = None  # of a closed round: sums from the run's start until its end
    until_payload: int | None = None
    until_wire: int | None = None
    replied: int = 0  # selected devices whose reply was in when the round closed: nothing later changes it
    unanswered: int = 0  # those that had neither replied nor failed then
    changed: int = field(default=0, compare=False)  # as of a round
    arrived: int = 0  # of an open round: own assignments with a recorded reply that is not aggregated yet

    @property
    def not_sampled(self) -> int:
        """Return how many of the considered devices are not selected, and have no other reason."""
        return max(0, self.considered - len({*self.selected, *self.not_selected}))

    @property
    def hides_sample(self) -> bool:
        """Return True if Poisson sampling selected its clients: nothing tells who and how many they are."""
        return not self.selected

    @property
    def answered(self) -> int:
        """Return the number of selected devices that have replied so far; failures do not count."""
        return self.aggregated_count + self.arrived + self.dropped


@dataclass(frozen=True, kw_only=True)
class PointRow(Measured):
    """Holds a point of a run's curves: the metrics of a round, and the sums from the run's start until its end."""

    round: int
    until_s: float | None
    until_payload: int | None
    spread: dict[str, list[float]]
    train_metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """Holds a closed phase of a round with secure aggregation.

    `seconds` is its length: from the end of the phase before it, or from the round's beginning, until `elapsed_s`.
    `received` has the bytes of each device's message in the order of arrival. `dropped` are the devices that dropped
    out in this phase.
    """

    round: int
    phase: str
    closed_at: float
    elapsed_s: float
    seconds: float
    received: dict[str, int]
    dropped: list[str]

    @property
    def received_bytes(self) -> int:
        """Return the bytes of all messages of the phase."""
        return sum(self.received.values())


@dataclass(frozen=True, kw_only=True)
class UpdateRow(Traffic):
    """Holds an assignment and its outcome. `*_at` is the aggregator's wall clock; `*_s` is the device's own stopwatch.

    `began_at` is the first byte of the reply. `failed_at` is the time at which the aggregator knew that no reply would
    come; None if an older aggregator did not record it.

    `delivered_at` is the first recorded delivery of the assignment, `pulled_at` the last: a device that was killed gets
    it again after its restart.

    `metrics` holds each sum divided by its count, as the device measured it.

    `selection_reason` is the reason of an assignment in the middle of its round, and `instead_of` the device that it
    replaces. `work_reason` explains the number of steps if the plan leaves it to the device's speed. `weight_reason`
    says why an update counts for less than its reply claims, or that the reduction chose it.
    """

    run_id: str
    round: int
    device: str
    assignment_id: str
    update_id: str
    outcome: AssignmentOutcome
    reason: str
    aggregated_round: int | None
    staleness: int
    assigned_at: float | None
    pulled_at: float | None
    began_at: float | None
    arrived_at: float | None
    download_s: float | None
    queue_s: float | None
    evaluate_s: float | None
    train_s: float | None
    encode_s: float | None
    load_s: float | None
    commit_s: float | None
    examples: int
    steps: int
    norm: float | None
    residual_norm: float | None
    requests: int
    metrics: dict[str, float]
    residual_ratio: float | None = None  # norm of the residual over that of the update, both as they were encoded
    selection_reason: Reasons = ()
    instead_of: str = ""
    work_reason: Reasons = ()
    weight_reason: str = ""
    state_lost: str = ""  # if the device lost its state: what it found, on the first reply after that
    failed_at: float | None = None
    delivered_at: float | None = None
    clipped: list[str] = field(default_factory=list)  # names of the metrics that were clipped for `best` and `target`
    changed: int = field(default=0, compare=False)  # number of the transaction that changed the row last


@dataclass(frozen=True)
class WorkRow:
    """Holds an assignment, with what a table of clients shows of it."""

    round: int
    device: str
    outcome: AssignmentOutcome
    assigned_at: float | None
    arrived_at: float | None
    examples: int
    residual_ratio: float | None


@dataclass(frozen=True)
class MeasureRow:
    """Holds measurements of one device: the last `samples` (amount, seconds) of `kind`, for `work` ("" for its link).

    Rates of down and up are in bits/s; nine of ten transfers reached `p90`. Times of rtt, step, evaluate and encode are
    in seconds, and pass is in steps of an epoch. The percentiles are None if the samples do not suffice.
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
        """Return True if a rate is only a lower bound, because every sample is too small to measure bandwidth.

        A sample within TCP's initial window takes only round trips.
        """
        return self.kind in RATES and all(size <= AT_ONCE_BYTES for size, _ in self.samples)


@dataclass(frozen=True, kw_only=True)
class ClientRow(Traffic, Outcomes):
    """Holds a device's part in one run."""

    run_id: str
    device: str
    selected: int
    arrived: int
    sequence: int
    last_outcome: str
    last_at: float | None


@dataclass(frozen=True)
class ModelRow:
    """Holds a model version; `file` is a path in the run's folder."""

    run_id: str
    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]]
    counters: dict[str, int]
    at: float


@dataclass(frozen=True)
class DeviceInfo:
    """Holds a device and its contributions: `hello` as JSON, `updates` and `payload_up` over all runs on devices.

    `seen_at` is the time of its last registration. `last_seen_at` is its last recorded contact; an online device may
    have been heard later.
    """

    row: DeviceRow
    online: bool
    seen_at: float | None
    last_seen_at: float | None
    hello: dict[str, Any]
    tags: list[str]
    updates: int
    payload_up: int
    last_outcome: str
    last_run: str = ""  # in which that was
    last_is_over: bool = False  # of that run: nothing is left to do about its failure

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks that the device reported at its last registration."""
        return list(self.hello.get("tasks", ()))

    @property
    def has(self) -> Equipment:
        """Return the equipment that the device reported at its last registration."""
        said = self.hello.get("has", {})
        return Equipment(**{field.name: said.get(field.name) for field in fields(Equipment)})


@dataclass(frozen=True)
class CommandRow:
    """Holds what a person left for the aggregator's service: to stop a run, to revoke a device."""

    id: int
    kind: str
    run_id: str
    args: Mapping[str, Any]
    who: str
    at: float


def privacy_section(run: RunRow) -> PrivacySection:
    """Return the table [privacy] of the run's plan."""
    from thinwire.core.plan_values import PrivacySection  # pydantic, which a list of runs does not need

    return PrivacySection.model_validate(run.plan.get("privacy") or {})


def population_of(run: RunRow) -> str:
    """Return the clients whose spending counts together, as server/privacy_budget.py names them."""
    if run.source == "sim":  # each simulated run has its own
        return f"simulation of {run.run_id}"
    return privacy_section(run).population or run.task
