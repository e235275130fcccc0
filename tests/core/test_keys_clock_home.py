"""Keys, clocks, registries and the state directory."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core import Key, Registry, VirtualClock, derive
from thinwire.core.clock import repeating
from thinwire.core.errors import CodecError, DataLost
from thinwire.core.prng import word32
from thinwire.core.statedir import (
    Held,
    client_home,
    disk_error,
    find_home,
    hold,
    holder,
    keep_private,
    living_holder,
    lock_file,
    write_atomically,
)

labels = st.lists(st.text(max_size=5) | st.integers(-(2**70), 2**70), max_size=4)


@given(labels, labels)
def test_keys_are_equal_only_where_their_labels_are(first: list[str | int], second: list[str | int]) -> None:
    assert (derive(Key(7), *first) == derive(Key(7), *second)) == (first == second)


def test_derivation_is_the_same_on_every_machine() -> None:
    assert derive(Key(1, 2), "encode", "pi-03", 7) == Key(5588163751422699333, 10050841150665040876)
    assert word32(Key(1, 2), "int8", 3) == 4273386151


def test_a_key_outside_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        Key(2**64)


def test_a_virtual_clock_never_runs_backwards() -> None:
    clock = VirtualClock()
    clock.advance(1.5)
    assert clock.wall() - clock.origin == clock.now() == 1.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    shapes: Registry[int] = Registry("codec")
    shapes.add("ternary", 1)
    with pytest.raises(CodecError) as error:
        shapes.find("ternery")
    assert error.value.hint == "ternary"


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "state"
    write_atomically(target, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataLost) as error:
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert "free some space" in error.value.hint


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    write_atomically(tmp_path / "key", b"x")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_closing_a_file_follows_no_link(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.touch(mode=0o600)
    theirs.chmod(0o644)
    ours.symlink_to(theirs)
    keep_private(ours)
    assert theirs.stat().st_mode & 0o777 == 0o644
    keep_private(theirs)
    assert theirs.stat().st_mode & 0o777 == 0o600


def test_a_read_only_disk_says_so() -> None:
    error = disk_error(OSError(errno.EROFS, "Read-only file system"), Path("x"))
    assert ("read-only" in error.hint, error.exit_code) == (True, 1), "the write may be tried again, as by systemd"


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with hold(lock, {"listen": "127.0.0.1:9090"}):
        assert (holder(lock) or {})["listen"] == "127.0.0.1:9090"
        code = (
            "from pathlib import Path\nfrom thinwire.core.statedir import hold\n"
            f"with hold(Path({str(lock)!r}), {{}}): pass"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"in use by process {os.getpid()}" in other.stderr
        with pytest.raises(Held, match="in use by process") as held, hold(lock, {}):
            pass
    assert held.value.hint == "stop the other one, or give this one a folder of its own: --home FOLDER"
    assert holder(lock) is None


def test_a_look_at_a_lock_writes_nothing_and_a_disk_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lock := tmp_path / "lock").touch()
    opened, flags = os.open, list[int]()

    def noted(path: Any, flag: int, *given: Any, **named: Any) -> int:
        if path == lock:  # threads of other tests may open files meanwhile
            flags.append(flag)
        return opened(path, flag, *given, **named)

    monkeypatch.setattr(os, "open", noted)
    assert holder(lock) is None
    assert [flag & os.O_ACCMODE for flag in flags] == [os.O_RDONLY]

    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(DataLost, match="lock"):
        holder(lock)


def test_a_second_client_of_one_name_is_told_to_take_another_name(tmp_path: Path) -> None:
    lock = client_home(tmp_path, "pi-01") / "lock"
    with hold(lock, {}), pytest.raises(Held) as held, hold(lock, {}):
        pass
    assert held.value.hint == "stop the other one, or give this one another name: --name NAME"


def test_the_home_is_the_flag_then_the_environment_then_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert find_home(tmp_path / "flag") == tmp_path / "flag"
    assert find_home() == tmp_path / "env"
    monkeypatch.delenv("THINWIRE_HOME")
    assert find_home() == tmp_path / "xdg" / "thinwire"


def test_two_that_look_at_a_lock_at_once_do_not_take_each_other_for_its_holder(tmp_path: Path) -> None:
    """Else what the file says is believed: the id of a process that ended, which another program may have now."""
    lock = tmp_path / "lock"
    lock.write_text(f'{{"pid": {os.getpid()}, "dashboard": "127.0.0.1:1"}}')
    with lock_file(lock, fcntl.LOCK_SH):
        assert living_holder(lock) is None
    with hold(lock, {"dashboard": "127.0.0.1:2"}):
        assert (living_holder(lock) or {})["dashboard"] == "127.0.0.1:2"


def test_what_is_repeated_goes_on_after_an_error_and_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    calls, enough = list[int](), threading.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a bug")
        enough.set()

    with repeating(work, 0.01, "some work"):
        assert enough.wait(20)
    assert "some work" in caplog.text
    assert "a bug" in caplog.text
