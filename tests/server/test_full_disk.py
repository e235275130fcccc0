"""A disk that is full wherever something is written ends no run: with room again it comes to the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from tests.support.server_bench import Bench, scripted
from thinwire.core.errors import NotWritten
from thinwire.core.events import Event, ModelStored, RoundClosed
from thinwire.core.statedir import ON_FULL_DISK
from thinwire.server import secure_round_runner
from thinwire.server.model_store import Versions
from thinwire.server.secure_round_runner import PhaseFiles
from thinwire.server.service import serve

ROUNDS = 2


class Full:
    """A store and model files that take nothing at the `at`-th write."""

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch, at: int) -> None:
        self.left, self.writes = at, 0
        record, write = bench.store.record, Versions.write

        def recorded(run_id: str, events: Sequence[Event], *more: Any, **named: Any) -> None:
            self.here()
            record(run_id, events, *more, **named)

        def written(versions: Versions, *given: Any, **more: Any) -> ModelStored:
            self.here()
            return write(versions, *given, **more)

        patch.setattr(bench.store, "record", recorded)
        patch.setattr(Versions, "write", written)

    def here(self) -> None:
        self.writes += 1
        if self.writes == self.left:
            raise NotWritten("cannot write store.sqlite3", why="No space left on device")


def bench(folder: Path) -> Bench:
    return Bench(folder, [scripted("a"), scripted("b", 2.0)], run={"rounds": ROUNDS})


def models(made: Bench) -> list[Any]:
    return [(e.version, e.digest) for e in made.events(ModelStored)]


def test_a_disk_that_is_full_anywhere_ends_no_run_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = bench(tmp_path / "undisturbed")
    with monkeypatch.context() as patch:
        counting = Full(undisturbed, patch, 0)
        undisturbed.drive()
    for at in range(1, counting.writes + 1):
        made = bench(tmp_path / str(at))
        with monkeypatch.context() as patch, pytest.raises(NotWritten):
            Full(made, patch, at)
            made.drive()
        assert made.store.run(made.run_id).status not in ("failed", "stopped")
        made.restart()
        assert made.drive().status == "done", f"full at write {at}"
        assert models(made) == models(undisturbed), f"full at write {at}"
        closed = [u for e in made.events(RoundClosed) for u in e.aggregated]
        assert len(closed) == len(set(closed)) == 2 * ROUNDS


def test_a_request_of_a_secure_round_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when a run's first request needs a folder, and again when the request is written."""
    files, waited = PhaseFiles(tmp_path / "secure", 1, simulated=False), list[str]()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    opened, mkdir = Mock(side_effect=[full, DEFAULT], wraps=open), Mock(side_effect=[full, *[DEFAULT] * 2])
    monkeypatch.setattr(secure_round_runner, "open", opened, raising=False)
    made = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda path, **named: (mkdir(), made(path, **named))[1])
    token = ON_FULL_DISK.set(lambda error: waited.append(str(error)))
    try:
        path = files.write_request("share", "ab" * 32, b"request")
    finally:
        ON_FULL_DISK.reset(token)
    assert path.read_bytes() == b"request"
    assert len(waited) == 2


def test_it_ends_the_service_whose_next_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(NotWritten):
        Full(made, patch, 4)
        serve(made.fleet, made.store, made.home, clock=made.clock)
    assert made.store.run_queue()
    made.restart()
    assert made.drive().status == "done"
