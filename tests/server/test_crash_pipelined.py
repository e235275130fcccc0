"""A crash anywhere changes nothing either where assignments go ahead: late, bad and failed answers in a line of
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.crashes import LAYOUT, Fate, Outcome, Whole, World, change, killed, undisturbed_once
from tests.support.faulty_fleet import AttentiveDevice, FaultyBehavior
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateAccepted, UpdateDropped
from thinwire.core.fleet import Envelope
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior, ScriptedFleet, SyntheticUpdates
from thinwire.store import FileSpool

SHARES = 2  # of all places: one test each
PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 4
[cohort]
wait_for = 3
deadline_s = 20
min_updates = 1
[local]
lr = 1.0
overlap = { max_delay = 1 }
[uplink]
codec = "topk(0.2) > int8"
[downlink]
codec = "int8"
""")
BEHAVIORS = {
    ("b", 1): FaultyBehavior(
        compute_s=2.0, upload_s=1.5, again=("same", "new")
    ),  # the last of its round: the next one drops it
    ("b", 2): FaultyBehavior(compute_s=2.0, garbage=True),
    ("c", 2): FaultyBehavior(
        held=2
    ),  # late: it leaves when round 4 assignments, and c holds the assignment of round 3 too
    ("b", 3): Behavior(failure=("task-error", "x")),
}


def behavior(name: str, assignment: Assignment) -> Behavior:
    return (
        BEHAVIORS.get((name, assignment.round), Behavior(upload_s=0.5))
        if assignment.kind == "train"
        else Behavior(compute_s=0.0)
    )


def ahead(
    folder: Path,
    fate: Fate,
    plan: RunPlan = PLAN,
    behavior: Callable[[str, Assignment], Behavior] = behavior,
    away: Mapping[str, Sequence[tuple[float, float]]] = {},
) -> World:
    """Three devices that work while they send; `away`: from and until when each is gone."""
    works = {n: SyntheticUpdates(n, LAYOUT, partial(change, n, LAYOUT.size)) for n in "abc"}
    devices = [AttentiveDevice(n, w, partial(behavior, n), away.get(n, ()), overlaps=True) for n, w in works.items()]
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
    assert [(e.round, e.reason) for e in made.of(UpdateDropped)] == [(2, "duplicate"), (2, "bad-payload")]
    assert "c" not in made.of(RoundOpened)[3].assignments, "it held two assignments when round 2 closed"


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: Whole, tmp_path: Path, share: int) -> None:
    """test_crash_anywhere.py holds that an append without its commit is rolled back."""
    made, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.same() == made.same(), where

    killed(ahead, tmp_path, places, check, slice(share, None, SHARES), writers=True)


def test_after_a_restart_assignments_of_closed_rounds_go_out_again_as_they_were_to_who_has_lost_them(
    tmp_path: Path,
) -> None:
    """The slow device dies with the aggregator, while it works on rounds that have closed without it."""

    def slow(name: str, assignment: Assignment) -> Behavior:
        return (
            Behavior(compute_s=6.0 if name == "c" else 1.0) if assignment.kind == "train" else Behavior(compute_s=0.0)
        )

    def restart(spool: FileSpool) -> ScriptedFleet:
        world.fleet.crash("c")
        world.fleet.connect("c")
        lives.append([])
        return whole(spool)

    def send(fleet: ScriptedFleet, envelopes: Sequence[Envelope]) -> None:
        lives[-1] += [envelope.assignment for envelope in envelopes if envelope.device == "c"]
        sent(fleet, envelopes)

    raw = PLAN.to_json()
    cohort = {**raw["cohort"], "deadline_s": 3, "max_staleness": 20}
    plan = RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": 20}, "cohort": cohort})
    world, lives, sent = ahead(tmp_path, Fate(), plan, slow), list[list[Assignment]]([[]]), ScriptedFleet.send
    world.dies_at, whole = 5.0, world.fleet.restart
    with patch.object(ScriptedFleet, "send", send), patch.object(world.fleet, "restart", restart):
        made = world.live()
    assert [e.round for e in made.of(RoundClosed) if e.elapsed_s < 5.0] == [1]
    before, again = lives[0], lives[1][:2]
    assert [assignment.round for assignment in before] == [assignment.round for assignment in again] == [1, 2]
    for assignment, once_more in zip(before, again, strict=True):
        for name in ("assignment_id", "base_version", "base_digest", "codec", "deadline_s", "outcomes"):
            assert getattr(once_more, name) == getattr(assignment, name)
    late = [e.assignment_round for e in made.of(UpdateAccepted) if e.device == "c"]
    assert late[:2] == [1, 2]


def test_after_a_restart_an_assignment_that_went_ahead_tells_what_it_told_though_more_is_known(tmp_path: Path) -> None:
    """c dies with the aggregator while it works on round 2, from a version to which its change of round 1 was pending;
    that was dropped since, which only the assignment of round 3 says.
    """

    def spoils(name: str, assignment: Assignment) -> Behavior:
        slow = name == "c" and assignment.round == 2
        return FaultyBehavior(compute_s=6.0 if slow else 1.0, garbage=name == "c" and assignment.round == 1)

    world, sent, send = ahead(tmp_path, Fate(), PLAN, spoils), list[Assignment](), ScriptedFleet.send
    world.dies_at, whole = 3.0, world.fleet.restart

    def restart(spool: FileSpool) -> ScriptedFleet:
        world.fleet.crash("c")
        world.fleet.connect("c")
        return whole(spool)

    def noted(fleet: ScriptedFleet, envelopes: Sequence[Envelope]) -> None:
        sent.extend(envelope.assignment for envelope in envelopes if envelope.device == "c")
        send(fleet, envelopes)

    with patch.object(ScriptedFleet, "send", noted), patch.object(world.fleet, "restart", restart):
        assert world.live().status == "done"
    told = [
        (assignment.round, [(v.update_id.sequence, v.outcome) for v in assignment.outcomes]) for assignment in sent[:5]
    ]
    dropped = [(1, "dropped")]
    assert told == [(1, []), (2, []), (3, dropped), (2, []), (3, dropped)], "the last two after the restart"


def test_after_a_restart_an_assignment_of_a_closed_round_names_its_own_deadline(tmp_path: Path) -> None:
    """Of rounds 1 and 2 nothing was known, round 3 is given less; c owes 2 and 3 when 2 is over."""

    def slow(name: str, assignment: Assignment) -> Behavior:
        return (
            Behavior(compute_s=100.0 if name == "c" and assignment.round > 1 else 1.0)
            if assignment.kind == "train"
            else Behavior()
        )

    raw = PLAN.to_json()
    auto = {"run": {**raw["run"], "rounds": 20}, "cohort": {**raw["cohort"], "deadline_s": "auto"}}
    world, sent = ahead(tmp_path, Fate(), RunPlan.from_json({**raw, **auto}), slow), list[Assignment]()
    world.dies_at, send = 65.0, ScriptedFleet.send

    def noted(fleet: ScriptedFleet, envelopes: Sequence[Envelope]) -> None:
        sent.extend(envelope.assignment for envelope in envelopes if envelope.device == "c")
        send(fleet, envelopes)

    with patch.object(ScriptedFleet, "send", noted):
        made = world.live()
    deadlines = {e.round: e.deadline_s for e in made.of(RoundOpened)}
    assert deadlines[3] < deadlines[2]
    assert [assignment.round for assignment in sent[:5]] == [1, 2, 3, 2, 3], "the last two after the restart"
    assert [assignment.deadline_s for assignment in sent[3:5]] == [deadlines[2], deadlines[3]]
