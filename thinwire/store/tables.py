"""The tables: the append-only journal of runs, the read tables that follow from it, and those of devices and users.

`runs`, `rounds`, `phases`, `updates` and `clients` are projections of the journal (store/projection.py). Sums of bytes
are stored in them and never added up on reading.

Invariant: a projection is written in the transaction that appends its events, so at every commit it agrees with the
journal.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.store.database import Base, Counter, Words


def _run() -> Mapped[str]:
    return mapped_column(String(80), ForeignKey("runs.run_id"), primary_key=True)


class Traffic:
    """Declares columns of bytes in both directions: `payload` in frames, `wire` on the devices' sockets.

    `wire` is null without a network.
    """

    payload_up: Mapped[int] = mapped_column(default=0)
    payload_down: Mapped[int] = mapped_column(default=0)
    wire_up: Mapped[int | None]
    wire_down: Mapped[int | None]


class Outcomes:
    """Declares columns that count assignments by outcome; the pending ones are `selected` minus all others."""

    aggregated_count: Mapped[int] = mapped_column(default=0)
    late: Mapped[int] = mapped_column(default=0)
    dropped: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)


class Run(Traffic, Outcomes, Base):
    """Holds a run: its plan, status, models, metrics and sums."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("task", "task_number"),)

    number: Mapped[int] = mapped_column(Counter, primary_key=True)  # order of creation
    run_id: Mapped[str] = mapped_column(String(80), unique=True)
    task: Mapped[str] = mapped_column(String(63))
    task_number: Mapped[int]
    source: Mapped[str] = mapped_column(String(16))
    status: Mapped[str] = mapped_column(String(16), index=True)
    status_text: Mapped[str] = mapped_column(default="")
    exit_code: Mapped[int] = mapped_column(default=0)
    plan: Mapped[dict[str, Any]]
    layout: Mapped[dict[str, Any]]
    size: Mapped[int]  # trained elements
    task_report: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    rounds_total: Mapped[int]
    rounds_closed: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=0)
    model_digest: Mapped[str] = mapped_column(default="")
    model_file: Mapped[str] = mapped_column(default="")
    best_version: Mapped[int | None]
    best_value: Mapped[float | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)  # of the version evaluated last
    metrics0: Mapped[dict[str, Any]] = mapped_column(default=dict)  # of the initial model
    spread0: Mapped[dict[str, Any]] = mapped_column(default=dict)
    clipped: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # clipped values of `metrics`
    dense_up: Mapped[int] = mapped_column(default=0)  # bytes of the same transfers in plain float32
    dense_down: Mapped[int] = mapped_column(default=0)
    notes: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")  # each a list of reasons
    totals: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # of its rounds' explanations
    identity: Mapped[str] = mapped_column(String(64), default="", server_default="")  # random; "" for a simulation
    name: Mapped[str] = mapped_column(Words(80), default="", server_default="")  # that a person gave it
    tags: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    archived_at: Mapped[float | None]
    deleted_at: Mapped[float | None]  # of its models, rounds and events; this row stays
    deleted_by: Mapped[str] = mapped_column(default="", server_default="")


HAS_SAMPLES = Run.plan["privacy"]["sampling_rate"].as_float() > 0  # of a run: by Poisson sampling


class Round(Traffic, Outcomes, Base):
    """Holds a round of a run: its decisions, its result and its sums."""

    __tablename__ = "rounds"
    __table_args__ = (
        Index(None, "run_id", "changed"),
        Index(None, "run_id", "point"),
        Index(None, "run_id", "seconds", "round"),  # the slowest ones
    )

    run_id: Mapped[str] = _run()
    round: Mapped[int] = mapped_column(Integer, primary_key=True)
    opened_at: Mapped[float]
    closed_at: Mapped[float | None]
    reason: Mapped[str] = mapped_column(default="")
    base_version: Mapped[int]
    version: Mapped[int | None]
    deadline_s: Mapped[float]
    deadline_reason: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    sampling: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    codec: Mapped[str]
    codecs: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    codec_reasons: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    target_updates: Mapped[int]
    min_updates: Mapped[int]
    considered: Mapped[int]
    selected: Mapped[list[Any]]
    not_selected: Mapped[dict[str, Any]]
    aggregated: Mapped[list[Any]] = mapped_column(default=list)
    seconds: Mapped[float | None]
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    spread: Mapped[dict[str, Any]] = mapped_column(default=dict)
    clipped: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # {"means", "clients"}
    train_metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    ignored: Mapped[int] = mapped_column(default=0, server_default="0")  # metrics that too few updates carried
    spent: Mapped[dict[str, Any]] = mapped_column(default=dict)
    downtimes: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")  # of the aggregator: [from, to]
    missed_s: Mapped[float] = mapped_column(default=0.0, server_default="0")  # not counted by the run's clock
    slowest: Mapped[str] = mapped_column(default="")
    secure_sum: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # what the masks covered
    detail: Mapped[str] = mapped_column(default="", server_default="")  # why a secure round has no sum
    explanation: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # {} while it is open
    until_s: Mapped[float | None]  # sums from the run's start until this round's end; null while it is open
    until_payload: Mapped[int | None]
    until_wire: Mapped[int | None]
    point: Mapped[int | None] = mapped_column(Integer)  # its place among the rounds with metrics
    changed: Mapped[int]  # number of the run's transaction that changed this row last


class RoundPhase(Base):
    """Holds a closed phase of a secure round: which devices sent its message, and which dropped out."""

    __tablename__ = "phases"

    run_id: Mapped[str] = _run()
    round: Mapped[int] = mapped_column(Integer, primary_key=True)
    phase: Mapped[str] = mapped_column(String(16), primary_key=True)
    closed_at: Mapped[float]
    elapsed_s: Mapped[float]  # since the round began
    received: Mapped[dict[str, Any]]  # device -> bytes of its message
    dropped: Mapped[list[Any]]


class Client(Traffic, Outcomes, Base):
    """Holds a device's part in one run."""

    __tablename__ = "clients"

    run_id: Mapped[str] = _run()
    device: Mapped[str] = mapped_column(String(63), primary_key=True, index=True)
    selected: Mapped[int] = mapped_column(default=0)
    arrived: Mapped[int] = mapped_column(default=0)
    sequence: Mapped[int] = mapped_column(default=0)  # the highest received
    times_slowest: Mapped[int] = mapped_column(default=0, server_default="0")  # rounds whose stages are its own
    times_silent: Mapped[int] = mapped_column(default=0, server_default="0")  # rounds that waited for it in vain
    last_outcome: Mapped[str] = mapped_column(default="")
    last_at: Mapped[float | None]


class Update(Traffic, Base):
    """Holds an assignment and its outcome."""

    __tablename__ = "updates"
    __table_args__ = (
        Index(None, "run_id", "update_id"),
        Index(None, "run_id", "round"),
        Index(None, "device", "assigned_at"),
        # Of the few updates that went into a later round; on PostgreSQL of all, since to name its dialect imports it.
        Index(None, "run_id", "aggregated_round", sqlite_where=text("aggregated_round <> round")),
    )  # fmt: skip

    run_id: Mapped[str] = _run()
    assignment_id: Mapped[str] = mapped_column(Words(255), primary_key=True)  # a late reply brings its own
    round: Mapped[int] = mapped_column(Integer)
    device: Mapped[str] = mapped_column(String(63))
    update_id: Mapped[str] = mapped_column(default="")
    outcome: Mapped[str] = mapped_column(String(16), default="selected")
    reason: Mapped[str] = mapped_column(default="")
    late_reply: Mapped[bool] = mapped_column(default=False)
    aggregated_round: Mapped[int | None] = mapped_column(Integer)
    staleness: Mapped[int] = mapped_column(default=0)
    selection_reason: Mapped[list[Any]] = mapped_column(
        default=list, server_default="[]"
    )  # of an assignment in mid-round
    instead_of: Mapped[str] = mapped_column(String(63), default="", server_default="")
    work_reason: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    weight_reason: Mapped[str] = mapped_column(default="")  # why it counts for less, or that it was chosen
    assigned_at: Mapped[float | None]
    delivered_at: Mapped[float | None]  # first delivery; `pulled_at` is the last one
    pulled_at: Mapped[float | None]
    began_at: Mapped[float | None]
    arrived_at: Mapped[float | None]
    failed_at: Mapped[float | None]
    download_s: Mapped[float | None]
    queue_s: Mapped[float | None]
    evaluate_s: Mapped[float | None]
    train_s: Mapped[float | None]
    encode_s: Mapped[float | None]
    load_s: Mapped[float | None]
    commit_s: Mapped[float | None]
    examples: Mapped[int] = mapped_column(default=0)
    steps: Mapped[int] = mapped_column(default=0)
    norm: Mapped[float | None]
    residual_norm: Mapped[float | None]
    residual_ratio: Mapped[float | None]
    state_lost: Mapped[str] = mapped_column(default="", server_default="")
    requests: Mapped[int] = mapped_column(default=0)
    metrics: Mapped[dict[str, Any]] = mapped_column(default=dict)
    clipped: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")  # clipped names of `metrics`
    changed: Mapped[int] = mapped_column(default=0, server_default="0")  # number of the transaction, as in `rounds`


class Measure(Base):
    """Holds the last samples of one kind for a device over all runs, and their percentiles.

    `work` is the model and batch that a speed refers to, "" for a link. `p50` and `p90` are in bits/s for `down` and
    `up`, in steps for `pass`, and in seconds for all others; null if the samples do not suffice.
    """

    __tablename__ = "measures"

    device: Mapped[str] = mapped_column(String(63), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    work: Mapped[str] = mapped_column(String(64), primary_key=True)
    samples: Mapped[list[Any]]
    p50: Mapped[float | None]
    p90: Mapped[float | None]
    at: Mapped[float]


class Journal(Base):
    """Holds every event of every run, and of the devices (without a run), in the order in which they became durable."""

    __tablename__ = "journal"
    __table_args__ = (Index(None, "run_id", "seq"),)

    seq: Mapped[int] = mapped_column(Counter, primary_key=True)
    run_id: Mapped[str | None] = mapped_column(String(80), ForeignKey("runs.run_id"))
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(String(40))
    body: Mapped[dict[str, Any]]


class Segment(Base):
    """Holds older events of a run, compressed together (store/journal.py)."""

    __tablename__ = "segments"

    run_id: Mapped[str] = _run()
    last_seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    first_seq: Mapped[int]
    body: Mapped[bytes] = mapped_column(LargeBinary)


class Snapshot(Base):
    """Holds the state of an unfinished run after its events up to `seq`, in a form that only server/state/ knows."""

    __tablename__ = "snapshots"

    run_id: Mapped[str] = _run()
    seq: Mapped[int]
    body: Mapped[str] = mapped_column(Text)


class Checkpoint(Base):
    """Holds a model version that is durable in a file of its run's folder."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = _run()
    version: Mapped[int] = mapped_column(Integer, primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    file: Mapped[str]
    parts: Mapped[list[Any]]
    counters: Mapped[dict[str, Any]]
    at: Mapped[float]


class Device(Base):
    """Holds an enrolled device.

    `change` numbers all changes of approval: its maximum tells a cache that it is out of date.
    """

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    public_key: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[str] = mapped_column(String(16))
    how: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    change: Mapped[int] = mapped_column(index=True)
    online: Mapped[bool] = mapped_column(default=False)
    seen_at: Mapped[float | None]  # start of the current or last connection
    last_seen_at: Mapped[float | None]  # last contact of an offline device; null if unknown
    hello: Mapped[dict[str, Any]] = mapped_column(default=dict)
    booked: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # the most it has ever reported
    other_keys: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")  # whose spending is its own too
    brought: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # releases that are not here
    tags: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")


class InvitationEntry(Base):
    """Holds a secret with which one key may enroll, once.

    The table holds only the SHA-256 of the secret. `name` is the device name for which it is valid, "" for any.
    """

    __tablename__ = "invitations"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(63), default="")
    approve_manually: Mapped[bool]
    who: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_by: Mapped[str] = mapped_column(String(63), default="")
    used_key: Mapped[str] = mapped_column(String(64), default="")  # fingerprint
    used_at: Mapped[float | None]
    withdrawn_at: Mapped[float | None]


class Action(Base):
    """Holds the audit log: an action on a device, a user or a token, its actor and its time. Rows are only added."""

    __tablename__ = "device_actions"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    who: Mapped[str]
    device: Mapped[str] = mapped_column(index=True)
    what: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(default="")


class Note(Base):
    """Holds a refusal of the device API with its reason, which the reply lacked; the last thousand are kept."""

    __tablename__ = "refusal_notes"
    __table_args__ = ({"sqlite_autoincrement": True},)  # no number is given twice

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(Words(40))
    address: Mapped[str] = mapped_column(Words(100))
    name: Mapped[str] = mapped_column(Words(63), default="")
    why: Mapped[str] = mapped_column(Words(500))


class Command(Base):
    """Holds a user's command and its result: command queue and audit log in one."""

    __tablename__ = "commands"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    kind: Mapped[str] = mapped_column(String(40))
    run_id: Mapped[str] = mapped_column(default="")
    args: Mapped[dict[str, Any]] = mapped_column(default=dict)
    who: Mapped[str] = mapped_column(default="")
    at: Mapped[float]
    answered_at: Mapped[float | None] = mapped_column(index=True)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
