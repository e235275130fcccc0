"""A line of rounds goes on though devices are away, an answer is bad, or the service was stopped in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.test_crash_pipelined import ahead
from tests.server.test_offline_pipelined import plan
from tests.support.crashes import LAYOUT, Fate, Killed, World
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, Event, RoundBecameCurrent, RoundClosed, RunStatusChanged
from thinwire.core.types import Assignment, ReplyHeader
from thinwire.server.context import RunCommands
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, task_report
from thinwire.store import FileSpool, Store

SLOW = {"c": 10.0}  # in the first round, seconds


def behavior(name: str, assignment: Assignment) -> Behavior:
    slow = SLOW.get(name, 1.0) if assignment.round == 1 else 1.0
    return Behavior(compute_s=slow if assignment.kind == "train" else 0.0)


def closed(events: Iterable[Event]) -> list[tuple[int, str, int]]:
    return [(e.round, e.reason, len(e.aggregated)) for e in events if isinstance(e, RoundClosed)]


def test_a_header_that_has_all_its_answers_waits_for_nobody(tmp_path: Path) -> None:
    """Two devices answer round 2 ahead of its turn and are switched off."""
    both = plan("wait_for = 3\nmin_updates = 2\nwait_s = 100", rounds=2)
    made = ahead(tmp_path, Fate(), both, behavior, away={"a": [(5.0, 1e9)], "b": [(5.0, 1e9)]}).live()
    assert made.status == "done"
    assert closed(made.events) == [(1, "all", 3), (2, "all", 3)]


def test_a_bad_answer_that_comes_while_the_header_waits_fails_its_assignment(tmp_path: Path) -> None:
    away = {"a": [(2.5, 15.0)], "b": [(2.5, 15.0)]}
    world = ahead(tmp_path, Fate(), plan("wait_for = 3\nmin_updates = 2", rounds=3), behavior_of(c=4.0), away=away)
    take: Callable[..., Any] = world.fleet.receive

    def foreign(link: Any, reply: Any, *more: Any) -> Any:
        if isinstance(reply, ReplyHeader) and reply.assignment_id == "toy-1.2.c":
            reply = replace(reply, base_version=7)
        return take(link, reply, *more)

    world.fleet.receive = foreign  # type: ignore[method-assign, assignment]  # changes one reply
    made = world.live()
    assert made.status == "done"
    assert [(e.assignment_id, e.kind) for e in made.of(ClientFailed)] == [("toy-1.2.c", "base-mismatch")]
    assert closed(made.events)[1] == (2, "enough", 2)


def behavior_of(**seconds: float) -> Callable[[str, Assignment], Behavior]:
    return lambda name, assignment: Behavior(compute_s=seconds.get(name, 1.0) if assignment.kind == "train" else 0.0)


def restarted(world: World, stop: Callable[[], Any], unsaid: type[Event] | None = None) -> tuple[list[Event], str]:
    """The events of a run whose first aggregator ended by `stop`, and its status; the first journals no `unsaid`."""
    with Store.open(world.home.database, durable=False) as store:
        begun = np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32)
        first = FirstModel(LAYOUT, task_report(world.plan, LAYOUT), *begun)
        run_id, record = submit(store, world.home, world.plan, first), store.record
        if unsaid is not None:

            def without(run_id: str, events: Iterable[Event], *more: Any) -> Any:
                return record(run_id, [e for e in events if not isinstance(e, unsaid)], *more)

            store.record = without  # type: ignore[method-assign, assignment]  # leaves events out
        with suppress(Killed):
            drive(
                run_id, store=store, fleet=world.fleet, home=world.home, clock=world.clock, commands=RunCommands(stop)
            )
        store.record = record  # type: ignore[method-assign]  # as it was
        world.fleet = world.fleet.restart(FileSpool(world.home.spool))
        drive(run_id, store=store, fleet=world.fleet, home=world.home, clock=world.clock)
        return [event for _, event in store.events(run_id)], store.run(run_id).status


@pytest.mark.parametrize("unsaid", [None, RoundBecameCurrent])
def test_a_journal_that_does_not_say_when_a_heads_time_began_loses_no_answer(
    tmp_path: Path, unsaid: type[Event] | None
) -> None:
    """As it was before that was an event: an aggregator that is updated in the middle of a round."""
    world = ahead(tmp_path, Fate(), plan("wait_for = 3\nmin_updates = 2\nwait_s = 100", rounds=3), behavior)

    def dies() -> None:
        if world.clock.now() >= 5.0:
            raise Killed

    events, status = restarted(world, dies, unsaid)
    assert status == "done"
    assert closed(events) == [(number, "all", 3) for number in (1, 2, 3)]


@pytest.mark.parametrize("overlap", ["", "overlap = { max_delay = 1 }"])
def test_a_service_that_is_stopped_leaves_the_round_open(tmp_path: Path, overlap: str) -> None:
    cohort = "[cohort]\nwait_for = 3\ndeadline_s = 60\nretry_limit = 0\n"
    text = f'[run]\ntask = "toy"\nrounds = 3\n{cohort}[local]\nlr = 1\n'
    world = ahead(tmp_path, Fate(), RunPlan.parse(text + overlap), behavior)
    events, status = restarted(world, lambda: "service" if 5.0 <= world.clock.now() < 5.2 else None)
    assert status == "done"
    assert closed(events) == [(number, "all", 3) for number in (1, 2, 3)]
    assert not [e for e in events if isinstance(e, RunStatusChanged) and e.status == "stopped"]
