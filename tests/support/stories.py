"""A whole run against drawn scripts: what its devices do, when they come and go, and all that is recorded of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.support.faulty_fleet import AttentiveDevice, FaultyBehavior, FaultyFleet
from tests.support.outcomes import every_assignment_has_one_outcome
from tests.support.store_agreement import assert_sums_agree, empty_database
from thinwire.core import Layout, RunPlan
from thinwire.core.clock import VirtualClock
from thinwire.core.events import Event
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment
from thinwire.server import run as server_run
from thinwire.server.context import RunContext, StopCommand
from thinwire.server.state.run_state import RunState
from thinwire.simulation import Behavior, InMemorySpool, SyntheticUpdates, run_scripted, task_report
from thinwire.simulation.scripted_device import transfer_s
from thinwire.store import Store

LAYOUT = Layout.of({"w": (64,)})
NAMES = "abcde"
ROUNDS, DEADLINE_S = 4, 20.0
FOR_EVER_S = 10_000.0  # no drawn run is so long

behaviors = st.builds(
    FaultyBehavior,
    download_s=st.sampled_from([0.0, 1.0]),
    compute_s=st.sampled_from([0.0, 1.0, 3.0, 7.5, 19.5, 21.0, 47.0]),
    upload_s=st.sampled_from([0.0, 0.5]),
    lost=st.sampled_from(["", "", "", "", "assignment", "reply"]),
    failure=st.sampled_from([None, None, None, None, ("task-error", "x")]),
    garbage=st.sampled_from([False, False, False, True]),
    held=st.sampled_from([0, 0, 0, 1, 2]),
    again=st.sampled_from([(), (), ("same",), ("new",), ("changed",), ("new", "new")]),
)
whole_runs = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a whole run smaller takes longer than a test may
)  # fmt: skip
moments = st.lists(st.integers(1, 120), max_size=4, unique=True).map(sorted)
lives = moments.map(lambda ts: [(a / 2, b / 2) for a, b in zip(ts[::2], ts[1::2], strict=False)])


@dataclass
class Story:
    """One drawn run: its plan, and what each device does."""

    plan: RunPlan
    table: dict[tuple[str, int], Behavior]
    away: dict[str, list[tuple[float, float]]]
    grace_s: float
    rounds: int = ROUNDS  # after so many the table begins again
    stopped_s: float = math.inf  # when a person stops it
    bytes_s: dict[str, float] = field(default_factory=dict)  # of who sends over a link that is known by it
    work: Callable[..., SyntheticUpdates] = SyntheticUpdates

    def script(self, assignment: Assignment) -> Behavior:
        name = assignment.assignment_id.rsplit(".", 1)[1]
        behavior = (
            self.table[name, assignment.round % self.rounds] if assignment.kind == "train" else Behavior(compute_s=0.5)
        )
        return replace(behavior, upload_s=partial(transfer_s, self.bytes_s[name])) if name in self.bytes_s else behavior


def drawn(draw: st.DrawFn, plan: RunPlan, **more: Any) -> Story:
    """A story by this plan: behaviors, absences and a stop are drawn."""
    table: dict[tuple[str, int], Behavior] = {
        (name, number): draw(behaviors) for name in NAMES for number in range(ROUNDS)
    }
    away = {name: draw(lives) for name in NAMES}
    stopped_s = draw(st.sampled_from([math.inf, math.inf, math.inf, 0.0, 2.0, 25.0]))
    return Story(plan, table, away, draw(st.sampled_from([0.0, 4.0])), stopped_s=stopped_s, **more)


@dataclass
class Told:
    """What was recorded of a run, and how it ended."""

    events: list[Event]
    status: str
    params: list[float]
    devices: list[AttentiveDevice]
    there: list[str]  # at the end
    told_at_most: int  # outcomes, in one assignment
    live: RunState
    plan: RunPlan

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]


@contextlib.contextmanager
def caught() -> Iterator[list[RunContext]]:
    """The state of the runs that are driven meanwhile."""
    found: list[RunContext] = []

    class Caught(RunContext):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)  # type: ignore[arg-type]  # passed through
            found.append(self)

    with patch.object(server_run, "RunContext", Caught):
        yield found


def told(story: Story, folder: Path) -> Told:
    home = AggregatorHome.under(folder, durable=False)
    home.database.write_bytes(empty_database())
    devices = [
        AttentiveDevice(
            name,
            story.work(name, LAYOUT, float(i + 1), examples=i + 1),
            story.script,
            story.away[name],
            overlaps=story.plan.local.delay > 0,
        )
        for i, name in enumerate(NAMES)
    ]
    report = task_report(story.plan, LAYOUT)
    fleet = FaultyFleet(InMemorySpool(home.spool), VirtualClock(), report, devices, story.grace_s)
    with Store.open(home.database, durable=False) as store, caught() as running:

        def stop() -> StopCommand:
            assert fleet.virtual.now() < FOR_EVER_S, "it waits for ever"
            return "run" if fleet.virtual.now() >= story.stopped_s else None

        run_id = run_scripted(story.plan, LAYOUT, fleet, store=store, home=home, stop=stop)
        events = [event for _, event in store.events(run_id)]
        assert_sums_agree(store, run_id, events)
        every_assignment_has_one_outcome(store, run_id, events)
        for _ in range(20):
            fleet.poll(10.0)  # what was sent last is heard by all who come
        there = list(running[0].online.names)
        params = running[0].model.params.tolist()
        told_at_most = story.plan.cohort.max_staleness + story.plan.local.delay + 2
        return Told(
            events, store.run(run_id).status, params, devices, there, told_at_most, running[0].run_state, story.plan
        )
