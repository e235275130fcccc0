"""A run's folder for one of many simulated clients: on disk when it is put down, in memory while it is at work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thinwire.client.state import RunFolder, RunState, run_folder, write_unsynced
from thinwire.core.home import private_folder


class HeldFolder(RunFolder):
    """Law: what `load` gives after `put_down` is what was committed last. Answers' parts are files from the start."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, write_unsynced)
        self._answers: frozenset[str] = frozenset()
        self._held: RunState | None = None  # committed, and not on disk yet

    def load(self) -> tuple[RunState, list[str]]:
        state, said = super().load()
        self._answers = _answers(state)
        return state, said

    def commit(self, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        if parts:
            private_folder(self.folder)
        for file, data in (parts or {}).items():
            write_unsynced(self.folder / file, data)
        for file in self._answers - _answers(state):
            (self.folder / file).unlink(missing_ok=True)
        self._answers, self._held = _answers(state), state

    def put_down(self) -> None:
        if self._held is not None:
            super().commit(self._held)
            self._held = None


def held_folder(folder: Path, run: str) -> HeldFolder:
    return HeldFolder(run_folder(folder, run).folder)


def _answers(state: RunState) -> frozenset[str]:
    return frozenset(entry.file for entry in state.outbox if entry.file)
