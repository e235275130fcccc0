"""A run is deleted with all its files, and a deletion that is killed anywhere is completed: by repeating, or by the
next start of the service.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Fate, Killed
from tests.support.several_runs import Site, steady
from thinwire.cli.aggregator.serve import Reporter
from thinwire.core.errors import NotFound, Refused
from thinwire.core.events import RoundClosed
from thinwire.core.run_events import ClockBelieved, DeletionPostponed
from thinwire.core.statedir import AggregatorHome
from thinwire.server import command_queue
from thinwire.server.run_deletion import DAY_S, KEEP_DAYS, RETENTION_CHECK_S, Retention, delete_run, require_deletable
from thinwire.store import Store, kept_runs
from thinwire.store.database import Database


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


def over(folder: Path) -> tuple[Site, str, str]:
    """A site with two runs that are done."""
    site = Site(folder, steady({"a": 1.0, "b": 1.5}))
    first, second = site.submit(run={"rounds": 3, "keep": "all"}), site.submit(run={"seed": 1, "rounds": 2})
    site.serve()
    spooled = site.home.spool / first
    spooled.mkdir(parents=True, exist_ok=True)
    (spooled / ".partial-a-7-0000").write_bytes(b"half an upload")
    return site, first, second


def moved(site: Site, folder: Path, of: Path | None = None) -> None:
    """From now on the site is in this folder, with a copy of all that it has, or had in the folder `of`."""
    site.store.close()
    shutil.copytree(of or site.home.root.parent, folder)
    site.home = AggregatorHome.under(folder, durable=False)
    site.store = Store.open(site.home.database, durable=False, clock=site.clock)


def left(site: Site, run_id: str) -> list[str]:
    """What is left of a run, apart from its row: files, and the tables with rows of it."""
    files = [str(path) for path in site.home.root.rglob("*") if run_id in path.parts]
    with site.store._database.reading() as connection:
        for table, _ in kept_runs.OWNED:
            if connection.execute(table.select().where(table.c.run_id == run_id)).first():
                files.append(table.name)
    return files


@contextlib.contextmanager
def dying(fate: Fate, store: Store) -> Iterator[None]:
    """While it lasts, the process may die after each commit of this store and each removal of a file or a folder."""
    writing, unlink, rmdir = Database.writing, os.unlink, os.rmdir

    @contextlib.contextmanager
    def committed(database: Database) -> Iterator[Any]:
        with writing(database) as connection:
            yield connection
        if database is store._database:
            fate.here("commit")

    def removed(remove: Any) -> Any:
        def call(*given: Any, **named: Any) -> None:
            remove(*given, **named)
            fate.here("removal")

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "writing", committed)
        patch.setattr(os, "unlink", removed(unlink))
        patch.setattr(os, "rmdir", removed(rmdir))
        yield


def test_nothing_is_left_of_it_but_its_row_and_the_other_run_is_whole(tmp_path: Path) -> None:
    site, first, second = over(tmp_path)
    before = site.result(second)
    assert left(site, first)
    delete_run(site.store, site.home, first, "ann")
    assert not left(site, first)
    row = site.store.deleted_run(first)
    assert row is not None
    assert (row.deleted_by, row.rounds_closed) == ("ann", 3)
    assert site.result(second) == before


def test_a_deletion_that_is_killed_anywhere_is_completed_by_repeating_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runs, "DELETED_ROWS", 5)
    site, first, second = over(tmp_path / "whole")
    before = site.result(second)
    moved(site, tmp_path / "counted")
    with dying(counted := Fate(), site.store):
        delete_run(site.store, site.home, first, "ann")
    assert len(counted.places) > 20, "rows go in several transactions, and each file is a place"
    for at in range(1, len(counted.places) + 1):
        moved(site, tmp_path / str(at), of=tmp_path / "whole")
        with dying(Fate(at), site.store), pytest.raises(Killed):
            delete_run(site.store, site.home, first, "ann")
        with pytest.raises(NotFound, match="was deleted"):
            site.store.run(first)  # from the first place on: the mark is the first commit
        delete_run(site.store, site.home, first, "ben")
        assert not left(site, first), f"killed at place {at}: {counted.places[at - 1]}"
        row = site.store.deleted_run(first)
        assert row is not None
        assert row.deleted_by == "ann", "the first mark stays"
        assert site.result(second) == before


def test_the_next_service_completes_a_deletion_that_was_killed(tmp_path: Path) -> None:
    site, first, second = over(tmp_path)
    number = site.store.commands.add("delete-run", first, who="ann")
    with dying(Fate(4), site.store), pytest.raises(Killed):
        delete_run(site.store, site.home, first, "ann")
    assert left(site, first)
    third = site.submit(run={"seed": 3, "rounds": 2})
    site.runs.remove(first)
    site.serve()
    assert not left(site, first)
    assert site.store.commands.result(number) == {"done": True}
    assert site.store.run(third).status == "done"
    assert site.store.run(second).status == "done"


def test_a_service_deletes_a_run_while_another_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_runs, "DELETED_ROWS", 5)
    site, first, _ = over(tmp_path)
    going = site.submit(run={"seed": 3, "rounds": 4})
    site.runs.remove(first)

    def on_event(of: str, event: object) -> None:
        if of == going and isinstance(event, RoundClosed) and event.round == 1:
            site.store.commands.add("delete-run", first, who="ann")

    site.on_event = on_event
    site.serve()
    assert not left(site, first)
    assert (site.store.run(going).status, site.store.run(going).rounds_closed) == ("done", 4)
    assert not site.store.commands.pending()


def test_a_service_refuses_to_delete_a_run_that_goes_on(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    run_id = site.submit(run={"rounds": 3})
    numbers = list[int]()

    def on_event(of: str, event: object) -> None:
        if isinstance(event, RoundClosed) and not numbers:
            numbers.append(site.store.commands.add("delete-run", run_id, who="ann"))

    site.on_event = on_event
    site.serve()
    result = site.store.commands.result(numbers[0])
    assert result is not None
    assert (result["done"], result["error"]) == (False, f"{run_id} is running")
    assert site.store.run(run_id).status == "done"


def test_a_queued_run_is_deleted_only_if_that_is_said(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    run_id = site.submit()
    with pytest.raises(Refused, match="is queued, and not over"):
        require_deletable(site.store.run(run_id), with_queued=False)
    require_deletable(site.store.run(run_id), with_queued=True)
    delete_run(site.store, site.home, run_id, "ann")
    assert not left(site, run_id)
    assert not site.store.run_queue()


@pytest.mark.parametrize("keep_days", [None, 30])
def test_a_service_deletes_the_runs_that_ended_too_many_days_ago_and_no_others(
    tmp_path: Path, keep_days: int | None
) -> None:
    site, first, second = over(tmp_path)
    site.clock.advance(31 * DAY_S)
    recent = site.submit(run={"seed": 3, "rounds": 2})
    for _ in range(2):  # the second service deletes the sums by device of the runs that the first one deleted
        site.serve(keep_days=keep_days)
        site.runs.clear()
        site.submit(run={"seed": 4, "rounds": 1})
    assert site.store.run(recent).status == "done"
    assert bool(left(site, first)) == bool(left(site, second)) == (keep_days is None)
    assert bool(site.store.clients(first)) == (keep_days is None)
    assert left(site, recent)
    assert site.store.clients(recent)
    assert not site.store.commands.pending()
    gone = site.store.deleted_run(first)
    assert (gone.deleted_by if gone else None) == (KEEP_DAYS if keep_days else None)


def test_old_runs_are_looked_for_at_the_start_and_then_each_hour(tmp_path: Path) -> None:
    site, first, _ = over(tmp_path)
    kept = Retention(site.store, site.clock, 1)
    kept.step()
    site.clock.advance(2 * DAY_S)
    kept.step()
    commands = {one.run_id: one.who for one in site.store.commands.pending()}
    assert commands[first] == KEEP_DAYS
    assert len(commands) == 2
    site.clock.advance(RETENTION_CHECK_S / 2)
    site.store.commands.answer(site.store.commands.pending()[0].id, {})
    kept.step()
    assert len(site.store.commands.pending()) == 1, "it looks again after an hour"
    site.clock.advance(RETENTION_CHECK_S)
    kept.step()
    kept.step()
    assert len(site.store.commands.pending()) == 2, "a command that waits is not given twice"


def test_a_clock_that_is_far_ahead_after_a_reboot_deletes_nothing_for_an_hour(tmp_path: Path) -> None:
    site, first, _ = over(tmp_path)
    told, alive = list[DeletionPostponed](), site.clock.wall()
    site.clock.origin += 400 * DAY_S
    site.store.record_restart(site.clock.wall(), alive)
    kept = Retention(site.store, site.clock, 30, told.append)
    kept.step()
    assert not site.store.commands.pending()
    assert [round(event.ahead_s / DAY_S) for event in told] == [400]
    lines = list[str]()
    Reporter(site.store, lines.append).event("", told[0])
    assert lines[0].startswith(
        "the clock is 9600 h ahead of the last time that was believed: nothing is deleted by age"
    )
    site.clock.advance(RETENTION_CHECK_S)
    kept.step()
    assert first in {one.run_id for one in site.store.commands.pending()}, "a machine was off for as long"


@pytest.mark.parametrize("known", [True, False], ids=["looked-before", "first-look"])
def test_no_start_with_a_wrong_clock_makes_the_next_one_believe_it(tmp_path: Path, known: bool) -> None:
    site, first, _ = over(tmp_path)
    alive = site.clock.wall()
    if known:
        Retention(site.store, site.clock, 30).step()
    told = list[DeletionPostponed]()
    site.clock.origin += 400 * DAY_S
    for _ in range(3):  # a crash, and another start two minutes later
        site.store.record_restart(site.clock.wall(), alive)
        kept = Retention(site.store, site.clock, 30, told.append)
        for _ in range(2):
            kept.step()
            site.clock.advance(60.0)
        alive = site.clock.wall()
    assert [round(event.ahead_s / DAY_S) for event in told] == [400] * 3
    assert not site.store.commands.pending()
    site.clock.origin -= 400 * DAY_S
    kept = Retention(site.store, site.clock, 30, told.append)
    kept.step()
    assert len(told) == 3, "the clock is right again"
    assert not site.store.commands.pending(), "and the runs are not old"
    site.clock.advance(31 * DAY_S)
    kept.step()
    assert first in {one.run_id for one in site.store.commands.pending()}


def test_a_clock_that_jumped_between_two_looks_is_not_believed_after_a_restart(tmp_path: Path) -> None:
    site, _, _ = over(tmp_path)
    told = list[DeletionPostponed]()
    kept = Retention(site.store, site.clock, 30, told.append)
    for _ in range(2):
        kept.step()
        site.clock.advance(RETENTION_CHECK_S)
    site.clock.origin += 400 * DAY_S
    believed = site.store.believed_at()
    site.store.record_restart(site.clock.wall(), site.clock.wall())
    Retention(site.store, site.clock, 30, told.append).step()
    assert len(told) == 1
    assert site.store.believed_at() == believed
    assert not site.store.commands.pending()
    kinds = [type(event) for _, event in site.store.events(None)]
    assert kinds.count(ClockBelieved) == 1, "the journal does not grow by a row an hour"


def test_a_clock_that_jumps_ahead_and_back_deletes_nothing(tmp_path: Path) -> None:
    site, first, _ = over(tmp_path)
    kept = Retention(site.store, site.clock, 30)
    kept.step()
    for jump in (400 * DAY_S, -400 * DAY_S, 400 * DAY_S):
        site.clock.origin += jump
        site.clock.advance(RETENTION_CHECK_S)
        kept.step()
        assert not site.store.commands.pending()
    site.clock.advance(RETENTION_CHECK_S)
    kept.step()
    assert first in {one.run_id for one in site.store.commands.pending()}, "a clock that stays ahead is believed"
