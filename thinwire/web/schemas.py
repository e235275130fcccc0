"""What the API answers with. `*_at` are wall-clock seconds since 1970, `*_s` durations, bytes come as two columns."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Read from the store's rows by name; NaN and infinity become null."""

    model_config = ConfigDict(from_attributes=True, ser_json_inf_nan="null")


class Traffic(Answer):
    """`payload`: bytes of frames. `wire`: bytes on the devices' sockets, null in a simulation."""

    payload_up: int
    payload_down: int
    wire_up: int | None
    wire_down: int | None


class Group(Answer):
    """A group of simulated runs: `done` of `runs` that were asked for are over, the last of them `at` this time."""

    name: str
    task: str
    done: int
    runs: int
    at: float


class Run(Traffic):
    """A run in a list. `sentence` is its status; `steps` the rounds that changed the model."""

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
    folded_count: int
    late: int
    dropped: int
    failed: int
    dense_up: int
    dense_down: int


class Client(Traffic):
    """A device's part in one run, and what it does now. `residual_ratio`: of its latest answer that has one."""

    device: str
    state: str
    state_text: str
    since: float | None = None
    asked: int
    arrived: int
    folded_count: int
    late: int
    dropped: int
    failed: int
    examples: int
    residual_ratio: float | None = None
    last_outcome: str
    last_at: float | None


class Went(Answer):
    """Where time went: `why` in a sentence, seconds by stage, and requests x `rtt_s` = `trips_s`, which is no stage of
    its own but lies within these (null: no round trip was measured). `uncounted`: stages that a simulation's clock does
    not count.
    """

    why: str = ""
    stages: dict[str, float]
    uncounted: dict[str, float]
    requests: int
    rtt_s: float | None
    trips_s: float | None


class RunPage(Went, Run):
    """A run with everything that its page shows besides the rounds. `notes`: what its plan comes to here."""

    notes: list[str]
    plan: dict[str, Any]
    model_digest: str
    layout_digest: str
    task_version: str
    clients: list[Client]
    seconds: float
    seq: int
    now: float


class Round(Traffic):
    """A round. `closing` and `why` are sentences; `until_*` count from the run's begin to this round's end. `clipped`:
    the `means` that `best` and `target` go by where `clients` were clipped; `ignored`: metrics that are not recorded.
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
    target: int
    floor: int
    asked: list[str]
    not_asked: dict[str, str]
    folded_count: int
    arrived: int = 0
    late: int
    dropped: int
    failed: int
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
    slowest: str


class Stretch(Answer):
    stage: str
    begin_s: float
    end_s: float


class Absence(Answer):
    """No aggregator was there; seconds since the round began to take answers."""

    begin_s: float
    end_s: float


class Update(Traffic):
    """One ask and what became of it, with its stretches of time since the round opened.

    `codec` is what it was asked in, with the reason where the plan has a ladder; `work_reason` says why so many steps,
    where they follow its speed. Of one asked in the middle of its round `asked_why` says what made it needed.
    `residual_ratio`: the norm of what was not sent beside that of the change. `state_lost`: what the device found of
    its state, where it began the run anew with this answer. `pulled_at`: when it took the ask up, as far as was heard.
    `failed_at`: when it was known that no answer comes.
    """

    round: int
    device: str
    ask_id: str
    update_id: str
    outcome: str
    reason: str
    folded_round: int | None
    staleness: int
    asked_at: float | None
    asked_why: str
    instead_of: str
    codec: str = ""
    codec_reason: str = ""
    work_reason: str
    pulled_at: float | None
    arrived_at: float | None
    failed_at: float | None
    examples: int
    steps: int
    norm: float | None
    residual_norm: float | None
    residual_ratio: float | None
    state_lost: str
    requests: int
    metrics: dict[str, float]
    clipped: list[str] = []
    stretches: list[Stretch] = []


class RoundPage(Went, Round):
    """A round with its asks, and those to earlier rounds that were folded into it or may yet be. `stages` and
    `requests` are along `slowest`, then in the aggregator; `waited_for`: who kept it open after that. `codecs`: in
    which of the ladder's how many were asked, most first; empty where there is no ladder. `turn_at`: when it began to
    take answers, from which its seconds and all stretches count: later than `opened_at` where asks are sent ahead, and
    null until then. `drawn`: how those who were asked were drawn, where not all had the same odds. `away`: when no
    aggregator was there; `missed_s`: for how long the run's clock stood still for that, and its deadline moved on.
    """

    turn_at: float | None
    deadline_reason: str
    drawn: str
    codecs: list[tuple[str, int]]
    waited_for: list[str]
    updates: list[Update]
    late_folded: list[Update]
    away: list[Absence]
    missed_s: float
    now: float


class Service(Answer):
    """Whether an aggregator serves this store (`unknown` where the page was not told where to look).

    `urls` are its door's, by which devices find it; `tls` says that the door is open to other machines.
    """

    aggregator: str
    listen: str
    urls: list[str] = []
    tls: bool = False
    version: str
    seq: int
    now: float


class Ordered(Answer):
    """An order that was left for the aggregator."""

    order: int


class Refusal(Answer):
    """Any refusal: error, why, try."""

    error: str
    why: str = ""
