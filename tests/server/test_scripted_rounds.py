"""Whole runs against drawn scripts: what an arrival, a death or a lie may change, and what never."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.server.outcomes import every_ask_has_one_outcome
from tests.store.agreement import assert_sums_agree, empty_database
from thinwire.core import Layout, RunPlan
from thinwire.core.clock import VirtualClock
from thinwire.core.event_json import to_json
from thinwire.core.events import (
    ClientAsked,
    ClientFailed,
    Event,
    HeadTaken,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Ask, UpdateId
from thinwire.server import run as server_run
from thinwire.server.driving.running import Running
from thinwire.server.recorded.bases import Bases
from thinwire.server.recorded.line import Line, OpenNow
from thinwire.server.recorded.outcomes import Outcomes
from thinwire.server.recorded.past import Past
from thinwire.server.recorded.scores import Scores
from thinwire.simulation import HeldSpool, MadeUp, ScriptedDevice, ScriptedFleet, Turn, reported, run_scripted
from thinwire.store import Store

LAYOUT = Layout.of({"w": (3,)})
NAMES = "abcde"
ROUNDS, DEADLINE_S = 4, 20.0

turns = st.builds(
    Turn,
    download_s=st.sampled_from([0.0, 1.0]),
    compute_s=st.sampled_from([0.0, 1.0, 3.0, 7.5, 19.5, 21.0, 47.0]),
    upload_s=st.sampled_from([0.0, 0.5]),
    lost=st.sampled_from(["", "", "", "", "ask", "answer"]),
    failure=st.sampled_from([None, None, None, None, ("task-error", "x")]),
    garbage=st.sampled_from([False, False, False, True]),
    held=st.sampled_from([0, 0, 0, 1, 2]),
    again=st.sampled_from([(), (), ("same",), ("new",), ("changed",), ("new", "new")]),
)
moments = st.lists(st.integers(1, 120), max_size=4, unique=True).map(sorted)
lives = moments.map(lambda ts: [(a / 2, b / 2) for a, b in zip(ts[::2], ts[1::2], strict=False)])


@dataclass
class Story:
    """One drawn run: its plan, and what each device does."""

    plan: RunPlan
    table: dict[tuple[str, int], Turn]
    away: dict[str, list[tuple[float, float]]]
    grace_s: float
    rounds: int = ROUNDS  # after so many the table begins again
    stopped_s: float = math.inf  # when a person stops it

    def script(self, ask: Ask) -> Turn:
        name = ask.ask_id.rsplit(".", 1)[1]
        return self.table[name, ask.round % self.rounds] if ask.kind == "train" else Turn(compute_s=0.5)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    clients, most = draw(st.sampled_from(["all", 2, 3])), draw(st.sampled_from([0, 0, 0, 1, 2]))
    cohort = {
        "clients": clients,
        "max_concurrency": most,
        "selection": "uniform" if clients == "all" else draw(st.sampled_from(["uniform", "speed", "link"])),
        "wait_for": 2,
        "wait_s": 100.0,
        "min_replies": draw(st.sampled_from([0.5, 1, 1, 2])),
        "over_select": 0.0 if most else draw(st.sampled_from([0.0, 0.5])),
        "deadline_s": DEADLINE_S,
        "late": draw(st.sampled_from(["fold", "drop"])),
        "max_staleness": draw(st.integers(1, 3)),
        "retry_limit": 3,
    }
    run = {"task": "toy", "rounds": ROUNDS, "seed": draw(st.integers(0, 9))}
    local = {"lr": 1.0, "overlap": draw(st.sampled_from([None, None, {"max_delay": 1}, {"max_delay": 2}]))}
    if local["overlap"]:
        cohort["max_concurrency"] = 0  # it is refused with the other
    raw = {"run": run, "cohort": cohort, "local": local, "uplink": {"codec": "identity"}}
    table = {(name, number): draw(turns) for name in NAMES for number in range(ROUNDS)}
    away = {name: draw(lives) for name in NAMES}
    stopped_s = draw(st.sampled_from([math.inf, math.inf, math.inf, 0.0, 2.0, 25.0]))
    return Story(RunPlan.from_json(raw), table, away, draw(st.sampled_from([0.0, 4.0])), stopped_s=stopped_s)


@dataclass
class Told:
    """What was recorded of a run, and how it ended."""

    events: list[Event]
    status: str
    params: list[float]
    devices: list[ScriptedDevice]
    there: list[str]  # at the end
    told_at_most: int  # verdicts, in one ask
    live: Past

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]


@contextlib.contextmanager
def caught() -> Iterator[list[Running]]:
    """The state of the runs that are driven meanwhile."""
    found: list[Running] = []

    class Caught(Running):
        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **more)  # type: ignore[arg-type]  # passed through
            found.append(self)

    with patch.object(server_run, "Running", Caught):
        yield found


def told(story: Story, folder: Path) -> Told:
    home = AggregatorHome.under(folder, durable=False)
    home.database.write_bytes(empty_database())
    devices = [
        ScriptedDevice(
            name,
            MadeUp(name, LAYOUT, float(i + 1), examples=i + 1),
            story.script,
            story.away[name],
            overlaps=story.plan.local.delay > 0,
        )
        for i, name in enumerate(NAMES)
    ]
    report = reported(story.plan, LAYOUT)
    fleet = ScriptedFleet(HeldSpool(home.spool), VirtualClock(), report, devices, story.grace_s)
    with Store.open(home.database, durable=False) as store, caught() as running:
        stopped = story.stopped_s
        run_id = run_scripted(
            story.plan, LAYOUT, fleet, store=store, home=home,
            stop=lambda: "run" if fleet.virtual.now() >= stopped else None,
        )  # fmt: skip
        assert_sums_agree(store, run_id)
        every_ask_has_one_outcome(store, run_id)
        events = [event for _, event in store.events(run_id)]
        for _ in range(20):
            fleet.poll(10.0)  # what was sent last is heard by all who come
        there = list(running[0].presence.devices)
        params = running[0].model.params.tolist()
        told_at_most = story.plan.cohort.max_staleness + story.plan.local.delay + 2
        return Told(events, store.run(run_id).status, params, devices, there, told_at_most, running[0].past)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a whole run smaller takes longer than a test may
)  # fmt: skip
@given(stories())
def test_whatever_devices_do(story: Story) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = told(story, Path(folder))
    assert made.status in ("done", "failed", "stopped")
    who_is_asked_in_the_middle_of_a_round_has_its_rest(made)
    a_round_closes_as_soon_as_nobody_can_answer(made)
    what_is_accepted_is_folded_or_dropped_once_and_so_is_said(made)
    the_model_is_the_sum_of_what_was_folded(made)
    the_journal_replays_to_the_same_past(made)


def who_is_asked_in_the_middle_of_a_round_has_its_rest(made: Told) -> None:
    assert all(0 < e.deadline_s <= DEADLINE_S for e in made.of(ClientAsked) if e.why)


def a_round_closes_as_soon_as_nobody_can_answer(made: Told) -> None:
    opened = {e.round: e for e in made.of(RoundOpened)}
    happened = [e for e in made.events if isinstance(e, (UpdateAccepted, UpdateDropped, ClientFailed))]
    taken = {e.round: e.elapsed_s for e in made.of(HeadTaken)}
    head_s = 0.0  # since when it is the one that takes answers
    for closed in made.of(RoundClosed):
        head_s = max(head_s, opened[closed.round].elapsed_s, taken.get(closed.round, 0.0))
        last = max((e.elapsed_s for e in happened if e.round == closed.round), default=head_s)
        assert closed.seconds <= DEADLINE_S + 1e-6
        last, head_s = max(last, head_s), closed.elapsed_s
        if closed.elapsed_s > last + 1e-6 and closed.reason != "stopped":
            assert closed.seconds == pytest.approx(DEADLINE_S) and closed.outstanding, "it waited for nobody"
    assert len(opened) == len(made.of(RoundClosed))


def what_is_accepted_is_folded_or_dropped_once_and_so_is_said(made: Told) -> None:
    folded = Counter(u for e in made.of(RoundClosed) for u in e.folded)
    dropped = {u for e in made.of(RoundClosed) for u in e.dropped} | {e.update_id for e in made.of(UpdateDropped)}
    assert set(folded.values()) <= {1}
    assert not folded.keys() & dropped
    assert {e.update_id for e in made.of(UpdateAccepted)} <= folded.keys() | dropped
    said = {UpdateId.parse(u): "folded" for u in folded} | {UpdateId.parse(u): "dropped" for u in dropped}
    for device in made.devices:
        assert {u: v.outcome for u, v in device.told.items()}.items() <= said.items()
        if device.name in made.there:  # it was told its last ones at the end, and who sends too many has older ones
            last = made.live.told.of(device.name, most=made.told_at_most)
            assert {verdict.update_id for verdict in last} <= device.told.keys()


def the_model_is_the_sum_of_what_was_folded(made: Told) -> None:
    """Each device sends one constant: the model is the sum of the rounds' weighted means of them."""
    accepted = {e.update_id: e for e in made.of(UpdateAccepted)}
    total = 0.0
    for closed in made.of(RoundClosed):
        heads = [accepted[u] for u in closed.folded]
        examples = sum(e.head["examples"] for e in heads)
        total += sum(e.head["examples"] / examples * e.discount * (NAMES.index(e.device) + 1) for e in heads)
    assert made.params == pytest.approx([total] * LAYOUT.size, rel=1e-5)
    assert np.isfinite(total)


def the_journal_replays_to_the_same_past(made: Told) -> None:
    again = Past(made.live.delay)
    for event in made.events:
        again.apply(event)
    for field in fields(Past):
        assert plain(getattr(again, field.name)) == plain(getattr(made.live, field.name)), field.name


def plain(value: object) -> object:
    """Events as their JSON: what the journal gives back has lists where there were tuples."""
    if isinstance(value, Event):
        return json.dumps(to_json(value))
    if isinstance(value, (Bases, Line, OpenNow, Outcomes, Scores)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value
