"""A run's folder of a client whom several processes serve in turn: what one of them commits is on disk for the next."""

from __future__ import annotations

from pathlib import Path

from thinwire.client.disk.state import STATE, RunFolder, RunState, run_folder
from thinwire.core.home import disk_error

PRIVATE = 0o600


class SharedFolder(RunFolder):
    """Law: whoever is killed at any moment, `load` gives the state before or after a commit, whole; a power cut may
    leave another.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_swapped)

    def load(self) -> tuple[RunState, list[str]]:
        path = self.folder / STATE
        if not path.exists() and (draft := draft_of(path)).exists():
            draft.rename(path)
        return super().load()


def write_swapped(path: Path, data: bytes) -> None:
    """The old file goes when the new one is whole under another name, and only then is that one renamed.

    Renamed over the old file it would be one step, but ext4 then has the disk write it at once, which takes longer
    than all else that a small client does.
    """
    draft = draft_of(path)
    try:
        draft.touch(PRIVATE)
        draft.write_bytes(data)
        path.unlink(missing_ok=True)
        draft.rename(path)
    except OSError as error:
        raise disk_error(error, path) from error


def draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def shared_folder(folder: Path, run: str) -> SharedFolder:
    return SharedFolder(run_folder(folder, run).folder)
