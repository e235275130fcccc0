"""A crash anywhere changes nothing either where asks go ahead: late, bad and failed answers in a line of rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.server.crashes import LAYOUT, Fate, Whole, World, change, killed, undisturbed_once
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateAccepted, UpdateDropped
from thinwire.core.types import Ask
from thinwire.simulation import MadeUp, ScriptedDevice, Turn

SHARES = 4  # of all places: one test each
PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 4
[cohort]
wait_for = 3
deadline_s = 20
min_replies = 1
[local]
lr = 1.0
overlap = { max_delay = 1 }
[uplink]
codec = "topk(0.2) > int8"
[downlink]
codec = "int8"
""")
TURNS = {
    ("b", 1): Turn(compute_s=2.0, upload_s=1.5, again=("same",)),
    ("b", 2): Turn(compute_s=2.0, garbage=True),
    ("c", 2): Turn(held=2),  # late: it leaves when round 4 asks, and c holds the ask of round 3 too
    ("b", 3): Turn(failure=("task-error", "x")),
}


def turn(name: str, ask: Ask) -> Turn:
    return TURNS.get((name, ask.round), Turn(upload_s=0.5)) if ask.kind == "train" else Turn(compute_s=0.0)


def ahead(
    folder: Path,
    fate: Fate,
    plan: RunPlan = PLAN,
    turn: Callable[[str, Ask], Turn] = turn,
    away: Mapping[str, Sequence[tuple[float, float]]] = {},
) -> World:
    """Three devices that work while they send; `away`: from and until when each is gone."""
    works = {n: MadeUp(n, LAYOUT, partial(change, n, LAYOUT.size)) for n in "abc"}
    devices = [ScriptedDevice(n, w, partial(turn, n), away.get(n, ()), overlaps=True) for n, w in works.items()]
    return World(folder, fate, plan, devices)


undisturbed = undisturbed_once(ahead)


def test_the_line_has_late_bad_and_failed_answers_in_it(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    assert [e.base_version for e in made.of(RoundOpened)] == [0, 0, 1, 2]
    assert [(e.round, e.reason) for e in made.of(RoundClosed)] == [
        (1, "all"), (2, "deadline"), (3, "enough"), (4, "all"),
    ]  # fmt: skip
    assert [(e.round, e.device) for e in made.of(UpdateAccepted) if e.late] == [(4, "c")]
    assert [e.kind for e in made.of(ClientFailed)] == ["task-error"]
    assert [e.reason.split(":")[0] for e in made.of(UpdateDropped)] == ["bad-payload"]
    assert "c" not in made.of(RoundOpened)[3].asks, "it held two asks when round 2 closed"


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: Whole, tmp_path: Path, share: int) -> None:
    made, places = undisturbed
    for where, again in killed(ahead, tmp_path, places, slice(share, None, SHARES)):
        assert again.same() == made.same(), where
