"""One request of a device, and how its answer is read: by its length, so that what was cut short is noticed."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.core.errors import BadPayload
from thinwire.flower.wire.framing import INLINE_BYTES, LENGTH, inflated
from thinwire.flower.wire.signing import NOTHING

MAX_REST_BYTES = INLINE_BYTES  # parts that this disk cannot take; nothing else follows what a device reads


@dataclass(frozen=True)
class Slice:
    """Of a file, from byte `start` on; `digest` is what is signed: that of the whole part."""

    path: Path
    start: int
    length: int
    digest: bytes


@dataclass(frozen=True)
class Call:
    """One request. `wait_s`: how long its answer may take on purpose."""

    method: str
    target: str
    body: bytes | Slice = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    whole_key: bool = False

    @property
    def length(self) -> int:
        return self.body.length if isinstance(self.body, Slice) else len(self.body)

    @property
    def digest(self) -> bytes:
        if isinstance(self.body, Slice):
            return self.body.digest
        return hashlib.sha256(self.body).digest() if self.body else NOTHING


def block_of(answer: http.client.HTTPResponse, most: int) -> bytes:
    """The next block of a body; `BadPayload` where it is larger than `most`."""
    (length,) = LENGTH.unpack(exactly(answer, LENGTH.size))
    if length > most:
        raise BadPayload(f"a block of {length} bytes", why=f"at most {most} are read")
    data = exactly(answer, length)
    try:
        return inflated(data, most) if data else b""
    except ValueError as error:
        raise BadPayload("cannot read what the aggregator says", why=str(error)) from error


def finish(answer: http.client.HTTPResponse) -> None:
    """Read what is left of an answer where it is little; of more the connection is dropped, for it stays unread."""
    if answer.length is not None and answer.length > MAX_REST_BYTES:
        return
    rest = len(answer.read(MAX_REST_BYTES + 1))
    if rest <= MAX_REST_BYTES and answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def everything(answer: http.client.HTTPResponse, most: int) -> bytes:
    """The rest of a body; one that is cut short is an error of the wire, as `read(count)` alone would not say."""
    if answer.length is None or answer.length > most:
        raise BadPayload(f"an answer of {answer.length} bytes", why=f"at most {most} are read")
    return answer.read()


def exactly(answer: http.client.HTTPResponse, count: int) -> bytes:
    data = answer.read(count) if count else b""
    if len(data) != count:
        raise http.client.IncompleteRead(data, count - len(data))
    return data
