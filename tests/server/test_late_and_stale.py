"""Answers that come after their round: what they still count, and from when on they count no more."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_fleet import FaultyBehavior
from tests.support.server_bench import Bench, ToldFleet, scripted
from tests.support.stories import NAMES, Story, Told, told
from tests.support.story_laws import the_model_is_the_sum_of_what_was_aggregated
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateAccepted, UpdateDropped
from thinwire.core.types import Failure, ReplyHeader, UpdateId
from thinwire.server.context import RunContext
from thinwire.simulation import Behavior


def story(behaviors: dict[tuple[str, int], Behavior], **cohort: object) -> Story:
    """Everybody is selected in each of 8 rounds; who is not in `behaviors` answers after a second."""
    given = {"wait_for": len(NAMES), "deadline_s": 20.0, "min_updates": 1, **cohort}
    raw = {"run": {"task": "toy", "rounds": 8}, "cohort": given, "local": {"lr": 1.0}, "uplink": {"codec": "identity"}}
    table: dict[tuple[str, int], Behavior] = defaultdict(Behavior, behaviors)
    return Story(RunPlan.from_json(raw), table, {name: [] for name in NAMES}, 0.0, rounds=99)


def outcome(made: Told, update: str) -> str:
    device = next(device for device in made.devices if device.name == UpdateId.parse(update).device)
    return device.told[UpdateId.parse(update)].outcome


@pytest.mark.parametrize(
    ("behind", "exponent", "discount"), [(1, 0.5, 2**-0.5), (3, 0.5, 0.5), (3, 1.0, 0.25), (2, 0, 1.0)]
)
def test_a_late_answer_counts_less_by_its_staleness(
    tmp_path: Path, behind: int, exponent: float, discount: float
) -> None:
    made = told(story({("c", 2): FaultyBehavior(held=behind)}, staleness_exponent=exponent), tmp_path)
    (late,) = [e for e in made.of(UpdateAccepted) if e.late]
    assert (late.device, late.assignment_round, late.round, late.staleness) == ("c", 2, 2 + behind, behind)
    assert late.discount == pytest.approx(discount)
    assert outcome(made, late.update_id) == "aggregated"
    the_model_is_the_sum_of_what_was_aggregated(made)


def test_an_answer_that_is_too_old_is_dropped_and_its_device_told_so(tmp_path: Path) -> None:
    made = told(story({("c", 2): FaultyBehavior(held=4)}, max_staleness=2), tmp_path)
    assert [(e.device, e.kind, e.assignment_id) for e in made.of(ClientFailed)] == [("c", "stale", "toy-1.2.c")]
    (dropped,) = made.of(UpdateDropped)
    assert (dropped.reason, dropped.assignment_round, dropped.round) == ("stale", 2, 6)
    assert outcome(made, dropped.update_id) == "dropped"
    the_model_is_the_sum_of_what_was_aggregated(made)


def test_an_answer_that_comes_while_a_round_is_adding_or_none_is_open_is_the_next_ones(tmp_path: Path) -> None:
    """Three leave after the first round, so the run waits for them; what comes meanwhile waits too."""
    slow = story({("a", 1): Behavior(compute_s=30.0)}, deadline_s=20.0, min_updates=0.9)
    slow.away = {name: [(1.5, 60.0)] if name in "cde" else [] for name in NAMES}
    made = told(slow, tmp_path)
    first, second = made.of(RoundClosed)[:2]
    assert (first.reason, first.outstanding) == ("too-few", ["a"])
    (late,) = [e for e in made.of(UpdateAccepted) if e.late]
    assert (late.device, late.round, late.staleness, late.discount) == ("a", second.round, 0, 1.0)
    assert 59.0 < late.elapsed_s < 61.0, "it came at 30 s"


def test_a_deferred_answer_that_is_dropped_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferring, defer = list[RunContext](), RunContext.defer

    def noted(running: RunContext, header: ReplyHeader) -> None:
        deferring.append(running)
        defer(running, header)

    monkeypatch.setattr(RunContext, "defer", noted)
    slow = story({("a", 1): Behavior(compute_s=30.0)}, deadline_s=20.0, min_updates=0.9, late="drop")
    slow.away = {name: [(1.5, 60.0)] if name in "cde" else [] for name in NAMES}
    made = told(slow, tmp_path)
    assert [(e.device, e.reason) for e in made.of(UpdateDropped)] == [("a", "late")]
    assert not deferring[0].deferred and not deferring[0].came_late


def test_after_too_few_what_was_aggregated_goes_back(tmp_path: Path) -> None:
    lost = {(name, 1): Behavior(failure=("task-error", "x")) for name in "bcde"}
    made = told(story(lost, min_updates=2), tmp_path)
    first = made.of(RoundClosed)[0]
    assert (first.reason, first.aggregated, first.dropped) == ("too-few", [], ["toy-1/a/1"])
    assert outcome(made, "toy-1/a/1") == "dropped"
    the_model_is_the_sum_of_what_was_aggregated(made)


def test_a_round_that_could_only_have_too_few_waits_for_who_is_busy(tmp_path: Path) -> None:
    """All five are needed for a step, and one misses a deadline: what it sends then counts, and all are selected
    again.
    """
    made = told(story({("a", 1): Behavior(compute_s=30.0)}, deadline_s=20.0, min_updates=5), tmp_path)
    assert [(e.reason, len(e.aggregated)) for e in made.of(RoundClosed)][:2] == [("too-few", 0), ("all", 6)]
    second = made.of(RoundOpened)[1]
    assert len(second.assignments) == 5 and 30.0 <= second.elapsed_s < 32.0
    assert made.status == "done"


def test_over_selection_closes_no_round_before_a_step_has_its_fewest_replies(tmp_path: Path) -> None:
    behaviors = {(name, number): Behavior(compute_s=1.0 + at) for at, name in enumerate(NAMES) for number in range(9)}
    made = told(story(behaviors, clients=2, over_select=1.0, min_updates=0.9), tmp_path)
    assert {(e.reason, len(e.aggregated)) for e in made.of(RoundClosed)} == {("all", 4)}


@pytest.mark.parametrize("then", ["leaves", "fails"])
def test_a_late_answer_with_which_its_device_leaves_is_the_outcome_of_its_assignment(tmp_path: Path, then: str) -> None:
    """Both are heard in one poll, in the second round."""

    class Parting(ToldFleet):
        def receive(self, link: Any, reply: Any, *more: Any) -> None:
            super().receive(link, reply, *more)
            if reply.assignment_id.endswith(".1.c"):
                if then == "leaves":
                    self._crash(self.devices["c"])
                    self._report_offline(self.devices["c"])
                else:
                    self._arrived("c", Failure("task-error", "x", reply.assignment_id, "c"))

    slow = scripted("c", lambda assignment: Behavior(compute_s=8.0 if assignment.round == 1 else 1.0))
    cohort = {"deadline_s": 6, "min_updates": 1}
    bench = Bench(tmp_path, [scripted("a", 4.0), scripted("b", 4.0), slow], Parting, run={"rounds": 3}, cohort=cohort)
    assert bench.drive().status == "done"
    assert [(e.round, e.assignment_round) for e in bench.events(UpdateAccepted) if e.late] == [(2, 1)]
    assert not bench.events(ClientFailed)
