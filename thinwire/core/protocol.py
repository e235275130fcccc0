"""This module defines the versions of the wire protocol, and reads JSON that strangers send.

An aggregator speaks the newest version and the one before it. A fleet can therefore be updated device by device: first
the aggregator, then the devices. `Range.agreed` finds the version that both ends speak. The committed transcript of a
version (tests/golden/transcripts) is replayed for as long as the version is in `SPOKEN`.

JSON is bounded before it is parsed, because a text that is small on the wire can be large in memory.

The rules at the end hold for every fleet, with a network or without: which replies are the same, what a reply ends, and
what a device must give up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.core.errors import Refused
from thinwire.core.types import PROTOCOL, Assignment, Failure, PhaseReply, Reply, ReplyHeader, phase_of, training_id

SPOKEN: Mapping[int, str] = {
    1: "signed heads, long polls, uploads and downloads that go on where they were cut",
}


@dataclass(frozen=True)
class Range:
    """Holds the versions that one end speaks, from `oldest` to `newest`, both included.

    >>> Range(1, 2).agreed(Range(2, 3))
    2
    """

    oldest: int
    newest: int

    def agreed(self, other: Range) -> int:
        """Return the newest version that both ends speak.

        It raises `Refused` if there is none, with both ranges and the end to update.
        """
        version = min(self.newest, other.newest)
        if version < max(self.oldest, other.oldest):
            behind = "the device" if other.newest < self.oldest else "the aggregator"
            raise Refused(
                f"no version of the protocol is spoken by both: the aggregator speaks {self}, the device {other}",
                why=f"{behind} is older than the other end can still speak to",
                hint=f"update thinwire on {behind}: pip install --upgrade thinwire",
            )
        return version

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPEAKS = Range(max(min(SPOKEN), PROTOCOL - 1), PROTOCOL)


def without_facts(header: ReplyHeader) -> ReplyHeader:
    """Return a reply's header without any fact of its client's data: the only form under masks and with privacy."""
    return ReplyHeader(
        header.assignment_id, header.update_id, header.base_version, 0, parts=header.parts, codec=header.codec,
        protocol=header.protocol, transfer=header.transfer, identity=header.identity,
    )  # fmt: skip


def without_digests(header: ReplyHeader) -> ReplyHeader:
    """Return a protected reply's header as the journal keeps it, without the digests of its parts.

    Training and encoding can be repeated, so a digest would confirm a guess of an update, and of the data behind it.
    """
    return replace(header, parts=tuple(replace(part, sha256="") for part in header.parts))


MAX_DEPTH = 8  # the deepest message is a hello: its tasks' codecs are at depth 4
BYTES_A_TOKEN = 8  # bytes of the bound for each value; real messages have at least 12: names, digests, numbers

_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def read_json(data: bytes, max_bytes: int) -> Any:
    """Return the value of a JSON text of at most `max_bytes`; raise ValueError if it is not JSON or has too many
    values.

    Invariant: at most `max_bytes / BYTES_A_TOKEN` values, in lists and objects of at most `MAX_DEPTH` levels, are made.
    NaN and Infinity are not JSON.

    >>> read_json(b'{"parts": [1, 2]}', 1000)
    {'parts': [1, 2]}
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON: at most {max_bytes} are read here")
    require_small(data, max_bytes // BYTES_A_TOKEN)
    return json.loads(data.decode(), parse_constant=_refuse)  # decoded here: json.loads would accept UTF-16 too


def require_small(data: bytes, max_tokens: int, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError for a JSON text with too many values or levels, before any value of it is made.

    The function counts brackets, commas and colons outside of strings, in a few passes at the speed of memory. This is
    what a parser would see up to the first mistake in the text. A text with a mistake may be refused here for another
    reason.

    >>> require_small(b'["[[[[[[[[[[[["]', 10)
    """
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining '"' begins or ends a string
    if bare.count(b'"') > 2 * max_tokens:
        raise ValueError(f"more than {max_tokens} strings in a message")
    bare = b"".join(bare.split(b'"')[::2])
    if sum(map(bare.count, (b",", b":", b"[", b"{"))) > max_tokens:
        raise ValueError(f"more than {max_tokens} values in a message")
    nested = bare.translate(_BRACKETS, _OTHERS)
    for _ in range(max_depth):
        nested = nested.replace(b"[]", b"")
    if nested:
        raise ValueError(f"lists and objects that are nested deeper than {max_depth}, or not closed")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def reply_digest(header: ReplyHeader) -> bytes:
    """Return the digest by which a fleet recognises a reply that arrives again under its update id.

    It covers the assignment's id and everything that the aggregator aggregates or records as a result. It leaves out
    the times, the transfer and the protocol version, which may differ between two transmissions of one reply.
    """
    metrics = sorted((name, float(total), float(count)) for name, (total, count) in header.metrics.items())
    said = (
        header.assignment_id, header.parts, header.base_version, header.examples, header.steps, header.planned,
        float(header.a),
        float(header.norm), header.codec, header.lost, metrics, sorted(header.counters.items()),
        *([sorted(header.histograms.items())] if header.histograms else ()),
    )  # fmt: skip
    return hashlib.sha256(repr(said).encode()).digest()


def same_reply(known: bytes, header: ReplyHeader) -> bool:
    """Return True if a reply has the digest `known`; another one under its update id is a `state-lost` failure.

    Invariant: a reply to another assignment is never the same, even with equal contents. The device has used a sequence
    number twice, and without a failure the aggregator would wait for the second assignment.
    """
    return reply_digest(header) == known


def withdrawn(held: Iterable[str], cancelled: Container[str]) -> list[str]:
    """Return the ids of the assignments that a device must give up: those that it holds and that were cancelled.

    Invariant: an id counts as cancelled also if this fleet never sent the assignment, because the device may hold it
    from before a restart of the aggregator. It counts until the assignment is sent again.
    """
    return [assignment_id for assignment_id in held if assignment_id in cancelled]


def ends(reply: Reply, assignment_id: str) -> bool:
    """Return True if a reply ends this assignment of its device.

    An advertisement does not end the training assignment that it replies to. The masked update ends it, and with it the
    phase `masked`, which has no reply of its own. A failure ends all phases of its round.

    >>> left = Failure("failed", "roster", "digits-3.12.pi-01")
    >>> ends(left, "digits-3.12.pi-01"), ends(left, "digits-3.12~agree.pi-01"), ends(left, "digits-3.13.pi-01")
    (True, True, False)
    """
    phase = phase_of(assignment_id)
    if isinstance(reply, PhaseReply):
        return bool(phase) and assignment_id == reply.assignment_id
    if assignment_id == reply.assignment_id:
        return True
    is_over = phase == "masked" or (bool(phase) and isinstance(reply, Failure))
    return is_over and training_id(assignment_id) == reply.assignment_id


def is_protected(assignment: Assignment) -> bool:
    """Return True if a reply may tell nothing of its client's data: under masks, or with differential privacy."""
    if assignment.secure is not None or assignment.kind == "secure":
        return True
    plan: object = assignment.plan  # a digest until the client has resolved it; an aggregator may send anything
    privacy = plan.get("privacy") if isinstance(plan, Mapping) else None
    return isinstance(privacy, Mapping) and privacy.get("mode", "off") != "off"
