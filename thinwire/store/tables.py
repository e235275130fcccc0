"""The tables: the append-only journal of runs, the read tables that follow from it, and those of devices and users.

`runs`, `rounds`, `phases`, `updates` and `clients` are projections of the journal (store/projection.py). The sums
of a run and of a round are stored in them, and not added up on reading.

Invariant: a projection is written in the transaction that appends its events, so at every commit it agrees with the
journal.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from thinwire.store.database import METADATA, BoundedInteger, BoundedText, Counter, needed, optional


def _run() -> Column[Any]:
    return needed("run_id", String(80), ForeignKey("runs.run_id"), primary_key=True)


def traffic() -> list[Column[Any]]:
    """Return columns of bytes in both directions: `payload` in frames, `wire` on the devices' sockets.

    `wire` is null without a network.
    """
    return [
        needed("payload_up", BoundedInteger, default=0),
        needed("payload_down", BoundedInteger, default=0),
        optional("wire_up", BoundedInteger),
        optional("wire_down", BoundedInteger),
    ]


def outcomes() -> list[Column[Any]]:
    """Return columns that count assignments by outcome; the pending ones are `selected` minus all others."""
    return [
        needed("aggregated_count", BoundedInteger, default=0),
        needed("late", BoundedInteger, default=0),
        needed("dropped", BoundedInteger, default=0),
        needed("failed", BoundedInteger, default=0),
    ]


# A run: its plan, status, models, metrics and sums.
Run = Table(
    "runs",
    METADATA,
    needed("number", Counter, primary_key=True),  # order of creation
    needed("run_id", String(80), unique=True),
    needed("task", String(63)),
    needed("task_number", BoundedInteger),
    needed("source", String(16)),
    needed("status", String(16), index=True),
    needed("status_text", BoundedText, default=""),
    needed("exit_code", BoundedInteger, default=0),
    needed("plan", JSON),
    needed("layout", JSON),
    needed("size", BoundedInteger),  # trained elements
    needed("task_report", JSON),
    needed("created_at", Double),
    optional("started_at", Double),
    optional("finished_at", Double),
    needed("rounds_total", BoundedInteger),
    needed("rounds_closed", BoundedInteger, default=0),
    needed("version", BoundedInteger, default=0),
    needed("model_digest", BoundedText, default=""),
    needed("model_file", BoundedText, default=""),
    optional("best_version", BoundedInteger),
    optional("best_value", Double),
    needed("metrics", JSON, default=dict),  # of the version evaluated last
    needed("metrics0", JSON, default=dict),  # of the initial model
    needed("spread0", JSON, default=dict),
    needed("clipped", JSON, default=dict, server_default="{}"),  # clipped values of `metrics`
    needed("dense_up", BoundedInteger, default=0),  # bytes of the same transfers in plain float32
    needed("dense_down", BoundedInteger, default=0),
    needed("notes", JSON, default=list, server_default="[]"),  # each a list of reasons
    needed("totals", JSON, default=dict, server_default="{}"),  # of its rounds' explanations
    needed("identity", String(64), default="", server_default=""),  # random; "" for a simulation
    needed("name", BoundedText(80), default="", server_default=""),  # that a person gave it
    needed("tags", JSON, default=list, server_default="[]"),
    optional("archived_at", Double),
    optional("deleted_at", Double),  # of its models, rounds and events; this row stays
    needed("deleted_by", BoundedText, default="", server_default=""),
    *traffic(),
    *outcomes(),
    UniqueConstraint("task", "task_number"),
)


HAS_SAMPLES = Run.c.plan["privacy"]["sampling_rate"].as_float() > 0  # of a run: by Poisson sampling


# A round of a run: its decisions, its result and its sums.
Round = Table(
    "rounds",
    METADATA,
    _run(),
    needed("round", Integer, primary_key=True),
    needed("opened_at", Double),
    optional("closed_at", Double),
    needed("reason", BoundedText, default=""),
    needed("base_version", BoundedInteger),
    optional("version", BoundedInteger),
    needed("deadline_s", Double),
    needed("deadline_reason", JSON, default=list, server_default="[]"),
    needed("sampling", JSON, default=list, server_default="[]"),
    needed("codec", BoundedText),
    needed("codecs", JSON, default=dict, server_default="{}"),
    needed("codec_reasons", JSON, default=dict, server_default="{}"),
    needed("target_updates", BoundedInteger),
    needed("min_updates", BoundedInteger),
    needed("considered", BoundedInteger),
    needed("selected", JSON),
    needed("not_selected", JSON),
    needed("aggregated", JSON, default=list),
    needed("replied", BoundedInteger, default=0, server_default="0"),  # selected clients, when the round closed
    needed("unanswered", BoundedInteger, default=0, server_default="0"),
    optional("seconds", Double),
    needed("metrics", JSON, default=dict),
    needed("spread", JSON, default=dict),
    needed("clipped", JSON, default=dict, server_default="{}"),  # {"means", "clients"}
    needed("train_metrics", JSON, default=dict),
    needed("ignored", BoundedInteger, default=0, server_default="0"),  # metrics that too few updates carried
    needed("spent", JSON, default=dict),
    needed("downtimes", JSON, default=list, server_default="[]"),  # of the aggregator: [from, to]
    needed("missed_s", Double, default=0.0, server_default="0"),  # not counted by the run's clock
    needed("slowest", BoundedText, default=""),
    needed("secure_sum", JSON, default=dict, server_default="{}"),  # what the masks covered
    needed("detail", BoundedText, default="", server_default=""),  # why a secure round has no sum
    needed("explanation", JSON, default=dict, server_default="{}"),  # {} while it is open
    optional("until_s", Double),  # sums from the run's start until this round's end; null while it is open
    optional("until_payload", BoundedInteger),
    optional("until_wire", BoundedInteger),
    optional("point", Integer),  # its place among the rounds with metrics
    needed("changed", BoundedInteger),  # number of the run's transaction that changed this row last
    *traffic(),
    *outcomes(),
    Index(None, "run_id", "changed"),
    Index(None, "run_id", "point"),
    Index(None, "run_id", "seconds", "round"),
)


# A closed phase of a secure round: which devices sent its message, and which dropped out.
RoundPhase = Table(
    "phases",
    METADATA,
    _run(),
    needed("round", Integer, primary_key=True),
    needed("phase", String(16), primary_key=True),
    needed("closed_at", Double),
    needed("elapsed_s", Double),  # since the round began
    needed("received", JSON),  # device -> bytes of its message
    needed("dropped", JSON),
)


# A device's part in one run.
Client = Table(
    "clients",
    METADATA,
    _run(),
    needed("device", String(63), primary_key=True, index=True),
    needed("selected", BoundedInteger, default=0),
    needed("arrived", BoundedInteger, default=0),
    needed("sequence", BoundedInteger, default=0),  # the highest received
    needed("times_slowest", BoundedInteger, default=0, server_default="0"),  # rounds whose stages are its own
    needed("times_silent", BoundedInteger, default=0, server_default="0"),  # rounds that waited for it in vain
    needed("last_outcome", BoundedText, default=""),
    optional("last_at", Double),
    *traffic(),
    *outcomes(),
)


# An assignment and its outcome.
Update = Table(
    "updates",
    METADATA,
    _run(),
    needed("assignment_id", BoundedText(255), primary_key=True),  # a late reply brings its own
    needed("round", Integer),
    needed("device", String(63)),
    needed("update_id", BoundedText, default=""),
    needed("outcome", String(16), default="selected"),
    needed("reason", BoundedText, default=""),
    needed("late_reply", Boolean, default=False),
    optional("aggregated_round", Integer),
    needed("staleness", BoundedInteger, default=0),
    needed("selection_reason", JSON, default=list, server_default="[]"),  # of an assignment in mid-round
    needed("instead_of", String(63), default="", server_default=""),
    needed("work_reason", JSON, default=list, server_default="[]"),
    needed("weight_reason", BoundedText, default=""),  # why it counts for less, or that it was chosen
    optional("assigned_at", Double),
    optional("delivered_at", Double),  # first delivery; `pulled_at` is the last one
    optional("pulled_at", Double),
    optional("began_at", Double),
    optional("arrived_at", Double),
    optional("failed_at", Double),
    optional("download_s", Double),
    optional("queue_s", Double),
    optional("evaluate_s", Double),
    optional("train_s", Double),
    optional("encode_s", Double),
    optional("load_s", Double),
    optional("commit_s", Double),
    needed("examples", BoundedInteger, default=0),
    needed("steps", BoundedInteger, default=0),
    optional("norm", Double),
    optional("residual_norm", Double),
    optional("residual_ratio", Double),
    needed("state_lost", BoundedText, default="", server_default=""),
    needed("requests", BoundedInteger, default=0),
    needed("metrics", JSON, default=dict),
    needed("clipped", JSON, default=list, server_default="[]"),  # clipped names of `metrics`
    needed("changed", BoundedInteger, default=0, server_default="0"),  # number of the transaction, as in `rounds`
    *traffic(),
    Index(None, "run_id", "update_id"),
    Index(None, "run_id", "round"),
    Index(None, "device", "assigned_at"),
    Index(None, "run_id", "aggregated_round", sqlite_where=text("aggregated_round <> round")),
)


# The last samples of one kind for a device over all runs, and their percentiles.
#
# `work` is the model and batch that a speed refers to, "" for a link. `p50` and `p90` are in bits/s for `down` and
# `up`, in steps for `pass`, and in seconds for all others; null if the samples do not suffice.
Measure = Table(
    "measures",
    METADATA,
    needed("device", String(63), primary_key=True),
    needed("kind", String(16), primary_key=True),
    needed("work", String(64), primary_key=True),
    needed("samples", JSON),
    optional("p50", Double),
    optional("p90", Double),
    needed("at", Double),
)


# Every event of every run, and of the devices (without a run), in the order in which they became durable.
Journal = Table(
    "journal",
    METADATA,
    needed("seq", Counter, primary_key=True),
    optional("run_id", String(80), ForeignKey("runs.run_id")),
    needed("at", Double),
    needed("kind", String(40)),
    needed("body", JSON),
    Index(None, "run_id", "seq"),
)


# Older events of a run, compressed together (store/journal.py).
Segment = Table(
    "segments",
    METADATA,
    _run(),
    needed("last_seq", BigInteger, primary_key=True),
    needed("first_seq", BoundedInteger),
    needed("body", LargeBinary),
)


# The state of an unfinished run after its events up to `seq`, in a form that only server/state/ knows.
Snapshot = Table(
    "snapshots",
    METADATA,
    _run(),
    needed("seq", BoundedInteger),
    needed("body", Text),
)


# A model version that is durable in a file of its run's folder.
Checkpoint = Table(
    "checkpoints",
    METADATA,
    _run(),
    needed("version", Integer, primary_key=True),
    needed("digest", String(64)),
    needed("file", BoundedText),
    needed("parts", JSON),
    needed("counters", JSON),
    needed("at", Double),
)


# An enrolled device.
#
# `change` numbers all changes of approval: its maximum tells a cache that it is out of date.
Device = Table(
    "devices",
    METADATA,
    needed("name", String(63), primary_key=True),
    needed("fingerprint", String(64), unique=True),
    needed("public_key", LargeBinary),
    needed("state", String(16)),
    needed("how", String(16)),
    needed("created_at", Double),
    needed("change", BoundedInteger, index=True),
    needed("online", Boolean, default=False),
    optional("seen_at", Double),  # start of the current or last connection
    optional("last_seen_at", Double),  # last contact of an offline device; null if unknown
    needed("hello", JSON, default=dict),
    needed("booked", JSON, default=dict, server_default="{}"),  # the most it has ever reported
    needed("other_keys", JSON, default=list, server_default="[]"),  # whose spending is its own too
    needed("brought", JSON, default=dict, server_default="{}"),  # releases that are not here
    needed("tags", JSON, default=list, server_default="[]"),
)


# A secret with which one key may enroll, once.
#
# The table holds only the SHA-256 of the secret. `name` is the device name for which it is valid, "" for any.
InvitationEntry = Table(
    "invitations",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("secret_hash", String(64), unique=True),
    needed("name", String(63), default=""),
    needed("approve_manually", Boolean),
    needed("who", BoundedText),
    needed("created_at", Double),
    needed("expires_at", Double),
    needed("used_by", String(63), default=""),
    needed("used_key", String(64), default=""),  # fingerprint
    optional("used_at", Double),
    optional("withdrawn_at", Double),
)


# The audit log: an action on a device, a user or a token, its actor and its time. Rows are only added.
Action = Table(
    "device_actions",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("at", Double),
    needed("who", BoundedText),
    needed("device", BoundedText, index=True),
    needed("what", String(16)),
    needed("detail", BoundedText, default=""),
)


# A refusal of the device API with its reason, which the reply lacked; the last thousand are kept.
Note = Table(
    "refusal_notes",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("at", Double),
    needed("kind", BoundedText(40)),
    needed("address", BoundedText(100)),
    needed("name", BoundedText(63), default=""),
    needed("why", BoundedText(500)),
    sqlite_autoincrement=True,
)


# A user's command and its result: command queue and audit log in one.
Command = Table(
    "commands",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("kind", String(40)),
    needed("run_id", BoundedText, default=""),
    needed("args", JSON, default=dict),
    needed("who", BoundedText, default=""),
    needed("at", Double),
    optional("answered_at", Double, index=True),
    optional("result", JSON(none_as_null=True)),
)
