"""A run's folder for one of many simulated clients: on disk when it is put down, in memory while it is at work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thinwire.client.disk.state import Entry, RunFolder, RunState, run_folder, write_unsynced


class HeldFolder(RunFolder):
    """Law: what `load` gives after `put_down` is what was committed last.

    Answers' parts are files from the start. They stand beside the clients' own folders, which are made for those only
    that are put down: a thousand folders take longer to make and to remove than a round.
    """

    def __init__(self, own: Path, run: str) -> None:
        super().__init__(run_folder(own, run).folder, write_unsynced)
        self._beside, self._called = own.parent, f"{own.name}.{run}"
        self._answers: frozenset[str] = frozenset()
        self._held: RunState | None = None  # committed, and not on disk yet

    def load(self) -> tuple[RunState, list[str]]:
        state, said = super().load()
        self._answers = _answers(state)
        return state, said

    def path(self, entry: Entry) -> Path | None:
        return self._place(entry.file) if entry.file else None

    def commit(self, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        for file, data in (parts or {}).items():
            write_unsynced(self._place(file), data)
        for file in self._answers - _answers(state):
            self._place(file).unlink(missing_ok=True)
        self._answers, self._held = _answers(state), state

    def put_down(self) -> None:
        if self._held is not None:
            super().commit(self._held)
            self._held = None

    def _place(self, file: str) -> Path:
        return self._beside / f"{self._called}.{file}"


def _answers(state: RunState) -> frozenset[str]:
    return frozenset(entry.file for entry in state.outbox if entry.file)
