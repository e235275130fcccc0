"""A large answer on its way to the aggregator: its head first, then each part from where the aggregator has it."""

from __future__ import annotations

import hashlib
import http.client
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.core.errors import BadPayload, Unreachable
from thinwire.core.json_bounds import read_json
from thinwire.core.types import Part, ReplyHead
from thinwire.flower.device.call import Call, Slice, everything
from thinwire.flower.device.connection import Connection
from thinwire.flower.wire.framing import STREAM_BYTES, packed
from thinwire.flower.wire.refusals import UPLOAD_OFFSET, Refusal
from thinwire.flower.wire.routes import PUSH

FRUITLESS = 2  # tries in a row after which nothing more is there; then whoever calls decides when to try again
DIGITS = re.compile("[0-9]{1,18}")  # of an offset; str.isdigit takes what int does not
MAX_ANSWER_BYTES = 2 * 2**20  # an offset for each of 65 536 parts


class Outgoing:
    """One answer's way. `send` returns when the aggregator has committed it; raises what the last try ended with.

    `pause` is called before a line that was cut is dialled again.
    """

    def __init__(self, connection: Connection, pause: Callable[[], None]) -> None:
        self._connection, self._pause = connection, pause

    def send(self, head: ReplyHead, said: bytes, bundle: Path) -> None:
        offsets: list[int] = []  # of each part, as the aggregator said last; none: it is to be asked
        index, best, fruitless, cut = 0, -1, 0, False
        while True:
            try:
                if cut:
                    offsets, cut = self._durable(head, index, offsets), False
                if not offsets and not (offsets := self._offered(said, head)):
                    return
                fruitless, best = (0, sum(offsets)) if sum(offsets) > best else (fruitless + 1, best)
                index = _open_part(head.parts, offsets)
                told = self._put(head, index, offsets[index], bundle)
                if told.get("done") is True:
                    return
                offsets[index] = _within(told.get("offset"), head.parts[index])
            except Refusal as refusal:
                if fruitless >= FRUITLESS or refusal.kind not in ("offset", "damaged", "offer"):
                    raise
                if refusal.kind == "damaged":
                    _require_sound(head, index, bundle)
                offsets = []
            except (OSError, http.client.HTTPException):
                if fruitless >= FRUITLESS or self._connection.closed:
                    raise
                fruitless += not cut  # until the next offset is known nothing is gained
                cut = bool(offsets)
                self._pause()

    def _offered(self, said: bytes, head: ReplyHead) -> list[int]:
        """How much of each part the aggregator has; none when it has committed the answer."""
        with self._connection.made(Call("POST", PUSH, packed(said))) as answer:
            told = _read(answer)
        if told.get("done") is True:
            return []
        offsets = told.get("offsets")
        if not isinstance(offsets, list) or len(offsets) != len(head.parts):
            raise Unreachable("the aggregator says no offsets of this answer")
        return [_within(offset, part) for offset, part in zip(offsets, head.parts, strict=True)]

    def _put(self, head: ReplyHead, index: int, offset: int, bundle: Path) -> dict[str, Any]:
        """Send the rest of one part."""
        part = head.parts[index]
        start = sum(one.length for one in head.parts[:index]) + offset
        rest = Slice(bundle, start, part.length - offset, bytes.fromhex(part.sha256))
        with self._connection.made(Call("PUT", f"{_target(head, index)}?offset={offset}", rest)) as answer:
            return _read(answer)

    def _durable(self, head: ReplyHead, index: int, offsets: list[int]) -> list[int]:
        """The offsets after a cut; none when the head is to be pushed again."""
        try:
            with self._connection.made(Call("HEAD", _target(head, index))) as answer:
                said = answer.headers.get(UPLOAD_OFFSET.decode(), "")
        except Refusal:
            return []
        offset = _within(int(said) if DIGITS.fullmatch(said) else said[:80], head.parts[index])
        return [*offsets[:index], offset, *offsets[index + 1 :]]


def _within(offset: object, part: Part) -> int:
    if not isinstance(offset, int) or not 0 <= offset <= part.length:
        raise Unreachable("the aggregator says an offset that cannot be", why=f"{offset!r} of {part.length} bytes")
    return offset


def _open_part(parts: tuple[Part, ...], offsets: list[int]) -> int:
    """The first part that is not whole there, else the last one with bytes: an empty rest closes the answer."""
    for index, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        if offset < part.length:
            return index
    return max(index for index, part in enumerate(parts) if part.length)


def _require_sound(head: ReplyHead, index: int, bundle: Path) -> None:
    """`BadPayload` when the part was damaged here: it would be sent for ever."""
    left, digest = head.parts[index].length, hashlib.sha256()
    with open(bundle, "rb", buffering=0) as file:
        file.seek(sum(part.length for part in head.parts[:index]))
        while left and (data := file.read(min(STREAM_BYTES, left))):
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() != head.parts[index].sha256:
        raise BadPayload(f"{bundle} is damaged on this disk", why=f"{head.parts[index].name!r} does not fit its digest")


def _target(head: ReplyHead, index: int) -> str:
    return f"/tw/v1/parts/{head.update_id.run}/{head.update_id.sequence}/{index}"


def _read(answer: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        told = read_json(everything(answer, MAX_ANSWER_BYTES), MAX_ANSWER_BYTES)
        return dict(told)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unreachable("cannot read the aggregator's answer", why=str(error)) from error
