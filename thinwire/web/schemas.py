"""The schemas of the API's responses about runs, their clients and the service.

`*_at` are wall-clock seconds since 1970, `*_s` are durations in seconds, and bytes come as two columns, up and down.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from thinwire.reports.reason_text import sentence

ReasonText = Annotated[str, BeforeValidator(lambda given: given if isinstance(given, str) else sentence(given))]
"""The reasons of a decision, as a sentence."""
ToldCount = Annotated[int | None, BeforeValidator(lambda count: count or None)]
"""A count that a reply tells; the tables hold 0 where no reply told it, and the API null."""


class Answer(BaseModel):
    """Is the base of all responses: it is read from the store's rows by name, and NaN and infinity become null."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="null")


class Body(BaseModel):
    """Is the base of the bodies of requests: an unknown key is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Traffic(Answer):
    """Holds bytes in both directions: `payload` of frames, `wire` on the devices' sockets, null in a simulation."""

    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None


class Outcomes(Answer):
    """Holds counts of assignments by outcome; `aggregated_count` are those whose updates were aggregated in time."""

    aggregated_count: int
    late: int
    dropped: int
    failed: int


class Group(Answer):
    """Holds a group of simulated runs: `done` of `runs` requested ones are over, the last one since `at`."""

    name: str
    task: str
    done: int
    runs: int
    at: float


class Run(Traffic, Outcomes):
    """Holds a run in a list. `sentence` is its status; `version` counts the rounds that changed the model."""

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
    name: str = ""
    tags: list[str] = []
    archived_at: float | None = None


class Client(Traffic, Outcomes):
    """Holds a client's part in one run, and its present state.

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


class TimeBreakdown(Answer):
    """Holds a time breakdown: a sentence (`why`), and the seconds of each stage.

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
    """States what secure aggregation protects in every round, and what not.

    `min_survivors` is the fewest clients in a sum.
    """

    sentence: str
    min_survivors: int
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


class RunNow(TimeBreakdown, Run):
    """Holds a run as it is now. `notes` are sentences on its plan.

    `protection` is null without secure aggregation, `privacy` without differential privacy.
    `not_evaluated` is the reason why its latest version has no metric. `warning` says that its training diverges, and
    what to try. An `extended` run got more rounds after an end: the time between belongs to no round.
    """

    notes: list[str]
    extended: bool = False
    warning: str = ""
    model_digest: str
    protection: Protection | None = None
    privacy: Privacy | None = None
    not_evaluated: str = ""
    seconds: float
    seq: int
    now: float


class About(Answer):
    """Holds the facts of a run that do not change, except by more rounds: these change the plan, and leave a note.

    `estimate` is the cost that was expected when the dashboard started the run; null for a run of the command line.
    `origins` says of each key of the plan, by section: `plan` (the value differs from the default), `default` (it
    equals the default), or `derived` (the plan left it out, and other keys decide it).
    """

    estimate: dict[str, float | None] | None = None
    plan: dict[str, Any]
    origins: dict[str, dict[str, Literal["plan", "default", "derived"]]]
    layout_digest: str
    task_version: str


class RunPage(About, RunNow):
    """Holds a run with its plan and its clients; `first_plan` is the plan that the run was started with."""

    first_plan: dict[str, Any]
    clients: list[Client]


class Clients(Answer):
    """Holds a page of the clients of a run: those from place `first` on, of `total`; `selected` of them had work."""

    total: int
    selected: int
    first: int
    clients: list[Client]


class Service(Answer):
    """Holds the state of the aggregator on this store; `unknown` if the dashboard has no lock to look at.

    `urls` are those of its device API, for devices; `tls` is true if the device API is open to other machines.
    """

    aggregator: str
    listen: str
    urls: list[str] = []
    tls: bool = False
    version: str
    seq: int
    now: float


class LeftCommand(Answer):
    """Holds a command that was stored for the aggregator."""

    command: int
