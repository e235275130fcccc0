"""When a process was last alive."""

from __future__ import annotations

import os
from pathlib import Path

from thinwire.core.heartbeat import beating, last_beat
from thinwire.core.home import lock_file


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
