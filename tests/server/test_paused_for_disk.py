"""A full disk pauses all runs of a service, which stays up and goes on when there is space: nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.several_runs import Site, steady
from tests.support.small_disk import small_disk, why_not
from thinwire.core import disk_reserve, statedir
from thinwire.core.disk_reserve import DiskReserve, disk_full_text
from thinwire.core.errors import NotWritten
from thinwire.core.events import RoundClosed, RoundOpened, UpdateDropped
from thinwire.core.run_events import DiskFilled, DiskFreed
from thinwire.server import command_queue, model_store, round_close
from thinwire.store.database import Database

FULL_S = 30.0  # for which the disk is full
ROUNDS = RoundOpened, RoundClosed
SPEEDS = {"a": 1.0, "b": 1.4, "c": 2.3}


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are read at each poll, because the virtual clock does not wait for real seconds."""
    monkeypatch.setattr(command_queue, "COMMANDS_READ_S", 0.0)


class Disk:
    """A disk that takes nothing for FULL_S seconds, from the `at`-th write on; what is in the reserve may be used."""

    def __init__(self, site: Site, at: int = 0) -> None:
        self.site, self.at, self.writes, self.until = site, at, 0, -1.0
        self.is_released, self.said = False, list[str]()

    def here(self) -> None:
        self.writes += 1
        if self.writes == self.at:
            self.until = self.site.clock.now() + FULL_S
        if self.site.clock.now() < self.until and not self.is_released:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def takes(self, write: Any) -> Any:
        """Return a function that writes a file to this disk."""

        def call(*given: Any) -> Any:
            def tried() -> Any:
                try:
                    self.here()
                except OSError as error:
                    raise NotWritten(f"cannot write {given[0]}", why=str(error)) from error
                return write(*given)

            return statedir.patiently(tried)

        return call

    def fill(self) -> bool:
        return True

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        self.is_released = True
        yield
        self.is_released = False

    def has_space(self) -> bool:
        return self.site.clock.now() >= self.until

    def mark(self, why: str) -> None:
        self.said.append(why)

    def unmark(self) -> None:
        self.said.append("")


@contextlib.contextmanager
def writes_on(disk: Disk) -> Iterator[None]:
    """While it lasts, the database of this process is on that disk."""
    writing = Database.writing

    @contextlib.contextmanager
    def written(database: Database) -> Iterator[Any]:
        with writing(database) as connection:
            try:
                disk.here()
            except OSError as error:
                raise NotWritten("cannot use the database", why=str(error)) from error
            yield connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "writing", written)
        for name in ("write_model", "write_atomically"):
            patch.setattr(model_store, name, disk.takes(getattr(model_store, name)))
        yield


def site_of(folder: Path, runs: int) -> Site:
    """A run with model files of an optimizer and a replica, and others beside it."""
    site = Site(folder, steady(SPEEDS))
    site.submit(run={"rounds": 2}, server={"optimizer": "fedadam"}, downlink={"codec": "int8"})
    for seed in range(1, runs):
        site.submit(run={"rounds": 2, "seed": seed}, cohort={"clients": 2})
    return site


def served(folder: Path, at: int = 0, runs: int = 1) -> tuple[Site, Disk]:
    """Serve the runs on a disk that is full at one of the service's writes."""
    site = site_of(folder, runs)
    disk = Disk(site, at)
    with writes_on(disk):
        site.serve(reserve=disk)
    return site, disk


@pytest.mark.parametrize("runs", [1, 2])
def test_a_disk_that_is_full_at_any_write_loses_nothing(tmp_path: Path, runs: int) -> None:
    undisturbed, counted = served(tmp_path / "undisturbed", runs=runs)
    results = [undisturbed.result(run_id) for run_id in undisturbed.runs]
    assert {status for status, *_ in results} == {"done"}
    paused = kept_open = 0
    for at in range(1, counted.writes + 1, max(1, counted.writes // 6)):
        site, disk = served(tmp_path / str(at), at, runs)
        found = [site.result(run_id) for run_id in site.runs]  # each assignment has one outcome, and sums agree
        if runs == 1:
            assert found == results, f"full at write {at}: other bits"
        assert {status for status, *_ in found} == {"done"}, f"full at write {at}"
        numbered = [one for one in site.store.events(None) if isinstance(one[1], DiskFilled | DiskFreed)]
        own = [event for _, event in numbered]
        if own:  # else a write that may wait, such as the note of a delivery
            paused += 1
            assert [type(event) for event in own] == [DiskFilled, DiskFreed]
            assert disk.said[1].startswith("cannot "), "other processes are told"
            assert disk.said[-1] == ""
            assert isinstance(own[1], DiskFreed)
            assert own[1].seconds >= FULL_S - 1.0
            (full, _), (free, _) = numbered
            rounds = [(seq, type(e)) for id_ in site.runs for seq, e in site.store.events(id_) if isinstance(e, ROUNDS)]
            assert not [kind for seq, kind in rounds if full < seq < free], "rounds neither open nor close"
            before = [kind for seq, kind in rounds if seq < full]
            kept_open += before.count(RoundOpened) > before.count(RoundClosed)
        site.store.close()
    assert paused > 3
    assert kept_open, "a run is paused in its round, which goes on when there is space"


def test_the_clock_of_the_runs_stands_still(tmp_path: Path) -> None:
    undisturbed, counted = served(tmp_path / "undisturbed", runs=2)
    site, _ = served(tmp_path / "full", counted.writes // 2, 2)
    for run_id in site.runs:
        elapsed = [one.events(run_id, RoundClosed)[-1].elapsed_s for one in (undisturbed, site)]
        assert elapsed[1] < elapsed[0] + 5.0 < FULL_S, "devices worked on, and other runs may have them meanwhile"
    last = max(event.at for run_id in site.runs for event in site.events(run_id, RoundClosed))
    before = max(event.at for run_id in undisturbed.runs for event in undisturbed.events(run_id, RoundClosed))
    assert last - before > FULL_S / 2


def test_a_service_that_ends_while_the_disk_is_full_goes_on_at_the_next_start(tmp_path: Path) -> None:
    _, counted = served(tmp_path / "undisturbed")
    site = site_of(tmp_path / "ended", 1)
    disk = Disk(site, counted.writes // 2)
    with writes_on(disk):
        site.serve(seconds=10.0, reserve=disk)
    assert site.store.run(site.runs[0]).status == "running"
    site.clock.advance(FULL_S)
    site.serve()
    assert site.result(site.runs[0])[0] == "done"


def test_a_reply_that_the_disk_does_not_delete_for_now_ends_no_run(tmp_path: Path) -> None:
    undisturbed, _ = served(tmp_path / "undisturbed")
    site = site_of(tmp_path / "full", 1)
    disk, ack, left = Disk(site), site.fleet.ack, [1]

    def ack_once_refused(update_ids: Any) -> None:
        if update_ids and left:
            left.clear()
            disk.until = site.clock.now() + FULL_S
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(site.fleet.spool.path(update_ids[0])))
        ack(update_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site.fleet, "ack", ack_once_refused)
        site.serve(reserve=disk)
    assert disk.said[1].endswith(".reply (Read-only file system)")
    assert site.result(site.runs[0]) == undisturbed.result(undisturbed.runs[0])


def test_replies_are_opened_again_once_the_process_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process that has too many files open: the updates count, in their order."""
    undisturbed = Site(tmp_path / "undisturbed", steady(SPEEDS))
    undisturbed.submit(run={"rounds": 2})
    undisturbed.serve()
    site, tries, opened = Site(tmp_path / "busy", steady(SPEEDS)), list[Path](), Path.open
    site.submit(run={"rounds": 2})

    def open_at_the_third_try(path: Path, *given: Any, **more: Any) -> Any:
        if path.suffix == ".reply":
            tries.append(path)
            if tries.count(path) < 3:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *given, **more)

    monkeypatch.setattr(Path, "open", open_at_the_third_try)
    monkeypatch.setattr(round_close, "RETRY_S", 0.0, raising=False)
    site.serve()
    assert site.result(site.runs[0]) == undisturbed.result(undisturbed.runs[0])
    assert not site.events(site.runs[0], UpdateDropped)


def test_the_reserve_is_an_eighth_of_a_small_disk_and_makes_room_for_a_record(tmp_path: Path) -> None:
    if reason := why_not(tmp_path / "try"):
        pytest.skip(reason)
    with small_disk(tmp_path / "disk") as disk:
        reserve = DiskReserve(disk.folder)
        assert reserve.fill()
        assert 900_000 < reserve.size <= 2**20
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "record").write_bytes(bytes(4096))
        with reserve.released():
            (disk.folder / "record").write_bytes(bytes(4096))
            reserve.mark("cannot write: No space left on device")
        assert not reserve.has_space(), "the reserve itself no longer fits"
        assert "No space left on device; they go on when there is space" in disk_full_text(disk.folder)
        disk.free()
        assert reserve.has_space()
        assert reserve.path.stat().st_size == reserve.size
        reserve.unmark()
        assert disk_full_text(disk.folder) == ""


def test_64_mib_are_held_back_on_a_large_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_reserve.RESERVE_BYTES == 64 * 2**20
    monkeypatch.setattr(disk_reserve, "RESERVE_BYTES", 2**20)
    reserve = DiskReserve(tmp_path)
    assert reserve.fill()
    assert reserve.path.stat().st_blocks * 512 >= 2**20, "the space is taken, not only promised"
    with reserve.released():
        assert not reserve.path.exists()
    assert reserve.has_space()
