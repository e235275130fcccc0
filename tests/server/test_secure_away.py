"""A device of a secure round whose link breaks: it goes on if the same process is back before its phase is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.server import test_secure_rounds as honest
from tests.server.test_secure_mode import Story, update_of
from tests.support.crashes import Fate, Outcome
from tests.support.secure_cohort import name_of
from tests.support.secure_fleet import SecureBehavior, SecureDevice, SecureFleet, toy_plan
from thinwire.core import RunPlan
from thinwire.core.events import ClientFailed, RoundClosed, RoundOpened, UpdateDropped
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, phase_id
from thinwire.server.round_events import AggregationDone, AggregationRejected, DropUpdate, PhaseEnded
from thinwire.simulation.local_fleet import LocalLink
from thinwire.store import FileSpool, Store

AWAY, ROUND = "e", 2


class BreakingFleet(SecureFleet):
    """A fleet in which the link of `AWAY` breaks in round 2 as it gets the request of `phase`."""

    phase, back_s = "masked", 1.0
    was_away, withdrawn = False, list[str]()  # what is withdrawn before `AWAY` is back, which it is told then

    def _answer(self, device: SecureDevice, delivery: Any) -> None:
        assignment = delivery.assignment
        if assignment.assignment_id == phase_id(f"{assignment.run}.{ROUND}.{AWAY}", self.phase):
            link = device.link
            assert link is not None
            self.disconnect_link(link)
            self.was_away, self.withdrawn = True, []
            self._after(self.back_s, BreakingFleet._back, device, link)
            self._after(self.back_s + 0.5, SecureFleet._answer, device, delivery)
            return
        super()._answer(device, delivery)

    def _back(self, device: SecureDevice, link: LocalLink) -> None:
        self.connect_link(link, self._hello(device))
        self.was_away = False

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        if self.was_away:
            self.withdrawn += assignment_ids
        super().cancel(assignment_ids)


class DamagingFleet(SecureFleet):
    """A fleet in which `AWAY` is revoked in the phase masked of round 2, when stored vectors have been damaged."""

    damaged, left = "d", 1.0  # share of a damaged file that is left, as zeros

    def _answer(self, device: SecureDevice, delivery: Any) -> None:
        assignment = delivery.assignment
        if assignment.assignment_id == phase_id(f"{assignment.run}.{ROUND}.a", "masked"):
            self._after(3.0, DamagingFleet._revoke, device)
        super()._answer(device, delivery)

    def _revoke(self, device: SecureDevice) -> None:
        del device
        assert isinstance(self.spool, FileSpool)
        for file in self.spool.folder.glob(f"*/[{self.damaged}]-*.reply"):
            file.write_bytes(bytes(int(file.stat().st_size * self.left)))
        self.revoke_access([AWAY])


class Failing(honest.World):
    """Three of five devices send no shares in round 1, which ends as too-few while the others train."""

    def behavior_of(self, name: str) -> Callable[[Assignment], SecureBehavior]:
        return lambda assignment: SecureBehavior(silent="share" if assignment.round == 1 and name in "abc" else None)


class Windows(Failing):
    """Clients of a plan with two windows note those that they are told: round 1 ends without a step."""

    rounds = RunPlan.parse(toy_plan("bits = 12\nclip = 20.0\nmax_dropout = 0.4\nrotate = false\nsupport = 0.5"))

    def __init__(self, folder: Path, fate: Fate) -> None:
        self.windows: dict[int, set[int]] = {}  # round -> what its clients are told
        super().__init__(folder, fate)

    def behavior_of(self, name: str) -> Callable[[Assignment], SecureBehavior]:
        behavior = super().behavior_of(name)

        def noted(assignment: Assignment) -> SecureBehavior:
            assert assignment.secure is not None
            self.windows.setdefault(assignment.round, set()).add(assignment.secure.window)
            return behavior(assignment)

        return noted


class World(honest.World):
    def behavior_of(self, name: str) -> Callable[[Assignment], SecureBehavior]:
        return lambda assignment: SecureBehavior(compute_s=4.0 if name == "a" else 2.0)


def lived(folder: Path, fleet: type[SecureFleet] = BreakingFleet, **how: Any) -> Outcome:
    with patch.object(World, "kind", fleet):
        world = World(folder, Fate())
    for name, value in how.items():
        setattr(world.fleet, name, value)
    return world.live()


def dropped(made: Outcome) -> dict[str, list[str]]:
    return {e.phase: e.dropped for e in made.of(PhaseClosed) if e.round == ROUND and e.dropped}


def test_a_device_that_is_back_in_time_is_in_the_sum_and_was_told_to_give_up_nothing(tmp_path: Path) -> None:
    made = lived(tmp_path)
    assert dropped(made) == {}
    assert [e.survivors for e in made.of(SumUnmasked)] == [5, 5, 5]
    assert made.fleet.withdrawn == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("phase", ["masked", "agree", "unmask"])
def test_a_device_that_stays_away_drops_out_and_nothing_of_its_round_waits_for_it(tmp_path: Path, phase: str) -> None:
    made = lived(tmp_path, phase=phase, back_s=100.0)
    closed = [e for e in made.of(RoundClosed) if e.round == ROUND]
    assert [e.reason for e in closed] == ["enough" if phase == "masked" else "all"]
    assert phase == "unmask" or dropped(made) == {phase: [AWAY]}
    assert [e.survivors for e in made.of(SumUnmasked)][1] == (4 if phase == "masked" else 5)
    waiting = made.fleet._assignments.get(AWAY, {})
    assert not [one for one in waiting if f".{ROUND}" in one], "its files are gone"


DAMAGE = [("d", 0.01, "enough", [5, 3, 4]), ("bcd", 0.01, "too-few", [5, 4, 4]), ("d", 1.0, "aborted", [5, 4, 4])]


@pytest.mark.parametrize(("damaged", "left", "reason", "survivors"), DAMAGE)
def test_a_damaged_file_of_a_vector_costs_its_round_and_not_the_run(
    tmp_path: Path, damaged: str, left: float, reason: str, survivors: list[int]
) -> None:
    """The sum is built again without the revoked device, from the files of the others."""
    made = lived(tmp_path, fleet=DamagingFleet, damaged=damaged, left=left)
    closed = made.of(RoundClosed)[ROUND - 1]
    assert (made.status, closed.reason) == ("done", reason)
    assert [e.survivors for e in made.of(SumUnmasked)] == survivors
    dropped = {e.device: e.reason for e in made.of(UpdateDropped) if e.round == ROUND}
    assert dropped == {AWAY: "revoked"} | (dict.fromkeys(damaged, "bad-payload") if left < 1.0 else {})


def test_devices_of_a_round_that_ended_early_are_free_for_the_next_one(tmp_path: Path) -> None:
    """Nothing more comes of them, so a run that waited for them would stand still for several deadlines."""
    made = Failing(tmp_path, Fate()).live()
    first, closed = made.of(RoundOpened)[1], made.of(RoundClosed)[0]
    assert (closed.reason, closed.outstanding) == ("too-few", [])
    assert first.elapsed_s - closed.elapsed_s < 1.0
    failed = {e.device: (e.kind, e.text) for e in made.of(ClientFailed) if e.round == 1}
    assert {failed[name] for name in "de"} == {("stale", "its round ended before its update was there")}
    with Store.open(AggregatorHome(made.folder.parents[1]).database) as store:
        shown = {row.device: row.outcome for row in store.updates("toy-1", 1)}
        assert shown == dict.fromkeys("abc", "failed") | dict.fromkeys("de", "over"), "they failed in nothing"
        assert store.rounds("toy-1", 1, 1)[0].failed == 3
    assert [e.survivors for e in made.of(SumUnmasked)] == [5, 5, 5]


def test_the_windows_of_a_support_are_walked_by_steps_so_a_round_without_one_repeats_its_window(tmp_path: Path) -> None:
    """Else the coordinates of that window would wait a whole walk longer than those of the others."""
    world = Windows(tmp_path, Fate())
    made = world.live()
    assert [e.reason for e in made.of(RoundClosed)] == ["too-few", "all", "all", "all"]
    assert world.windows == {1: {0}, 2: {0}, 3: {1}, 4: {0}}


def test_an_addition_that_ends_after_its_vector_was_dropped_changes_nothing() -> None:
    story, update_id = Story(), update_of(name_of(1))
    story.until("masked")
    story.phase("masked", [name_of(4)], adds=False)
    assert story.on(AggregationRejected(update_id, "bad-payload", "cut")) == [
        DropUpdate(update_id, "bad-payload", "cut")
    ]
    assert story.on(AggregationDone(update_id)) == []


def test_a_vector_that_is_damaged_after_the_survivors_were_shown_ends_the_round() -> None:
    story = Story()
    story.until("agree")
    story.on(AggregationRejected(update_of(name_of(1)), "bad-payload", "cut"))
    assert (story.result.reason, story.result.aggregated) == ("aborted", ())
    assert sorted(story.result.dropped) == [update_of(name_of(i)) for i in range(5)]


def test_a_phase_that_cannot_be_replayed_ends_the_round_and_not_the_run() -> None:
    story = Story()
    story.phase("advertise")
    again = story.restarted([*story.told[:2], (PhaseEnded(), 1.0), *story.told[2:]])
    assert again.machine.closed is not None
    assert (again.machine.closed.reason, again.machine.closed.aggregated) == ("aborted", ())
    assert again.machine.closed.detail.startswith("the replay of a closed phase failed: 2 clients advertised keys")
