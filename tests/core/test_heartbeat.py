"""When a process was last alive, and by which setting of the wall clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.core import clock
from thinwire.core.clock import Beside, beating, gone_since, keep, kept, last_beat, set_since_s, starting
from thinwire.core.errors import NotWritten
from thinwire.core.statedir import lock_file, write_about


def test_a_file_tells_when_its_process_was_last_alive_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert last_beat(path) == 0.0
    path.write_text("about")
    os.utime(path, (1000.0, 1000.0))
    with lock_file(path) as descriptor:
        assert last_beat(descriptor) == 1000.0, "to hold it is not to be alive"
        with beating(descriptor):
            pass
        assert last_beat(descriptor) > 1000.0
    assert path.read_text() == "about"


def test_an_absence_does_not_end_before_an_aggregator_serves(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert gone_since(path) == 0.0
    with lock_file(path) as descriptor:
        write_about(descriptor, starting(1000.0))
        with beating(descriptor):
            assert gone_since(path) == 1000.0, "it beats, and does not serve"
        write_about(descriptor, {"listen": "127.0.0.1:9090"})
    assert gone_since(path) == last_beat(path) > 1000.0


def test_a_clock_that_is_set_after_the_last_beat_is_told_unless_the_machine_began_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = tmp_path / "clock", [Beside("one", 100.0)]
    monkeypatch.setattr(clock, "beside", lambda: now[0])
    assert set_since_s(file) == 0.0, "nobody has written anything yet"
    with lock_file(tmp_path / "lock") as descriptor, beating(descriptor, file):
        now[0] = Beside("one", 200.0)  # while it is there: its last beat is by that setting
    assert kept(file) == Beside("one", 200.0)
    assert set_since_s(file) == 0.0
    now[0] = Beside("one", 3800.0)
    assert set_since_s(file) == 3600.0
    now[0] = Beside("two", 3800.0)
    assert set_since_s(file) == 0.0


def test_a_damaged_file_says_nothing_of_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clock"
    monkeypatch.setattr(clock, "beside", lambda: Beside("one", 100.0))
    numbers = ["-Infinity", "NaN", "1" + "0" * 400, "{}"]
    said = [f'{{"boot_id": "one", "ahead_s": {number}}}' for number in numbers]
    for text in ("cut off {", "[]", "[" * 100_000, *said):
        file.write_text(text)
        assert set_since_s(file) == 0.0


def test_a_setting_that_a_full_disk_does_not_take_is_counted_by_no_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise NotWritten("cannot write", why="No space left on device")

    file, now = tmp_path / "clock", [Beside("one", 100.0)]
    monkeypatch.setattr(clock, "beside", lambda: now[0])
    before = keep(file, None)
    with monkeypatch.context() as patched:
        patched.setattr(clock, "write_atomically", full)
        with lock_file(tmp_path / "lock") as descriptor, beating(descriptor, file):
            pass
        assert kept(file) == Beside("one", 100.0), "it is still so"
        now[0] = Beside("one", 3700.0)
        before = keep(file, before)
    assert set_since_s(file) == 0.0, "the last beat is by the new setting"
    keep(file, before)
    assert kept(file) == Beside("one", 3700.0)


def test_this_machine_s_clocks_keep_their_distance(tmp_path: Path) -> None:
    if (before := clock.beside()) is None:
        pytest.skip("this system has no clock that nobody can set")
    now = clock.beside()
    assert now is not None
    assert now.set_by_s(before) == 0.0
