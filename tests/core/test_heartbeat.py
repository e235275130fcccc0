"""When a process was last alive, by the time of its file."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.core.clock import DOWN_SINCE, beating, down_since_of, last_beat
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
    assert down_since_of(path) == 0.0
    with lock_file(path) as descriptor:
        write_about(descriptor, {DOWN_SINCE: 1000.0})
        with beating(descriptor):
            assert down_since_of(path) == 1000.0, "it beats, and does not serve"
        write_about(descriptor, {"listen": "127.0.0.1:9090"})
    assert down_since_of(path) == last_beat(path) > 1000.0
