"""What passes the gate, read as our own clients and the lane speak HTTP: whose answer a request is, how long, whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from thinwire.transport.protocol.http import PUSH, inflate, unblock

MAX_HEADER = 1 << 20
PART = b"PUT /tw/v1/parts/"


@dataclass(frozen=True)
class Answer:
    """A device's update to a round's assignment."""

    round: int
    device: str


@dataclass
class Upload:
    """A request for the rest of a part of an answer: it begins at byte `offset` of the part and has `of` bytes, of
    which `given` have gone to the aggregator.
    """

    answer: Answer
    offset: int
    of: int
    given: int = 0


def update(header: bytes, body: bytes) -> Answer | None:
    """What a request brings, if that is a trained update: RUN.ROUND.DEVICE is the id of its assignment."""
    if not header.startswith(f"POST {PUSH} ".encode()):
        return None
    said = json.loads(inflate(unblock(body)[0], MAX_HEADER))
    if not said.get("parts"):
        return None
    _, number, device = said["assignment_id"].rsplit(".", 2)
    return Answer(int(number), device)


def is_part(header: bytes) -> bool:
    """Whether a request brings the rest of a part of an answer."""
    return header.startswith(PART)


def offset(header: bytes) -> int:
    """Where the rest begins in its part."""
    return int(header.partition(b"?offset=")[2].partition(b" ")[0] or 0)


def length(header: bytes) -> int:
    """Of the body."""
    for line in header.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
        assert name != b"transfer-encoding", "the lane knows how long its bodies are"
    return 0


async def whole(reader: asyncio.StreamReader) -> bytes:
    """A head with its body."""
    header = await reader.readuntil(b"\r\n\r\n")
    return header + await reader.readexactly(length(header))


async def unless_closed(wanted: Coroutine[Any, Any, Any], other: asyncio.StreamReader) -> Any:
    """What is wanted, unless the other side, which has nothing to say now, ends its connection first."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wanted), asyncio.ensure_future(other.read(1))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ConnectionAbortedError("the other side is gone")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
