"""A crash anywhere changes nothing: after each journal append, each commit and each fsync of a run of five rounds."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.support import crashes
from tests.support.crashes import KINDS, LAYOUT, Fate, Outcome, Whole, change, killed, undisturbed_once
from tests.support.faulty_fleet import AttentiveDevice, FaultyBehavior
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.core import RunPlan
from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    ReplicaStored,
    RoundClosed,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior, SyntheticUpdates

SHARES = 2  # of all places: one test each
PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 5
[cohort]
clients = 3
wait_for = 5
deadline_s = 40
min_updates = 1
[local]
lr = 1.0
[uplink]
codec = "topk(0.2) > int8"
[downlink]
codec = "int8"
[server]
optimizer = "fedavgm"
""")
SCRIPT = {
    1: [
        Behavior(),
        FaultyBehavior(compute_s=2.0, again=("same", "new")),
        Behavior(compute_s=9.0),
        Behavior(compute_s=2.0),
    ],
    2: [Behavior(), Behavior(compute_s=2.0), FaultyBehavior(compute_s=0.5, held=1)],
    3: [Behavior(), FaultyBehavior(compute_s=2.0, garbage=True), Behavior(compute_s=3.0), Behavior(compute_s=2.0)],
    4: [
        Behavior(compute_s=0.0, failure=("task-error", "x")),
        FaultyBehavior(again=("changed",)),
        Behavior(compute_s=3.0),
        Behavior(),
    ],
    5: [Behavior(), Behavior(compute_s=2.0, upload_s=0.5), Behavior(compute_s=3.0, lost="reply"), Behavior()],
}


class World(crashes.World):
    """Devices that do as the script says of their place in a round."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN) -> None:
        self.dead = ""  # who died last
        self.roles: dict[int, list[str]] = {}  # round -> assignment_ids in the order in which they were delivered
        travels = transmitted_layout(algorithm_of(plan), LAYOUT)
        works = [SyntheticUpdates(name, travels, partial(change, name, travels.size)) for name in "abcde"]
        super().__init__(folder, fate, plan, [AttentiveDevice(work.name, work, self.behavior) for work in works])

    def behavior(self, assignment: Assignment) -> Behavior:
        """The script of a round's first, second, third assignment; the third device of rounds 1 and 5 dies of it."""
        if assignment.kind != "train":
            return Behavior(compute_s=0.0)
        roles = self.roles.setdefault(assignment.round, [])
        if assignment.assignment_id not in roles:
            roles.append(assignment.assignment_id)
            self._enter(assignment, len(roles) - 1)
        return SCRIPT[assignment.round][roles.index(assignment.assignment_id)]

    def _enter(self, assignment: Assignment, role: int) -> None:
        name = assignment.assignment_id.rsplit(".", 1)[1]
        if (assignment.round, role) in ((1, 2), (5, 2)):
            self.fleet.crash(name, 4.0)
            self.dead = name
        if (assignment.round, role) == (3, 0):
            self.fleet.connect(self.dead, 0.2)


undisturbed = undisturbed_once(World)


def test_the_run_has_late_lost_repeated_and_replaced_clients_in_it(undisturbed: Whole) -> None:
    made, places = undisturbed
    assert made.status == "done"
    assert [e.reason for e in made.of(RoundClosed)] == ["enough", "deadline", "all", "enough", "enough"]
    assert [e.round for e in made.of(UpdateAccepted) if e.late] == [3]
    assert Counter(e.kind for e in made.of(ClientFailed)) == {"offline": 2, "task-error": 1}
    assert Counter(e.reason for e in made.of(UpdateDropped)) == {"duplicate": 1, "bad-payload": 1}
    assert [e.round for e in made.of(ClientSelected) if e.why] == [1, 3, 4, 5]
    assert len(made.of(ReplicaStored)) == 5
    assert made.told.items() <= made.outcomes.items()
    assert {"append", "commit", "fsync"} == set(places)


def test_who_was_killed_and_who_sent_garbage_is_replaced(undisturbed: Whole) -> None:
    made, _ = undisturbed
    killed = [(e.round, e.device) for e in made.of(ClientFailed) if e.kind == "offline"]
    garbage = [(e.round, e.device) for e in made.of(UpdateDropped) if e.reason == "bad-payload"]
    assert ([number for number, _ in killed], [number for number, _ in garbage]) == ([1, 5], [3])
    replaced = {(e.round, e.instead_of): e.device for e in made.of(ClientSelected) if e.why}
    accepted = {(e.assignment_round, e.device) for e in made.of(UpdateAccepted)}
    for number, device in killed + garbage:
        assert (number, replaced[number, device]) in accepted, "another one's answer came in its place"


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: Whole, tmp_path: Path, share: int) -> None:
    made, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.same() == made.same(), where
        assert again.told.items() <= again.outcomes.items()

    killed(World, tmp_path, places, check, slice(share, None, SHARES), (*KINDS, "append"))
