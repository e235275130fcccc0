"""An answer's parts on their way from the wire to the spool: hashed and written in a thread while more come in."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

from thinwire.core.fleet import Spool
from thinwire.core.types import Part, ReplyHead
from thinwire.flower.refusals import Refusal


class Intake:
    """Takes the bytes of the parts in order. Law: `finish` returns only when every digest matches and the file is
    durable; at any error the draft is gone.
    """

    def __init__(self, spool: Spool, head: ReplyHead) -> None:
        self.draft: Path = spool.draft(head.update_id)
        self._file: BinaryIO = open(self.draft, "wb", buffering=0)  # noqa: SIM115 - closed by finish and abandon
        self._parts: Sequence[Part] = head.parts
        self._index, self._left = -1, 0
        self._hash = hashlib.sha256()
        try:
            self._next_part()  # parts without bytes are checked here
        except Refusal:
            self.abandon()
            raise

    def take(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._index >= len(self._parts):
                raise Refusal(400, "protocol", "there is more than the head says")
            piece = view[: self._left]
            self._hash.update(piece)
            self._write(piece)
            view, self._left = view[len(piece) :], self._left - len(piece)
            if not self._left:
                self._next_part()

    def finish(self) -> None:
        if self._index < len(self._parts):
            raise Refusal(400, "damaged", "there is less than the head says")
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self.draft.unlink()

    def _next_part(self) -> None:
        """Check the part that is complete, and go on to the next one that has bytes."""
        while not self._left:
            if self._index >= 0 and self._hash.hexdigest() != self._parts[self._index].sha256:
                raise Refusal(400, "damaged", f"part {self._parts[self._index].name!r} does not fit its digest")
            self._index += 1
            if self._index >= len(self._parts):
                return
            self._hash, self._left = hashlib.sha256(), self._parts[self._index].length

    def _write(self, piece: memoryview) -> None:
        while len(piece):
            piece = piece[self._file.write(piece) :]


async def stream(blocks: AsyncIterator[bytes], spool: Spool, head: ReplyHead) -> Path:
    """The draft that holds all of an answer's parts, durable. One block is written while the next comes in."""
    intake = await asyncio.to_thread(Intake, spool, head)
    writing: asyncio.Future[None] | None = None
    try:
        async for data in blocks:
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(asyncio.to_thread(intake.take, data))
        if writing is not None:
            await writing
        await asyncio.to_thread(intake.finish)
    except BaseException:
        if writing is not None:
            await asyncio.wait([writing])
        intake.abandon()
        raise
    return intake.draft


def store(data: bytes, spool: Spool, head: ReplyHead) -> Path:
    """The same for parts that are here already."""
    intake = Intake(spool, head)
    try:
        intake.take(data)
        intake.finish()
    except BaseException:
        intake.abandon()
        raise
    return intake.draft
