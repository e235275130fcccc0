"""deadline_s = "auto" against a device that takes whatever time it is given: it may not take ever more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import RoundClosed, RoundOpened
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment
from thinwire.reports.reason_text import sentence
from thinwire.simulation import (
    Behavior,
    InMemorySpool,
    ScriptedDevice,
    ScriptedFleet,
    SyntheticUpdates,
    run_scripted,
    task_report,
)
from thinwire.store import Store

LAYOUT = Layout.of({"w": (30,)})
ROUNDS = 40
HONEST_S = 5.0  # and with the margin of a single measurement half as much again
MAX_S = 10 * 3 * 1.5 * HONEST_S


def opened(folder: Path, cohort: dict[str, Any], honest: int = 2) -> list[tuple[RoundOpened, RoundClosed]]:
    """Rounds of a run in which `late` is in time by a hundredth of its deadline, and the others take HONEST_S."""
    raw = {
        "run": {"task": "toy", "rounds": ROUNDS, "evaluate": "off"}, "local": {"lr": 1.0, "steps": 1},
        "cohort": {"wait_for": honest + 1, **cohort}, "uplink": {"codec": "identity", "feedback": "none"},
    }  # fmt: skip
    plan, home = RunPlan.from_json(raw), AggregatorHome.under(folder)

    def just_in_time(assignment: Assignment) -> Behavior:
        return Behavior(compute_s=0.99 * assignment.deadline_s)

    devices = [
        ScriptedDevice(
            f"good-{i}", SyntheticUpdates(f"good-{i}", LAYOUT, 0.1), lambda assignment: Behavior(compute_s=HONEST_S)
        )
        for i in range(honest)
    ]
    devices.append(ScriptedDevice("late", SyntheticUpdates("late", LAYOUT, 0.1), just_in_time))
    fleet = ScriptedFleet(InMemorySpool(home.spool), VirtualClock(), task_report(plan, LAYOUT), devices)
    with Store.open(home.database) as store:
        run_id = run_scripted(plan, LAYOUT, fleet, store=store, home=home, params=np.zeros(30, np.float32))
        assert store.run(run_id).status == "done"
        events = [event for _, event in store.events(run_id)]
    opens = [event for event in events if isinstance(event, RoundOpened)]
    closes = [event for event in events if isinstance(event, RoundClosed)]
    return list(zip(opens, closes, strict=True))


@pytest.mark.parametrize("cohort", [{}, {"min_updates": 2}, {"clients": 3}])
def test_who_always_answers_just_in_time_makes_no_deadline_grow_without_bound(
    tmp_path: Path, cohort: dict[str, Any]
) -> None:
    rounds = opened(tmp_path, cohort)
    assert all(assigned.deadline_s <= MAX_S for assigned, _ in rounds[1:]), [
        assigned.deadline_s for assigned, _ in rounds
    ]
    said = {sentence(assigned.deadline_reason) for assigned, _ in rounds}
    assert "at most 10 times the deadline of the fastest 2 of the 3 wanted devices" in said
    assert all(closed.reason == "all" for _, closed in rounds), "it is waited for as long as it was given"


def test_one_honest_device_is_enough_for_the_bound(tmp_path: Path) -> None:
    rounds = opened(tmp_path, {}, honest=1)
    assert all(assigned.deadline_s <= MAX_S for assigned, _ in rounds[1:])
