"""What devices have taken up decides nothing: it costs no commit of its own at every poll, and ends no service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.server_bench import Bench, ToldFleet, scripted
from thinwire.core.errors import NotWritten
from thinwire.core.events import AskTakenUp, Event, RunNoted
from thinwire.core.fleet import Delivered, Envelope
from thinwire.server.service import NOTED_S, CommandQueue, RecordingFleet
from thinwire.store import MeasureRow


class TakingFleet(ToldFleet):
    """Its devices take up what they are told to have, at a time of day."""

    taking: Sequence[Envelope] = ()

    def taken_up(self) -> Sequence[Delivered]:
        taken, self.taking = [Delivered(one.device, one.ask, 5.0) for one in self.taking], ()
        return taken


class Setting:
    """A run whose devices were asked, behind the fleet that the service polls."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(folder, [scripted(name) for name in "abcdef"], TakingFleet, run={"rounds": 1})
        self.bench.drive()
        self.store, self.full, self.writes = self.bench.store, False, 0
        self.asks = {e.device: e for e in self.bench.fleet.sent if e.ask.kind == "train"}
        assert isinstance(self.bench.fleet, TakingFleet)
        self.inner = self.bench.fleet
        self.fleet = RecordingFleet(self.inner, self.store, self.bench.clock, CommandQueue(self.store))
        record = self.store._recorder.record

        def counted(run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
            self.writes += 1
            if self.full:
                raise NotWritten("cannot write store.sqlite3", why="No space left on device")
            record(run_id, events, measured)

        patch.setattr(self.store._recorder, "record", counted)

    def takes(self, *names: str) -> None:
        """A poll that sees each of these take up its ask."""
        for name in names:
            self.inner.taking = [self.asks[name]]
            self.fleet.poll(0.0)

    @property
    def taken(self) -> list[str]:
        return [event.device for event in self.bench.events(AskTakenUp)]


@pytest.fixture(name="setting")
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path, monkeypatch)


def test_what_is_taken_up_within_a_second_is_written_together(setting: Setting) -> None:
    setting.takes("a")
    setting.takes("b", "c", "d")
    assert (setting.writes, setting.taken) == (1, ["a"])
    setting.bench.clock.advance(NOTED_S)
    setting.takes("e")
    assert (setting.writes, setting.taken) == (2, ["a", "b", "c", "d", "e"])


def test_it_is_written_before_what_happens_next(setting: Setting) -> None:
    setting.takes("a", "b")
    setting.store.record(setting.bench.run_id, [RunNoted(9.0, "it goes on")])
    last = [event for _, event in setting.store.events(setting.bench.run_id)][-2:]
    assert [type(event) for event in last] == [AskTakenUp, RunNoted]


def test_a_full_disk_does_not_end_the_poll_that_saw_it_and_it_is_written_later(setting: Setting) -> None:
    setting.full = True
    setting.takes("a", "b")
    assert setting.taken == []
    setting.full = False
    setting.bench.clock.advance(NOTED_S)
    setting.fleet.poll(0.0)
    assert setting.taken == ["a", "b"]
