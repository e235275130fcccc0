"""The schemas of the API's responses about runs, rounds and updates.

`*_at` are wall-clock seconds since 1970, `*_s` are durations in seconds, and bytes come as two columns, up and down.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from thinwire.reports.reason_text import sentence

ReasonText = Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else sentence(given))]
"""The reasons of a decision, as a sentence."""
ToldCount = Annotated[int | None, BeforeValidator(lambda count: count or None)]
"""A count that a reply tells; the tables hold 0 where no reply told it, and the API null."""


class Answer(BaseModel):
    """The base of all responses: it is read from the store's rows by name, and NaN and infinity become null."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="null")


class Traffic(Answer):
    """Bytes in both directions: `payload` of frames, `wire` on the devices' sockets, which is null in a simulation."""

    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None


class Outcomes(Answer):
    """Counts of assignments by outcome; `aggregated_count` are those whose updates were aggregated in time."""

    aggregated_count: int
    late: int
    dropped: int
    failed: int


class Group(Answer):
    """A group of simulated runs: `done` of `runs` requested ones are over, the last one since `at`."""

    name: str
    task: str
    done: int
    runs: int
    at: float


class Run(Traffic, Outcomes):
    """A run in a list. `sentence` is its status; `version` counts the rounds that changed the model."""

    run_id: str
    task: str
    source: str
    status: str
    sentence: str = ""
    status_text: str
    exit_code: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    rounds_total: int
    rounds_closed: int
    version: int
    size: int
    metrics: dict[str, float]
    clipped: dict[str, Any] = {}
    metrics0: dict[str, float]
    spread0: dict[str, list[float]]
    best_version: int | None
    best_value: float | None
    dense_up: int
    dense_down: int


class Client(Traffic, Outcomes):
    """A client's part in one run, and its present state.

    `examples` and `residual_ratio` are those of its latest reply that tells them. `not_known` is the reason if no
    reply does.
    """

    device: str
    state: str
    state_text: str
    since: float | None = None
    selected: int
    arrived: int
    examples: ToldCount
    residual_ratio: float | None = None
    not_known: str = ""
    last_outcome: str
    last_at: float | None


class Went(Answer):
    """A time breakdown: a sentence (`why`), and the seconds of each stage.

    The network time `trips_s` is `requests` x `rtt_s`. It is no stage of its own but lies within the stages; null means
    that no round trip was measured. `uncounted` are stages that a simulation's clock does not count.
    """

    why: str = ""
    stages: dict[str, float]
    uncounted: dict[str, float]
    requests: int
    rtt_s: float | None
    trips_s: float | None


class Protection(Answer):
    """States what secure aggregation protects in every round, and what not; `least`: the fewest clients in a sum."""

    sentence: str
    least: int
    assumes: list[str]
    not_protected: str


class Spending(Answer):
    """Counts what a private run has spent; an epsilon without a bound is null.

    `epsilon_run` is what this run cost its most expensive client, `epsilon` the most that one of its clients has spent
    in all runs of the population.
    """

    mode: str
    population: str
    delta: float
    reserved: int
    released: int
    participations: int
    epsilon_run: float | None
    epsilon: float | None


class Privacy(Answer):
    """States what a run with differential privacy has spent, and what its epsilon means and assumes, as sentences.

    `bound` is the value of the plan's key `bound_name`: budget, for all runs of the population, or target_epsilon, for
    this run. `stopped` is the reason if the run ended before its budget would be passed.
    """

    spending: Spending
    sentence: str
    meaning: str
    assumes: list[str]
    bound: float | None
    bound_name: str
    stopped: str
    unreleased: str
    unknown: str


class RunNow(Went, Run):
    """A run as it is now. `notes` are sentences on its plan.

    `protection` is null without secure aggregation, `privacy` without differential privacy.
    `not_evaluated` is the reason why its latest version has no metric.
    """

    notes: list[str]
    model_digest: str
    protection: Protection | None = None
    privacy: Privacy | None = None
    not_evaluated: str = ""
    seconds: float
    seq: int
    now: float


class About(Answer):
    """What of a run never changes."""

    plan: dict[str, Any]
    layout_digest: str
    task_version: str


class RunPage(About, RunNow):
    """A run with its plan and its clients."""

    clients: list[Client]


class Clients(Answer):
    """A page of the clients of a run: those from the place `first` on, of `total`; `selected` of them had work."""

    total: int
    selected: int
    first: int
    clients: list[Client]


class Round(Traffic, Outcomes):
    """A round. `closing` and `why` are sentences; `until_*` are sums from the run's start to this round's end.

    `clipped` holds the clipped metrics of `clients`, and the `means` that `best` and `target` use then. `ignored`
    counts metrics that were not recorded. `min_updates` are the fewest that make a step. `secure_sum` has the facts of
    a sum whose masks were removed. `epsilon_run` and `epsilon` are those of `Spending` after this round.
    """

    round: int
    opened_at: float
    closed_at: float | None
    reason: str
    closing: str = ""
    why: str = ""
    base_version: int
    version: int | None
    deadline_s: float
    codec: str
    target_updates: int
    min_updates: int
    selected: list[str]
    not_selected: dict[str, ReasonText]
    not_sampled: int
    arrived: int = 0
    seconds: float | None
    until_s: float = 0.0
    until_payload: int = 0
    until_wire: int | None = None
    metrics: dict[str, float]
    spread: dict[str, list[float]]
    clipped: dict[str, Any] = {}
    train_metrics: dict[str, float]
    ignored: int = 0
    spent: dict[str, float]
    secure_sum: dict[str, float] = {}
    epsilon_run: float | None = None
    epsilon: float | None = None
    slowest: str


class RoundLine(Traffic, Outcomes):
    """A round in a table or a strip: a `Round` without what is said of single clients; `selected` is their number."""

    round: int
    opened_at: float
    closed_at: float | None
    reason: str
    closing: str
    base_version: int
    version: int | None
    deadline_s: float
    selected: int
    arrived: int
    seconds: float | None
    until_s: float
    until_payload: int
    until_wire: int | None
    metrics: dict[str, float]
    spread: dict[str, list[float]]
    clipped: dict[str, Any]
    epsilon_run: float | None = None
    epsilon: float | None = None


class CurvePoint(Answer):
    """A measured round of a run's curves, as `Round` has it."""

    round: int
    until_s: float | None
    until_payload: int | None
    metrics: dict[str, float]
    spread: dict[str, list[float]]
    clipped: dict[str, Any]


class SpentPoint(Answer):
    """What a private run had spent after a round."""

    round: int
    epsilon_run: float | None
    epsilon: float | None


class Stretch(Answer):
    """A stage of an assignment; seconds since its round opened."""

    stage: str
    begin_s: float
    end_s: float


class Downtime(Answer):
    """A time without an aggregator; seconds since the round began to take replies."""

    begin_s: float
    end_s: float


class Update(Traffic):
    """An assignment and its outcome, with its stages in time since the round opened.

    - `codec` is the codec of the assignment, and `codec_reason` its reason if the plan has a codec ladder.
    - `work_reason` is the reason for the number of steps if they follow the device's speed.
    - `weight_reason` is the reason why an update has less weight than its reply claims.
    - `selection_reason` is the reason for an assignment in the middle of a round; `instead_of` is the client that it
      replaces.
    - `residual_ratio` is the norm of the residual divided by that of the update.
    - `state_lost` describes the state that the device found if it started the run again with this reply.
    - `pulled_at` is the delivery of the assignment, as far as the aggregator knows.
    - `failed_at` is the moment from which no reply can come.
    - `not_known` is the reason why the facts of the client are null, "" if its reply tells them.
    """

    round: int
    device: str
    assignment_id: str
    update_id: str
    outcome: str
    reason: str
    aggregated_round: int | None
    staleness: int
    assigned_at: float | None
    selection_reason: ReasonText
    instead_of: str
    codec: str = ""
    codec_reason: str = ""
    work_reason: ReasonText
    weight_reason: str
    pulled_at: float | None
    arrived_at: float | None
    failed_at: float | None
    examples: ToldCount
    steps: ToldCount
    norm: float | None
    residual_norm: float | None
    residual_ratio: float | None
    state_lost: str
    requests: int
    metrics: dict[str, float]
    clipped: list[str] = []
    not_known: str = ""
    stretches: list[Stretch] = []


class Phase(Answer):
    """A phase of a round with secure aggregation: `begin_s` counts from the round's begin, without downtimes.

    `seconds` is null while it is open, and `received` and `received_bytes` for a phase that was not closed. `dropped`
    maps each client that dropped out in it to the reason.
    """

    phase: str
    waits_for: str
    begin_s: float
    seconds: float | None
    is_closed: bool
    received: int | None
    received_bytes: int | None
    dropped: dict[str, str]


class RoundPage(Went, Round):
    """A round with its assignments, and with those of earlier rounds that were or may be aggregated into it.

    - `stages` and `requests` follow the slowest client (`slowest`) and then the aggregator; `waited_for` are the
      clients that kept the round open after that.
    - `codecs` counts the assignments of each rung of the codec ladder, most first; it is empty without a ladder.
    - `turn_at` is the moment from which the round takes replies, and its seconds and stages count from there. With
      pipelined rounds it is later than `opened_at`, and null until then.
    - `sampling` describes the selection if the clients did not all have the same probability.
    - `downtimes` are the times without an aggregator. `missed_s` is how long the run's clock stood still for them, and
      by how much the deadline moved.
    - `phases` are those of a round with secure aggregation, the open one too.
    - `updates` are all assignments if `whole`, else those that changed after the requested change; `change` is the one
      to request next.
    """

    whole: bool = True
    change: int = 0

    turn_at: float | None
    deadline_reason: str
    sampling: ReasonText
    codecs: list[tuple[str, int]]
    waited_for: list[str]
    phases: list[Phase] = []
    updates: list[Update]
    late_aggregated: list[Update]
    downtimes: list[Downtime]
    missed_s: float
    now: float


class RunView(Answer):
    """What a run's page shows, if `whole`; else what of it has changed since the requested change.

    - `change` is the number to request next; 0 if every view is whole.
    - `opened` is the number of rounds. `lines` are the newest ones, or those that changed.
    - `points` and `spent` are those of the curves, thinned to a bounded number; a view that is not whole has none, and
      its `lines` go on with them.
    - `round` is the chosen one, null before the first. `clients` are null if they were not requested.
    """

    change: int
    whole: bool
    opened: int
    run: RunNow
    about: About | None
    lines: list[RoundLine]
    points: list[CurvePoint]
    spent: list[SpentPoint]
    round: RoundPage | None
    clients: Clients | None


class Service(Answer):
    """The state of the aggregator on this store; `unknown` if the dashboard has no lock to look at.

    `urls` are those of its device API, for devices; `tls` is true if the device API is open to other machines.
    """

    aggregator: str
    listen: str
    urls: list[str] = []
    tls: bool = False
    version: str
    seq: int
    now: float


class Ordered(Answer):
    """A command that was stored for the aggregator."""

    order: int


class Refusal(Answer):
    """An error: what failed, why, and what to try."""

    error: str
    why: str = ""
