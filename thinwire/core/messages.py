"""Asks and replies as JSON bytes: the only form in which they travel or are stored (no pickle anywhere)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from thinwire.core.errors import BadPayload
from thinwire.core.types import Ask, Failure, Part, ReplyHead, Timings, Transfer, UpdateId, Verdict, Work, finite

MAX_HEAD_BYTES = 4 * 2**20
MAX_PARTS = 65_536


def ask_to_bytes(ask: Ask) -> bytes:
    raw = _plain(ask)
    raw["verdicts"] = [{**_plain(v), "update_id": str(v.update_id)} for v in ask.verdicts]
    return _dump(raw)


def ask_from_bytes(data: bytes) -> Ask:
    """Read an ask; `BadPayload` says which field is wrong. Fields that a newer aggregator added are ignored."""
    with _Reading("ask"):
        raw = _load(data)
        return Ask(
            **_scalars(Ask, raw, exclude=("plan", "work", "parts", "vectors", "verdicts")),
            plan=raw["plan"],
            work=Work(**_scalars(Work, raw["work"])),
            parts=_parts(raw["parts"]),
            vectors=tuple(raw.get("vectors", ())),
            verdicts=tuple(
                Verdict(UpdateId.parse(v["update_id"]), v["outcome"], int(v["version"])) for v in raw["verdicts"]
            ),
        )


def reply_to_json(reply: ReplyHead | Failure) -> dict[str, Any]:
    raw = _plain(reply)
    if isinstance(reply, ReplyHead):
        raw["update_id"] = str(reply.update_id)
    raw["type"] = "reply" if isinstance(reply, ReplyHead) else "failure"
    return raw


def reply_to_bytes(reply: ReplyHead | Failure) -> bytes:
    return _dump(reply_to_json(reply))


def reply_from_bytes(data: bytes) -> ReplyHead | Failure:
    """Read a reply's head or a failure; numbers are checked to be finite and counts not to be negative."""
    with _Reading("reply"):
        raw = _load(data)
    return reply_from_json(raw)


def reply_from_json(raw: Mapping[str, Any]) -> ReplyHead | Failure:
    """The same from JSON that was read already."""
    with _Reading("reply"):
        transfer = Transfer(**_scalars(Transfer, raw["transfer"])) if raw.get("transfer") else None
        if raw["type"] == "failure":
            return Failure(**_scalars(Failure, raw, exclude=("transfer",)), transfer=transfer)
        head = ReplyHead(
            **_scalars(ReplyHead, raw, exclude=("update_id", "metrics", "timings", "parts", "counters", "transfer")),
            update_id=UpdateId.parse(raw["update_id"]),
            metrics={str(k): (finite(s, k), finite(n, k)) for k, (s, n) in raw["metrics"].items()},
            timings=Timings(**_scalars(Timings, raw["timings"])),
            parts=_parts(raw["parts"]),
            counters={str(k): int(v) for k, v in raw.get("counters", {}).items()},
            transfer=transfer,
        )
        for name in ("a", "norm", "residual_norm"):
            finite(getattr(head, name), name)
        if min(head.examples, head.steps, head.a) < 0:
            raise ValueError("counts must not be negative")
        return head


class _Reading:
    """Any way in which received JSON can be wrong becomes one BadPayload."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyError, TypeError, ValueError, AttributeError, RecursionError)):
            raise BadPayload(f"cannot read the {self.what}", why=f"{type(error).__name__}: {error}") from error


def _plain(thing: Any) -> dict[str, Any]:
    return dataclasses.asdict(thing)


def _dump(raw: Mapping[str, Any]) -> bytes:
    return json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_HEAD_BYTES:
        raise BadPayload(f"a head of {len(data)} bytes", why=f"at most {MAX_HEAD_BYTES} are read")
    raw = json.loads(data)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return raw


_CASTS = {"int": int, "float": float, "str": str}


def _scalars(kind: type, raw: Mapping[str, Any], exclude: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that are plain values, cast to what they are declared as; unknown keys are ignored."""
    known: dict[str, Any] = {}
    for f in dataclasses.fields(kind):
        if f.name in exclude or f.name not in raw:
            continue
        cast = _CASTS.get(str(f.type).removesuffix(" | None"), str)
        known[f.name] = None if raw[f.name] is None else cast(raw[f.name])
    return known


def _parts(raw: Any) -> tuple[Part, ...]:
    if len(raw) > MAX_PARTS:
        raise BadPayload(f"{len(raw)} parts", why=f"at most {MAX_PARTS} are read")
    parts = tuple(Part(str(p["name"]), int(p["length"]), str(p["sha256"]), int(p["offset"])) for p in raw)
    if any(p.length < 0 or p.offset != 0 for p in parts):
        raise ValueError("a part's length is negative or its offset is not 0")
    return parts
