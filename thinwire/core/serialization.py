"""Assignments and replies as JSON bytes, the only form in which they travel or are stored.

Invariant: a received message is bounded before it is parsed, and any mistake in it raises BadPayload. Nothing uses
pickle.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.core.errors import BadPayload
from thinwire.core.formatting import plain
from thinwire.core.protocol import BYTES_A_TOKEN, read_json, require_small
from thinwire.core.records import plainly
from thinwire.core.score_histogram import MAX_METRIC_LETTERS, MEASURED, TRAINED, checked
from thinwire.core.types import (
    Assignment,
    Failure,
    Part,
    PhaseReply,
    Reply,
    ReplyHeader,
    SecureWork,
    Timings,
    Transfer,
    UpdateId,
    UpdateOutcome,
    Work,
    finite,
)

MAX_HEADER_BYTES = 4 * 2**20  # of an assignment, and of a reply's header for the largest model (ReplyLimit: of a run)
FREE_HEADER_BYTES = 96 * 2**10  # of a reply's header in any run: ids, a codec, metrics in any script
MAX_KEPT_BYTES = MAX_HEADER_BYTES + 1024  # of a header in the spool, which a line with six numbers follows
MAX_PARTS = 65_536
MAX_METRICS = 64 + 16 + 3  # of a task's evaluation and of its own train(); its two losses, and `eval/personal`
MAX_NAME = 1024  # characters of an id, a name or a digest
MAX_INT = 2**63 - 1
MAX_EXAMPLES = 2**40
MAX_A = 1e9  # a step weighs at most 1 / (1 - momentum)
MAX_SECONDS = 1e9  # of a stage; the sum of the stages is shown
MAX_METRIC, MIN_COUNT = 1e100, 1e-100  # sums over clients and their quotients stay finite
ROUNDING = 1e-6  # of an accuracy, whose sum may come from means in float32
MAX_NORM = 1e100  # its square is finite
MAX_STEPS = 2**40  # sums over all replies of a run fit into 64 bits
OWN_FIELDS = ("update_id", "metrics", "timings", "parts", "counters", "transfer", "histograms")  # of a reply
ASSIGNMENT_ID = re.compile(r"[!\"$-.0->@-~]+")  # part of a path: printable ASCII without space, #, / and ?


@dataclasses.dataclass(frozen=True)
class ReplyLimit:
    """Bounds the size of a reply, which follows from its run.

    `payload_bytes` is the length of all parts together. `header_bytes` is the header's length after inflating.
    `identity` is the run's identity. It is "" if the run's replies need not carry one. It is None if no run of this
    aggregator can have sent the assignment: then every reply is refused.
    """

    payload_bytes: int
    parts: int = MAX_PARTS
    counters: int = MAX_PARTS
    header_bytes: int = FREE_HEADER_BYTES
    identity: str | None = ""


def assignment_to_bytes(assignment: Assignment) -> bytes:
    """Return the assignment's JSON; rare fields are left out at their default value."""
    raw = plainly(assignment)
    raw["outcomes"] = [{**plainly(v), "update_id": str(v.update_id)} for v in assignment.outcomes]
    for rare in ("references_from", "is_follow_up", "identity", "secure"):
        if not raw[rare]:
            del raw[rare]
    if assignment.evaluates:
        del raw["evaluates"]
    if not assignment.work.clip:
        del raw["work"]["clip"]
    return _dump(raw)


def assignment_from_bytes(data: bytes) -> Assignment:
    """Read an assignment; raise BadPayload with the wrong field.

    Fields that a newer aggregator added are ignored. Invariant: nothing is parsed before `require_small` has bounded
    it, because 4 kB on the wire could be a million lists.
    """
    with _Reading("assignment"):
        raw = _load(data)
        scalars = _scalars(Assignment, raw, exclude=("plan", "work", "parts", "outcomes", "secure"))
        for value in scalars.values():
            _printable(str(value))
        for name in ("assignment_id", "run", "task", "kind", "base_digest", "layout_digest", "identity"):
            _name(scalars.get(name, ""))
        if not ASSIGNMENT_ID.fullmatch(scalars["assignment_id"]):
            raise ValueError(f"assignment_id = {scalars['assignment_id'][:80]!r} is no id")
        work = Work(**_scalars(Work, raw["work"]))
        secure = SecureWork(**_scalars(SecureWork, raw["secure"])) if raw.get("secure") else None
        for name, value in {**scalars, **dataclasses.asdict(work), **(plainly(secure) if secure else {})}.items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} = {value} is negative")
        return Assignment(
            **scalars,
            plan=raw["plan"],
            work=work,
            secure=secure,
            parts=_parts(raw["parts"]),
            outcomes=tuple(
                UpdateOutcome(UpdateId.parse(_name(v["update_id"])), v["outcome"], _int(v["version"]))
                for v in raw["outcomes"]
            ),
        )


def reply_to_json(reply: Reply) -> dict[str, Any]:
    """Return the reply's header or the failure as JSON values; rare fields are left out at their default value."""
    raw = plainly(reply)
    if isinstance(reply, ReplyHeader):
        raw["update_id"] = str(reply.update_id)
    for rare in ("planned", "lost", "identity", "histograms"):
        if rare in raw and not raw[rare]:
            del raw[rare]
    raw["type"] = _TYPES[type(reply)]
    return raw


def reply_to_bytes(reply: Reply) -> bytes:
    """Return the JSON of a reply's header, a failure or a message of a phase."""
    return _dump(reply_to_json(reply))


def reply_from_bytes(data: bytes, max_bytes: int = MAX_HEADER_BYTES) -> Reply:
    """Read a reply; raise BadPayload if a number is not finite or a count is negative.

    An unknown key is refused, because a client must send only what its aggregator requested. Invariant: nothing is
    parsed before `read_json` has bounded it.
    """
    with _Reading("reply"):
        raw = read_json(data, max_bytes)
        _known(raw, _KEYS[raw["type"]])
        _known(raw.get("transfer") or {}, _TRANSFER)
        for part in raw.get("parts", ()):
            _known(part, _PART)
        _known(raw.get("timings", {}), _TIMINGS)
    return reply_from_json(raw)


def arrived_to_bytes(header: ReplyHeader, received: bytes) -> bytes:
    """Return the bytes to store of an arrived reply: those that the client sent, unchanged, and a line with `transfer`.

    Invariant: `arrived_from_bytes` can read the result, because it read `received` within the same bound.
    """
    if len(received) > MAX_HEADER_BYTES:
        raise BadPayload(f"a header of {len(received)} bytes", why=f"at most {MAX_HEADER_BYTES} are read")
    return received + b"\n" + json.dumps(plainly(header.transfer) if header.transfer else None).encode()


def arrived_from_bytes(data: bytes) -> Reply:
    """Read the result of `arrived_to_bytes`, or a header alone, which is stored for a reply that came over no
    connection.
    """
    received, _, transfer = data.rpartition(b"\n")
    if not received:
        return reply_from_bytes(data)
    with _Reading("transfer"):
        raw = json.loads(transfer)
        seen = Transfer(**_scalars(Transfer, raw)) if raw else None
    reply = reply_from_bytes(received)
    return reply if isinstance(reply, PhaseReply) else dataclasses.replace(reply, transfer=seen)


def reply_from_json(raw: Mapping[str, Any]) -> Reply:
    """Read a reply from JSON values; raise BadPayload as `reply_from_bytes` does."""
    with _Reading("reply"):
        transfer = Transfer(**_scalars(Transfer, raw["transfer"])) if raw.get("transfer") else None
        if raw["type"] == "failure":
            failure = Failure(**_scalars(Failure, raw, exclude=("transfer",)), transfer=transfer)
            _name(failure.assignment_id), _name(failure.kind), _name(failure.device), _name(failure.identity)
            return dataclasses.replace(failure, text=plain(failure.text))
        if raw["type"] == "phase":
            reply = PhaseReply(**_scalars(PhaseReply, raw))
            _name(reply.assignment_id), _name(reply.device), _name(reply.identity)
            if not reply.message.isascii():
                raise ValueError("a message that is not base64")
            return reply
        header = ReplyHeader(
            **_scalars(ReplyHeader, raw, exclude=OWN_FIELDS),
            update_id=UpdateId.parse(raw["update_id"]),
            metrics=_metrics(raw["metrics"]),
            timings=Timings(**_scalars(Timings, raw["timings"])),
            parts=_parts(raw["parts"]),
            counters={_name(k): _int(v) for k, v in raw.get("counters", {}).items()},
            transfer=transfer,
            histograms=checked(raw.get("histograms", {})),
        )
        _name(header.assignment_id), _name(raw["update_id"])
        if str(header.update_id) != raw["update_id"]:
            raise ValueError(f"{raw['update_id'][:80]!r} is not written as an update's id is")
        _name(header.lost), _name(header.identity)
        _printable(header.codec)
        if (
            min(header.examples, header.steps, header.planned, header.a, header.base_version, header.update_id.sequence)
            < 0
        ):
            raise ValueError("counts must not be negative")
        if (
            max(header.steps, header.planned) > MAX_STEPS
            or not max(abs(header.norm), abs(header.residual_norm)) <= MAX_NORM
        ):
            raise ValueError(f"more than {MAX_STEPS} steps, or a norm of more than {MAX_NORM:g}")
        if not all(0 <= seconds <= MAX_SECONDS for seconds in dataclasses.astuple(header.timings)):
            raise ValueError("a stage took less than no time, or for ever")
        if header.examples > MAX_EXAMPLES or header.a > MAX_A or header.update_id.sequence > MAX_INT:
            raise ValueError(f"more than {MAX_EXAMPLES} examples, a = {MAX_A:g} or 2^63 updates")
        return header


class _Reading:
    """Turns every error that malformed JSON can cause into one BadPayload."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)):
            raise BadPayload(f"cannot read the {self.what}", why=f"{type(error).__name__}: {error}") from error


def _dump(raw: Mapping[str, Any]) -> bytes:
    return json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_HEADER_BYTES:
        raise BadPayload(f"a header of {len(data)} bytes", why=f"at most {MAX_HEADER_BYTES} are read")
    require_small(data, MAX_HEADER_BYTES // BYTES_A_TOKEN)
    raw = json.loads(data)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return raw


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:80]!r} is no integer")
    if abs(value) > MAX_INT:
        raise ValueError("an integer of more than 64 bits")
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{str(value)[:80]!r} is neither true nor false")
    return value


def _float(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:80]!r} is no number")
    return finite(float(value), "a number")


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} is no text")
    return value


def _printable(text: str) -> None:
    """Raise ValueError unless the text is one printable line; it may be long, as a codec with rules by layer is."""
    if not text.isprintable():
        raise ValueError(f"{text[:80]!r} is no line of text")


def _name(value: Any) -> str:
    """Return a short text that UTF-8 can encode and a line of a log can show; raise ValueError for any other value."""
    text = _str(value)
    if len(text) > MAX_NAME or not text.isprintable():
        raise ValueError(f"{text[:80]!r} is no name")
    return text


_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": _int, "float": _float, "str": _str, "bool": _bool}


def _scalars(kind: type, raw: Mapping[str, Any], exclude: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a dataclass's fields with plain values, cast to their declared types; unknown keys are ignored.

    null is valid only if the field may be None.
    """
    known: dict[str, Any] = {}
    for f in dataclasses.fields(kind):
        if f.name in exclude or f.name not in raw:
            continue
        declared = str(f.type).removesuffix(" | None")
        if raw[f.name] is None and declared == f.type:
            raise ValueError(f"{f.name} is null")
        cast = _CASTS.get(declared, _CASTS["str"])
        known[f.name] = None if raw[f.name] is None else cast(raw[f.name])
    return known


def _metrics(raw: Any) -> dict[str, tuple[float, float]]:
    if len(raw) > MAX_METRICS:
        raise ValueError(f"{len(raw)} metrics, at most {MAX_METRICS} are read")
    metrics = {_name(k): (_float(total), _float(count)) for k, (total, count) in raw.items()}
    for name, (total, count) in metrics.items():
        if len(name.removeprefix(MEASURED if name.startswith(MEASURED) else TRAINED)) > MAX_METRIC_LETTERS:
            raise ValueError(f"the metric {name!r} has more than {MAX_METRIC_LETTERS} letters")
        if abs(total) > MAX_METRIC or not (count == 0 or MIN_COUNT < count < MAX_METRIC):
            raise ValueError(f"{name} is {total} over {count}")
        if name.rpartition("/")[2] == "accuracy" and not 0 <= total <= count * (1 + ROUNDING):
            raise ValueError(f"{name} is {total} right of {count}")
    return metrics


def _parts(raw: Any) -> tuple[Part, ...]:
    if len(raw) > MAX_PARTS:
        raise BadPayload(f"{len(raw)} parts", why=f"at most {MAX_PARTS} are read")
    parts = tuple(Part(_name(p["name"]), _int(p["length"]), _name(p["sha256"]), _int(p["offset"])) for p in raw)
    if any(p.length < 0 or p.offset != 0 for p in parts):
        raise ValueError("a part's length is negative or its offset is not 0")
    return parts


def _known(raw: Mapping[str, Any], keys: frozenset[str]) -> None:
    if unknown := raw.keys() - keys:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))[:80]!r}")


def _keys(kind: type, *more: str) -> frozenset[str]:
    return frozenset((*(f.name for f in dataclasses.fields(kind)), *more))


_TYPES: Mapping[type, str] = {ReplyHeader: "reply", Failure: "failure", PhaseReply: "phase"}
_KEYS = {name: _keys(kind, "type") for kind, name in _TYPES.items()}
_TRANSFER, _PART, _TIMINGS = _keys(Transfer), _keys(Part), _keys(Timings)
