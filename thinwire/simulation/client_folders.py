"""Folders of simulated clients' run state: in memory until a client is put down, or shared by several processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thinwire.client.run_state import STATE, ClientRunState, RunFolder, run_path, write_unsynced
from thinwire.core.statedir import disk_error, write_atomically


class CachedRunFolder(RunFolder):
    """Holds a client's run state and its encoded updates: in memory while it works, on disk after `put_down`.

    With `is_new`, the disk has nothing of this client, and `load` does not look there. A thousand folders or files take
    longer to make and to remove than a round.

    Invariant: `load` after `put_down` returns the state that was committed last.
    """

    def __init__(self, own: Path, run: str, is_new: bool = False) -> None:
        super().__init__(run_path(own, run), write_unsynced)
        self._is_new = self.is_only_run = is_new  # a simulation is one run
        self._bodies: dict[str, bytes] = {}  # file -> an encoded update that is not on disk yet
        self._held: ClientRunState | None = None  # committed, but not on disk yet

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the encoded updates in memory."""
        return sum(len(body) for body in self._bodies.values())

    def load(self) -> tuple[ClientRunState, list[str]]:
        return (ClientRunState(), []) if self._is_new else super().load()

    def body(self, path: Path | None) -> Path | bytes | None:
        """Return the encoded update of this file, from memory if it is there."""
        return self._bodies.get(path.name, path) if path else None

    def commit(self, state: ClientRunState, parts: Mapping[str, bytes] | None = None) -> None:
        bodies = {**self._bodies, **(parts or {})}
        self._bodies = {entry.file: bodies[entry.file] for entry in state.outbox if entry.file in bodies}
        self._held = state

    def put_down(self) -> None:
        """Write the state that was committed last to disk, unless it is there already."""
        if self._held is not None:
            super().commit(self._held, self._bodies)
            self._held, self._bodies = None, {}


PRIVATE = 0o600


class SharedFolder(RunFolder):
    """Holds the run state of a client that several processes serve in turn: each commit is on disk for the next
    process.

    Invariant: if a process is killed at any moment, `load` returns the complete state before or after a commit. A power
    failure may leave another state, unless the folder is `durable`.
    """

    def __init__(self, folder: Path, durable: bool = False) -> None:
        super().__init__(folder, write_atomically if durable else write_swapped)

    def load(self) -> tuple[ClientRunState, list[str]]:
        path = self.folder / STATE
        if not path.exists() and (draft := draft_of(path)).exists():
            draft.rename(path)
        return super().load()


def write_swapped(path: Path, data: bytes) -> None:
    """Replace a file without syncing it: write the new one under another name, remove the old one, then rename the new
    one.

    A rename over the old file would be one step. But ext4 then writes the new file to disk at once, which takes longer
    than all other work of a small client.
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
    """Return the name under which a new file is written before it replaces `path`."""
    return path.with_name(f".{path.name}.draft")


def shared_folder(folder: Path, run: str, durable: bool = False) -> SharedFolder:
    """Return the shared folder of a run in a client's own folder."""
    return SharedFolder(run_path(folder, run), durable)
