"""A run's folder that may wait: what is held is on disk when it is saved (`[local] durability = "exit"`).

While anything is held, a mark stands on disk, and in it a number that no answer has reached. So a kill costs what was
held, residual and unsettled answers, and no more: what the disk has from before would count things twice and is not
gone on with, and the next process numbers its answers above the mark, so that no id is ever used again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from thinwire.client.disk.state import (
    NOT_KNOWN,
    Entry,
    RunFolder,
    RunState,
    Write,
    no_bytes,
    run_folder,
    write_unsynced,
)
from thinwire.core.home import private_folder, write_atomically

MARK = "held.json"
AHEAD = 64  # numbers that one mark allows: one durable write for so many rounds


class WaitingFolder(RunFolder):
    """Law: after a kill, `load` gives what was saved last if nothing was held since, else zero state above the mark."""

    def __init__(self, folder: Path, write: Write = write_atomically, min_free: Callable[[], int] = no_bytes) -> None:
        super().__init__(folder, write, min_free)
        self._held: RunState | None = None
        self._below = -1  # the highest sequence that the mark on disk allows

    def load(self) -> tuple[RunState, list[str]]:
        state, said = super().load()
        try:
            below = int(json.loads((self.folder / MARK).read_bytes())["below"])
        except FileNotFoundError:
            return state, said
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
        ):  # the aggregator's hello still says what it has seen
            below = state.sequence + AHEAD
        lost = f"{self.folder.name}: what was not yet sent of it is lost: this client ended before it could save it"
        return RunState(max(below, state.sequence), lost="unsaved", references_from=NOT_KNOWN), [lost]

    def hold(self, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        """Keep the state until `save`. Parts are files at once, to be sent from, but not synced."""
        self.require_room(state, parts or {})  # also for what is written at the exit
        private_folder(self.folder)
        if state.sequence > self._below:
            below = state.sequence + AHEAD
            self._write(self.folder / MARK, json.dumps({"below": below}).encode())
            self._below = below
        for file, data in (parts or {}).items():
            write_unsynced(self.folder / file, data)
        settled = _files(self._held.outbox if self._held else ()) - _files(state.outbox)
        for file in settled:
            with contextlib.suppress(OSError):
                (self.folder / file).unlink()
        self._held = state

    def settle(self, state: RunState) -> None:
        if self._held is None:
            self.commit(state)
        else:
            self.hold(state)

    def save(self) -> None:
        """Make durable what is held; `DataLost` leaves it held."""
        if self._held is not None:
            files = _files(self._held.outbox)
            self.commit(self._held, {file: (self.folder / file).read_bytes() for file in files})

    def commit(self, state: RunState, parts: Mapping[str, bytes] | None = None) -> None:
        super().commit(state, parts)  # what is not of it goes: the mark too
        self._held, self._below = None, -1


def waiting_folder(
    folder: Path, run: str, write: Write = write_atomically, min_free: Callable[[], int] = no_bytes
) -> WaitingFolder:
    return WaitingFolder(run_folder(folder, run).folder, write, min_free)


def _files(outbox: tuple[Entry, ...]) -> set[str]:
    return {entry.file for entry in outbox if entry.file}
