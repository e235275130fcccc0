"""The record of a delivery to a device decides nothing: no poll makes a commit for it, and it ends no service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.reasons import noted
from tests.support.server_bench import Bench, ToldFleet, scripted
from thinwire.core.errors import NotWritten
from thinwire.core.events import AssignmentDelivered, Event, RunNoted
from thinwire.core.fleet import Delivered, Envelope
from thinwire.server.command_queue import CommandQueue
from thinwire.server.recording_fleet import DELIVERIES_WRITE_S, RecordingFleet


class TakingFleet(ToldFleet):
    """Its devices take up what they are told to have, at a time of day."""

    taking: Sequence[Envelope] = ()

    def delivered(self) -> Sequence[Delivered]:
        taken, self.taking = [Delivered(one.device, one.assignment, 5.0) for one in self.taking], ()
        return taken


class Setting:
    """A run whose devices were selected, behind the fleet that the service polls."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(folder, [scripted(name) for name in "abcdef"], TakingFleet, run={"rounds": 1})
        self.bench.drive()
        self.store, self.full, self.writes = self.bench.store, False, 0
        self.assignments = {e.device: e for e in self.bench.fleet.sent if e.assignment.kind == "train"}
        assert isinstance(self.bench.fleet, TakingFleet)
        self.inner = self.bench.fleet
        self.fleet = RecordingFleet(self.inner, self.store, self.bench.clock, CommandQueue(self.store.commands))
        record = self.store.record

        def counted(run_id: str, events: Sequence[Event], *more: Any, **named: Any) -> None:
            self.writes += 1
            if self.full:
                raise NotWritten("cannot write store.sqlite3", why="No space left on device")
            record(run_id, events, *more, **named)

        patch.setattr(self.store, "record", counted)

    def takes(self, *names: str) -> None:
        """A poll that sees each of these take up its assignment."""
        for name in names:
            self.inner.taking = [self.assignments[name]]
            self.fleet.poll(0.0)

    @property
    def taken(self) -> list[str]:
        return [event.device for event in self.bench.events(AssignmentDelivered)]


@pytest.fixture(name="setting")
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path, monkeypatch)


def test_what_is_delivered_within_half_a_second_is_written_together(setting: Setting) -> None:
    setting.takes("a")
    setting.takes("b", "c", "d")
    assert (setting.writes, setting.taken) == (1, ["a"])
    setting.bench.clock.advance(DELIVERIES_WRITE_S)
    setting.takes("e")
    assert (setting.writes, setting.taken) == (2, ["a", "b", "c", "d", "e"])


def test_it_is_written_before_what_happens_next(setting: Setting) -> None:
    setting.takes("a", "b")
    setting.store.record(setting.bench.run_id, [RunNoted(9.0, noted("it goes on"))])
    last = [event for _, event in setting.store.events(setting.bench.run_id)][-2:]
    assert [type(event) for event in last] == [AssignmentDelivered, RunNoted]


def test_a_full_disk_does_not_end_the_poll_that_saw_it_and_it_is_written_later(setting: Setting) -> None:
    setting.full = True
    setting.takes("a", "b")
    assert setting.taken == []
    setting.full = False
    setting.bench.clock.advance(DELIVERIES_WRITE_S)
    setting.fleet.poll(0.0)
    assert setting.taken == ["a", "b"]
