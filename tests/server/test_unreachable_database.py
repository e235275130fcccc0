"""A database that does not answer for a while ends neither the service nor a run, and no reply is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_paused_for_disk import looks_each_time, site_of
from tests.support.several_runs import Site
from thinwire.core.errors import Unreachable
from thinwire.core.events import ClientFailed, RunStatusChanged
from thinwire.server.run_end import close_undriven
from thinwire.store.database import Database

__all__ = ["looks_each_time"]
OUTAGE_S = 8.0  # for which the database does not answer


class Outage:
    """A database that answers nothing for OUTAGE_S seconds from the `at`-th write on, which is `committed` or not."""

    def __init__(self, site: Site, at: int = 0, committed: bool = False) -> None:
        self.site, self.at, self.committed, self.writes, self.until = site, at, committed, 0, -1.0

    def require_answer(self) -> None:
        if self.site.clock.now() < self.until:
            raise Unreachable("cannot reach the database", why="the connection is closed")

    @contextlib.contextmanager
    def begins_at_a_write(self) -> Iterator[None]:
        """Let the database of this process fail while the block lasts."""
        writing, reading = Database.writing, Database.reading

        @contextlib.contextmanager
        def written(held: Database) -> Iterator[Any]:
            self.writes += 1
            if begins := self.writes == self.at:
                self.until = self.site.clock.now() + OUTAGE_S
            if not (begins and self.committed):
                self.require_answer()
            with writing(held) as connection:
                yield connection
            if begins:
                self.require_answer()

        @contextlib.contextmanager
        def read(held: Database) -> Iterator[Any]:
            self.require_answer()
            with reading(held) as connection:
                yield connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Database, "writing", written)
            patch.setattr(Database, "reading", read)
            yield


def served(folder: Path, at: int = 0, runs: int = 1, committed: bool = False) -> tuple[Site, Outage]:
    """Serve the runs before a database that stops answering at one of the service's writes."""
    site = site_of(folder, runs)
    outage = Outage(site, at, committed)
    with outage.begins_at_a_write():
        site.serve()
    return site, outage


@pytest.mark.parametrize("runs", [1, 2])
def test_a_database_that_stops_answering_at_any_write_loses_nothing(tmp_path: Path, runs: int) -> None:
    undisturbed, counted = served(tmp_path / "undisturbed", runs=runs)
    results = [undisturbed.result(run_id) for run_id in undisturbed.runs]
    for number, at in enumerate(range(1, counted.writes + 1, max(1, counted.writes // 6))):
        site, _ = served(tmp_path / str(at), at, runs, committed=number % 2 == 1)
        found = [site.result(run_id) for run_id in site.runs]  # each assignment has one outcome, and sums agree
        if runs == 1:
            assert found == results, f"an outage at write {at}: other bits"
        assert {status for status, *_ in found} == {"done"}, f"an outage at write {at}"
        assert not [one for run_id in site.runs for one in site.events(run_id, ClientFailed)], f"at write {at}"
        site.store.close()


@pytest.mark.parametrize("committed", [False, True])
def test_a_command_to_end_the_service_is_answered_when_the_database_answers(tmp_path: Path, committed: bool) -> None:
    site = site_of(tmp_path, 1)
    site.store.commands.add("stop-service")
    with Outage(site, at=1, committed=committed).begins_at_a_write():
        site.serve()
    assert site.store.run(site.runs[0]).status == "queued"
    assert not site.store.commands.pending(), "the next start would end at once"


def test_a_run_is_not_closed_without_its_outcomes_because_the_journal_cannot_be_read_now(tmp_path: Path) -> None:
    site = site_of(tmp_path, 1)
    site.serve(seconds=1.0)
    (run_id,), outage = site.runs, Outage(site)
    end = RunStatusChanged(site.clock.wall(), "stopped", "stopped by a person", 10)
    with outage.begins_at_a_write():
        outage.until = site.clock.now() + OUTAGE_S
        with pytest.raises(Unreachable):
            close_undriven(site.store, run_id, end)
        assert outage.writes == 0
        site.clock.advance(OUTAGE_S)
        close_undriven(site.store, run_id, end)
    assert {event.kind for event in site.events(run_id, ClientFailed)} == {"over"}
