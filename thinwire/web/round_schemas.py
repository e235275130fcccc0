"""The schemas of the API's responses about rounds and updates, and of the one from which a run's page is drawn.

Units are those of `schemas.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field, with_config

from thinwire.web.schemas import About, Answer, Clients, Outcomes, ReasonText, RunNow, TimeBreakdown, ToldCount, Traffic


class Round(Traffic, Outcomes):
    """Holds a round. `closing` and `why` are sentences; `until_*` are sums from the run's start to this round's end.

    `clipped` holds the clipped metrics of `clients`, and the `means` that `best` and `target` use then. `ignored`
    counts metrics that were not recorded. `min_updates` are the fewest updates that a step requires. `secure_sum` has
    the facts of a sum whose masks were removed. `epsilon_run` and `epsilon` are those of `Spending` after this round.
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
    clipped: dict[str, Any] = Field(default_factory=dict)
    train_metrics: dict[str, float]
    ignored: int = 0
    spent: dict[str, float]
    secure_sum: dict[str, float] = Field(default_factory=dict)
    epsilon_run: float | None = None
    epsilon: float | None = None
    slowest: str


class RoundSummary(Traffic, Outcomes):
    """Holds a round in a table: a `Round` without the fields of single clients; `selected` is their number."""

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


@with_config(Answer.model_config)
@dataclass(slots=True)  # a page has hundreds, and it is made in a tenth of the time of a model
class CurvePoint:
    """Holds a measured round of a run's curves, as `Round` has it."""

    round: int
    until_s: float | None
    until_payload: int | None
    metrics: dict[str, float]
    spread: dict[str, list[float]]
    clipped: dict[str, Any]


class SpentPoint(Answer):
    """Holds the epsilon that a private run had spent after a round."""

    round: int
    epsilon_run: float | None
    epsilon: float | None


@with_config(Answer.model_config)
@dataclass(slots=True)  # as CurvePoint
class Stretch:
    """Holds a stage of an assignment; seconds since its round opened."""

    stage: str
    begin_s: float
    end_s: float


class Downtime(Answer):
    """Holds a time without an aggregator; seconds since the round began to take replies."""

    begin_s: float
    end_s: float


class Update(Traffic):
    """Holds an assignment and its outcome, with its stages in time since the round opened.

    - `codec` is the codec of the assignment, and `codec_reason` its reason if the plan has a codec ladder.
    - `work_reason` is the reason for the number of steps if they follow the device's speed.
    - `weight_reason` says why an update counts for less than its reply claims, or that it was chosen.
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
    clipped: list[str] = Field(default_factory=list)
    not_known: str = ""
    stretches: list[Stretch] = Field(default_factory=list)


class Phase(Answer):
    """Holds a phase of a round with secure aggregation: `begin_s` counts from the round's begin, without downtimes.

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


class RoundPage(TimeBreakdown, Round):
    """Holds a round with its assignments, and with those of earlier rounds that were or may be aggregated into it.

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
    phases: list[Phase] = Field(default_factory=list)
    updates: list[Update]
    late_aggregated: list[Update]
    downtimes: list[Downtime]
    missed_s: float
    now: float


class WorstRound(Answer):
    """Holds one of the slowest closed rounds of a run. `slowest` is the device whose reply came last, "" if none came.

    `waited_count` devices kept the round open after that; `waited_for` names the first of them.
    """

    round: int
    seconds: float
    slowest: str
    waited_for: list[str]
    waited_count: int


class RunView(Answer):
    """Holds what a run's page shows if `whole`, otherwise what has changed of it since the requested change.

    - `change` is the number to request next; 0 if every view is whole.
    - `opened` is the number of rounds. `rounds` are the newest ones, or those that changed.
    - `points` and `spent` are those of the curves, thinned to a bounded number; a view that is not whole has none, and
      its `rounds` go on with them.
    - `round` is the chosen one, null before the first. `clients` are null if they were not requested.
    - `worst` are the slowest rounds, null if no round has closed since; none of a run with Poisson sampling.
    """

    change: int
    whole: bool
    opened: int
    run: RunNow
    about: About | None
    rounds: list[RoundSummary]
    points: list[CurvePoint]
    spent: list[SpentPoint]
    round: RoundPage | None
    clients: Clients | None
    worst: list[WorstRound] | None


class HeatRow(Answer):
    """Clients in the rounds of a heat map: one of them, or a bin of `clients` that follow each other by name.

    `outcomes` has a digit for each round, the place of the worst outcome in `Heat.outcomes`, or `.` if none of them was
    selected. `shares` has the longest time from an assignment to its reply over the length of the round.
    """

    label: str
    clients: int
    outcomes: str
    shares: list[float | None]


class Heat(Answer):
    """Rounds by clients: what came of each assignment, and how long it took."""

    rounds: list[int]
    outcomes: list[str]  # from best to worst
    clients: int
    rows: list[HeatRow]
