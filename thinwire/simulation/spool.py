"""A spool that serves one process: what is small waits in memory, the rest in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.core.types import Arrived, ReplyHead, UpdateId
from thinwire.store import FileSpool

HELD_BYTES = 64 << 20  # of frames that wait in memory for their fold


class HeldSpool(FileSpool):
    """A FileSpool beside which bodies may be kept with `hold`; they are opened, listed and deleted like the others."""

    def __init__(self, folder: Path, most_bytes: int = HELD_BYTES) -> None:
        super().__init__(folder, durable=False)
        self._most, self._bytes = most_bytes, 0
        self._bodies: dict[UpdateId, tuple[ReplyHead, memoryview]] = {}

    def has_room(self, head: ReplyHead) -> bool:
        return self._bytes + head.payload_bytes <= self._most

    def hold(self, head: ReplyHead, body: memoryview) -> None:
        if self.head(head.update_id) is None:  # the first one counts
            self._bodies[head.update_id] = head, body
            self._bytes += len(body)

    def head(self, update_id: UpdateId) -> ReplyHead | None:
        held = self._bodies.get(update_id)
        return held[0] if held else super().head(update_id)

    def heads(self) -> Sequence[ReplyHead]:
        return [*super().heads(), *(head for head, _ in self._bodies.values())]

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        if update_id in self._bodies:
            return _parts(*self._bodies[update_id])
        return super().open(update_id)

    def delete(self, update_id: UpdateId) -> None:
        if update_id in self._bodies:
            self._bytes -= len(self._bodies.pop(update_id)[1])
        else:
            super().delete(update_id)


def _parts(head: ReplyHead, body: memoryview) -> Iterator[Arrived]:
    at = 0
    for part in head.parts:
        yield body[at : at + part.length].toreadonly()
        at += part.length
