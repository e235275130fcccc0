"""These events are the facts of a run: the journal stores them, reports show them, and a resume replays them.

Each event is a frozen dataclass of plain JSON values. Times are wall-clock seconds since 1970, which are shown and
decide nothing. `elapsed_s` counts on the run's own clock, which stops while the aggregator is down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from thinwire.core.formatting import Capped, Reasons

CloseReason = Literal["all", "enough", "deadline", "too-few", "buffer", "stopped", "aborted"]
DropReason = Literal["late", "stale", "bad-payload", "too-few", "duplicate", "revoked", "stopped", "aborted"]
RunStatus = Literal["preparing", "queued", "waiting", "running", "paused", "done", "failed", "stopped"]
ENDED: tuple[RunStatus, ...] = ("done", "failed", "stopped")  # statuses of a run that is over
NO_STEP: tuple[CloseReason, ...] = ("too-few", "stopped", "aborted")  # reasons of rounds that left the model as it was
OVER = "over"  # kind of failure: the run ended before the reply was aggregated
ROUND_OVER = "its round ended before its update was there"  # text of a failure of the kind stale


@dataclass(frozen=True)
class Event:
    """Holds something that happened; `at` is the wall-clock time."""

    at: float


@dataclass(frozen=True)
class RunStatusChanged(Event):
    """Reports the run's status, with a sentence that gives the reason ("waiting: 3 of 8 devices (missing pi-04)")."""

    status: RunStatus
    text: str
    exit_code: int = 0


@dataclass(frozen=True)
class RunNoted(Event):
    """Holds a note for the operator, such as an effect of the plan in this run that may not be intended."""

    note: Reasons


@dataclass(frozen=True)
class ModelStored(Event):
    """Reports that a model version is durable in `file`; clients are sent the same `parts` (name, length, SHA-256).

    `digest` is the SHA-256 of the trained float32 bytes, `state` that of the file with the server optimizer's state in
    the same folder ("" without one). `counters` are the model's integer buffers.
    """

    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]] = field(default_factory=list)
    counters: Mapping[str, int] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True)
class ReplicaStored(Event):
    """Reports that a version's replica is durable: the model that the clients have under a compressed downlink.

    `digest` is the SHA-256 of its float32 bytes. `file` and `parts` are the full replica. `change` and `change_parts`
    are the encoded difference that leads to it from the version before. A version without this event is sent as its
    `ModelStored` describes.
    """

    version: int
    digest: str
    file: str
    parts: list[tuple[str, int, str]]
    change: str
    change_parts: list[tuple[str, int, str]]


@dataclass(frozen=True)
class RoundOpened(Event):
    """Holds every decision about a round but its clients' work, journalled before any of its assignments leaves.

    `codec` is the codec of most assignments. With a codec ladder each device has its own in `codecs`, and `standings`
    hold its progress towards a less compressed rung (server/policy/assignment_terms.py).
    A round considers each device that is online or busy: it selects it, or `reasons` say why not, or it is not sampled.
    The event holds how this set differs from that of the round before, and its size `considered`.
    """

    round: int
    elapsed_s: float
    base_version: int
    base_digest: str
    added: list[str]  # considered now, and not when the round before opened
    assignments: dict[str, str]  # device -> assignment_id, in the order of selection
    codec: str
    deadline_s: float
    target_updates: int
    min_updates: int
    reasons: dict[str, Reasons] = field(default_factory=dict)  # not selected -> why; others were not sampled
    references_from: int = 0  # first round whose state at both ends counts: ef21, scaffold, feddyn
    deadline_reason: Reasons = ()
    codecs: dict[str, str] = field(default_factory=dict)  # device -> its own, if the plan has a ladder
    codec_reasons: dict[str, Reasons] = field(default_factory=dict)
    standings: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (rung above, rounds it fitted)
    later: list[str] = field(default_factory=list)  # selected too, for concurrency slots that become free
    sampling: Reasons = ()  # how clients were sampled, if not uniformly
    removed: list[str] = field(default_factory=list)  # considered when the round before opened, and not now
    considered: int = 0  # number of devices
    device_s: float = 0.0  # device-seconds that the run has used; runs that share devices take turns by it


@dataclass(frozen=True)
class RoundBecameCurrent(Event):
    """Reports that a pipelined round became the current round: its deadline starts now."""

    round: int
    elapsed_s: float


@dataclass(frozen=True)
class ClientSelected(Event):
    """Holds an assignment, journalled before the assignment leaves; after a crash the assignment is sent from it.

    `RoundOpened`, in the same commit, has decided the round's first assignments: for these the fields from `elapsed_s`
    to `instead_of` keep their defaults. A later assignment (a replacement, or the next one for a free concurrency slot)
    sets them. `why` is the reason for a later one, and `instead_of` the device that it replaces.

    `steps` of `batch` examples are the client's own amount of work, if the plan derives it from the client's speed.
    `evaluates` is False for a client that only trains, if the plan lets a share of the clients evaluate.
    `codec` is set for a later assignment if the plan has a codec ladder.
    """

    round: int
    device: str
    assignment_id: str
    payload_bytes: int
    elapsed_s: float = 0.0
    base_version: int = 0
    deadline_s: float = 0.0
    why: Reasons = ()
    instead_of: str = ""
    steps: int = 0
    batch: int = 0
    work_reason: Reasons = ()
    codec: str = ""
    codec_reason: Reasons = ()
    evaluates: bool = True


@dataclass(frozen=True)
class AssignmentDelivered(Event):
    """Reports that an assignment was delivered, or that its device confirmed it; it decides nothing."""

    round: int
    device: str
    assignment_id: str


@dataclass(frozen=True)
class FullModelSent(Event):
    """Reports that a device got its assignment again with the whole model.

    The device did not have the version from which the encoded differences of its assignment start.
    """

    round: int
    device: str
    assignment_id: str
    payload_bytes: int


@dataclass(frozen=True)
class UpdateAccepted(Event):
    """Reports that an update counts for this round; updates are aggregated in the order of these events.

    `header` is the JSON of the reply's header, with only those of its metrics that the run records; `ignored` counts
    the others.
    """

    round: int
    assignment_round: int
    device: str
    assignment_id: str
    update_id: str
    staleness: int
    discount: float
    late: bool
    elapsed_s: float
    header: dict[str, Any]
    ignored: int = 0


@dataclass(frozen=True)
class StateLost(Event):
    """Reports that a device started the run again: its residual is lost, and this update is the first one without it.

    `why` is what the device found of its state: missing, older (than what it had sent), damaged, or unsaved. Unsaved
    means that the device was killed before it was durable. With `of another shape`, only personal layers began again.
    """

    round: int
    device: str
    update_id: str
    why: str


@dataclass(frozen=True)
class UpdateAggregated(Event):
    """Reports that an update was aggregated, in `aggregate_s` seconds."""

    round: int
    update_id: str
    aggregate_s: float


@dataclass(frozen=True)
class UpdateDropped(Event):
    """Reports that an update does not count; docs/reference/failures.md explains each reason, `detail` the case."""

    round: int
    assignment_round: int
    device: str
    assignment_id: str
    update_id: str
    reason: DropReason  # of this update alone; RoundClosed.dropped has those of a round without a step
    elapsed_s: float
    header: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class ClientFailed(Event):
    """Reports that no round waits for the reply of an assignment any more; if `is_over`, the device has not failed.

    After `offline` and `stale` a later reply may still count.
    `report_digest` is a digest of what the device had reported about itself, if the failure would repeat until that
    report changes. It is "" for a device that had not reported anything yet.
    """

    round: int
    device: str
    assignment_id: str
    kind: str
    text: str
    elapsed_s: float
    report_digest: str = ""

    @property
    def is_over(self) -> bool:
        """Return True if the run or the round ended first, whatever the device did."""
        return self.kind == OVER or (self.kind, self.text) == ("stale", ROUND_OVER)


@dataclass(frozen=True)
class ClientReconnected(Event):
    """Reports that a device reconnected in an open round, which waits again for the reply that had failed."""

    round: int
    device: str
    assignment_id: str
    elapsed_s: float


@dataclass(frozen=True)
class RoundResumed(Event):
    """Reports that the aggregator resumed a round that was open when the aggregator stopped; it was down from
    `down_since` to `at`.

    If `downtime_s` of core/clock.py finds no length in these two times, the wall clock was set in between. `missed_s`
    is for how long in total the run's clock has stopped since the round began to accept replies (0 in older journals).
    """

    round: int
    down_since: float
    elapsed_s: float
    missed_s: float = 0.0


@dataclass(frozen=True)
class RoundClosed(Event):
    """Reports the end of a round.

    `version` is the model version after it. `seconds` is the whole duration; unlike `elapsed_s` it includes the time
    without an aggregator. `names` are the metrics (with their kind) that at least half of the updates carried;
    `ignored` counts all others. `capped` has the updates with a reduced weight, `chosen` those that a reduction chose.
    `norms` are those of the decoded updates, if a quantile of them bounds later ones.
    """

    round: int
    reason: CloseReason
    version: int
    aggregated: list[str]  # update_ids in the order of aggregation
    dropped: list[str]  # all updates of it that do not count, without an UpdateDropped for `reason`
    outstanding: list[str]  # devices that had not replied
    elapsed_s: float
    seconds: float
    metrics: dict[str, float]  # of training, by the clients
    spent: dict[str, float] = field(default_factory=dict)  # the time breakdown
    slowest: str = ""
    capped: dict[str, Capped] = field(default_factory=dict)  # by update id
    names: list[str] = field(default_factory=list)
    ignored: int = 0
    detail: str = ""  # why an aborted round has no sum: never a text from a client
    chosen: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluated(Event):
    """Holds the evaluation of the model that round `round` made, on the clients' test splits or the operator's data.

    Values are pooled over the clients, of which there are 0 if the operator evaluated. `spread` is the range over the
    clients. The last model is evaluated by assignments of its own: `payload_bytes` are their bytes, 0 for all other
    versions. `reached` is True if the version meets the plan's target. `few` is True if so few clients evaluated it
    that it is not the best and meets no target.

    `best` and `target` use robust means (server/evaluation.py). `robust` has the means that differ from `metrics`.
    `clipped` has the metrics that were clipped, by the update id of their reply. `units` and `widths` were estimated
    here for the versions to come. `by_client` has the clients' own values of the last model: those of all others are in
    the events of their updates.
    """

    round: int
    version: int
    metrics: dict[str, float]
    spread: dict[str, list[float]]  # name -> [least, greatest] over clients
    examples: int
    clients: int
    best: bool = False
    few: bool = False
    reached: bool = False
    payload_bytes: int = 0
    models_sent: int = 0  # full models in `payload_bytes`
    sent_bytes: int | None = None
    received_bytes: int | None = None
    robust: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, list[str]] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)  # metric -> its count for one example, such as tokens
    widths: dict[str, float] = field(default_factory=dict)  # metric -> distance from the median to clip at
    by_client: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def decisive(self) -> dict[str, float]:
        """Return the metrics that decide about `best` and `target`."""
        return {**self.metrics, **self.robust}


@dataclass(frozen=True)
class DeviceOnline(Event):
    """Reports that a device connected."""

    device: str


@dataclass(frozen=True)
class DeviceOffline(Event):
    """Reports that a device is offline from now on; `last_seen_at` is the time of its last message, 0 if unknown."""

    device: str
    why: str
    last_seen_at: float = 0.0


@dataclass(frozen=True)
class AggregatorStarted(Event):
    """Reports a start of the aggregator; the process before it was last alive at `down_since`, by its own clock."""

    down_since: float
