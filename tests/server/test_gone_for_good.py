"""A device that left for good is waited for no longer than it could answer."""

from __future__ import annotations

from pathlib import Path

from tests.server.test_crash_pipelined import ahead
from tests.server.test_line_goes_on import behavior_of, closed
from tests.server.test_offline_pipelined import plan
from tests.support.crashes import Fate


def test_a_header_that_has_enough_waits_for_nobody_who_left(tmp_path: Path) -> None:
    """Two of three have answered the last round ahead of its turn when all leave, the third without its answer."""
    away = {"a": [(2.5, 1e9)], "b": [(2.5, 1e9)], "c": [(3.0, 1e9)]}
    three = plan("wait_for = 3\nmin_updates = 2\nwait_s = 100", rounds=2)
    made = ahead(tmp_path, Fate(), three, behavior_of(c=4.0), away=away).live()
    assert closed(made.events) == [(1, "enough", 2), (2, "enough", 2)]
    assert made.status == "done"
