"""The spool of a simulation: files as on an aggregator, without the syncs, since it need not outlive its process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from thinwire.core.errors import DataLost
from thinwire.core.home import private_folder
from thinwire.core.types import ReplyHead, UpdateId


class FolderSpool:
    """core.fleet.Spool with its heads in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_folder(folder)
        self._drafts = itertools.count()
        self._heads: dict[UpdateId, ReplyHead] = {}

    def path(self, update_id: UpdateId) -> Path:
        return self.folder / f"{update_id.run}-{update_id.device}-{update_id.sequence}"

    def draft(self, update_id: UpdateId) -> Path:
        return self.folder / f".{next(self._drafts)}"

    def commit(self, draft: Path, head: ReplyHead) -> None:
        draft.replace(self.path(head.update_id))
        self._heads[head.update_id] = head

    def head(self, update_id: UpdateId) -> ReplyHead | None:
        return self._heads.get(update_id)

    def heads(self) -> Sequence[ReplyHead]:
        return list(self._heads.values())

    def open(self, update_id: UpdateId) -> Iterator[bytes]:
        head = self.head(update_id)
        if head is None:
            raise DataLost(f"update {update_id} is not in the spool")
        with self.path(update_id).open("rb") as file:
            for part in head.parts:
                yield file.read(part.length)

    def delete(self, update_id: UpdateId) -> None:
        if self._heads.pop(update_id, None) is not None:
            self.path(update_id).unlink(missing_ok=True)
