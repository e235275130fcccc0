"""The state machine of a secure round: events with scripted times in, actions and one closing reason out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.secure_cohort import Cohort, name_of, terms_of
from thinwire.core.types import PHASES, UpdateId
from thinwire.privacy.secure_round import MaskedSum
from thinwire.server.round_events import (
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    ClosePhase,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    MarkLost,
    MasksRemoved,
    PhaseEnded,
    PhaseMessage,
    Reinstate,
    RemoveMasks,
    RemoveVector,
    RoundConfig,
    RoundResult,
    Stop,
    Tick,
    UpdateArrived,
)
from thinwire.server.secure_mode import MAX_DETAIL, SecureRoundMachine

DEADLINE_S = 100.0


def update_of(name: str) -> UpdateId:
    return UpdateId("run", name, 1)


@dataclass
class Story:
    """A machine, its cohort, and the actions that came of it."""

    clients: int = 5
    threshold: int = 3
    target: int = 0
    now: float = 1.0
    actions: list[Any] = field(default_factory=list)
    told: list[tuple[Any, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cohort = Cohort(terms_of(self.clients, self.threshold), self.clients)
        self.machine = self.made()

    def made(self) -> SecureRoundMachine:
        """A new machine of the same round."""
        names = [name_of(i) for i in range(self.clients)]
        terms = RoundConfig(
            1, 0, {name: f"run.1.{name}" for name in names}, target_updates=self.target or self.clients, min_updates=1,
            opened_s=0.0, deadline_s=DEADLINE_S,
        )  # fmt: skip
        return SecureRoundMachine(terms, secure=self.cohort.server)

    def on(self, event: Any, now: float | None = None) -> list[Any]:
        self.now = self.now if now is None else now
        self.told.append((event, self.now))
        found = self.machine.on(event, self.now)
        self.actions += found
        return found

    def phase(self, phase: str, lost: Collection[str] = (), adds: bool = True) -> None:
        """All outstanding clients but the lost ones answer the open phase."""
        assert self.machine.secure.phase == phase
        for name in self.machine.outstanding:
            if name in lost:
                continue
            if self.machine.is_unmasking:
                return  # enough shares are here
            message = self.cohort.answer(phase, name, self.machine.requests.get(name, b""))
            if phase == "masked":
                self.on(UpdateArrived(update_of(name), f"run.1.{name}", name, 0))
                if adds:
                    self.on(AggregationDone(update_of(name)))
            else:
                self.on(PhaseMessage(name, phase, message))

    def until(self, last: str, lost: Mapping[str, Collection[str]] | None = None) -> None:
        """All phases before `last`; who is lost in a phase fails in it."""
        for phase in PHASES[: PHASES.index(last)]:
            away = (lost or {}).get(phase, ())
            for name in away:
                self.on(AssignmentFailed(name, f"run.1.{name}", "worker", "it died"))
            self.phase(phase, away)

    @property
    def journalled(self) -> list[tuple[Any, float]]:
        """The events that a restart replays, without the ends of the phases."""
        return [(event, at) for event, at in self.told if not isinstance(event, (Tick, AggregationDone))]

    def restarted(self, told: list[tuple[Any, float]]) -> Story:
        """The same clients with an aggregator that knows only `told`."""
        again = Story()
        again.cohort = self.cohort
        again.cohort.server = Cohort(self.cohort.terms, 5).server
        again.machine = again.made()
        again.machine.replay(told)
        return again

    def finish(self, phase: str) -> None:
        """The open phase and all later ones, until the round closes with the exact sum of its updates."""
        for later in PHASES[PHASES.index(phase) :]:
            self.phase(later)
        self.on(MasksRemoved())
        self.sum_is_exact()

    @property
    def result(self) -> RoundResult:
        found = [action for action in self.actions if isinstance(action, RoundResult)]
        assert len(found) == 1
        return found[0]

    def sum_is_exact(self) -> None:
        total = MaskedSum(self.cohort.terms)
        for update_id in self.result.aggregated:
            vectors = self.cohort.vectors[update_id.device]
            total.add(vectors.update, vectors.scalars)
        keys = next(action.keys for action in self.actions if isinstance(action, RemoveMasks))
        lanes, _ = total.unmask(keys)
        wanted, _ = self.cohort.wanted([update_id.device for update_id in self.result.aggregated])
        assert np.array_equal(lanes & np.uint16(0xFFF), wanted.astype(np.int64).astype(np.uint16) & np.uint16(0xFFF))


def test_a_round_goes_through_its_phases_and_closes_once():
    story = Story()
    story.until("unmask")
    story.phase("unmask")
    assert [action.phase for action in story.actions if isinstance(action, ClosePhase)] == list(PHASES[:-1])
    assert story.machine.closed is None
    story.on(MasksRemoved())
    assert (story.result.reason, len(story.result.aggregated)) == ("all", 5)
    story.sum_is_exact()


def test_masks_are_removed_as_soon_as_enough_shares_are_disclosed():
    story = Story()
    story.until("unmask")
    for name in story.machine.outstanding[:3]:
        story.on(PhaseMessage(name, "unmask", story.cohort.answer("unmask", name, story.machine.requests[name])))
    assert isinstance(story.actions[-1], RemoveMasks)


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_that_fails_in_a_phase_drops_out_and_the_round_goes_on(phase):
    story, name = Story(), name_of(2)
    story.until(phase)
    story.on(AssignmentFailed(name, f"run.1.{name}", "worker", "it died"))
    for later in PHASES[PHASES.index(phase) :]:
        story.phase(later, [name])
    story.on(MasksRemoved())
    has_update = phase in ("agree", "unmask")
    assert (update_of(name) in story.result.aggregated) is has_update
    assert any(isinstance(action, MarkLost) for action in story.actions) is not has_update
    assert story.result.reason == ("all" if has_update else "enough")
    story.sum_is_exact()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_device_that_leaves_after_its_message_is_not_waited_for_in_the_next_phase(comes_back):
    story, gone, last = Story(), name_of(1), name_of(4)
    for name in (gone, *(name_of(i) for i in (0, 2, 3))):
        story.on(PhaseMessage(name, "advertise", story.cohort.answer("advertise", name, b"")))
    assert story.on(DeviceDisconnected(gone, "its connection is closed")) == []
    if comes_back:
        story.on(DeviceConnected(gone))
    closed, *lost = story.on(PhaseMessage(last, "advertise", story.cohort.answer("advertise", last, b"")))
    assert isinstance(closed, ClosePhase)
    assert lost == ([] if comes_back else [MarkLost(gone, f"run.1.{gone}", "offline", "its connection is closed")])
    assert (gone in story.machine.outstanding) is comes_back


def test_a_silent_device_is_waited_for_until_its_phase_ends():
    story, silent = Story(), name_of(4)
    story.phase("advertise", [silent])
    assert story.machine.deadline_at == 0.5 * 0.8 * DEADLINE_S
    assert story.on(Tick(), 39.9) == []
    assert [type(action) for action in story.on(Tick(), 40.0)] == [MarkLost, ClosePhase]
    assert silent not in story.machine.requests
    for phase in ("share", "masked", "agree", "unmask"):
        story.phase(phase)
    story.on(MasksRemoved())
    assert story.machine.lost == {silent: "stale"}
    assert story.result.outstanding == ()


def test_the_masked_phase_closes_at_its_time_and_a_late_vector_is_dropped_unread():
    story, slow = Story(), name_of(4)
    story.until("masked")
    story.phase("masked", [slow])
    lost, closed = story.on(Tick(), 80.0)
    assert lost == MarkLost(slow, f"run.1.{slow}", "stale", "no message in time for the phase masked")
    assert isinstance(closed, ClosePhase)
    assert story.on(UpdateArrived(update_of(slow), f"run.1.{slow}", slow, 0)) == [DropUpdate(update_of(slow), "late")]
    story.finish("agree")
    assert story.result.reason == "deadline"


def test_the_masked_phase_closes_with_as_many_vectors_as_the_round_wants():
    story = Story(target=4)
    story.until("masked")
    story.phase("masked", [name_of(0)])
    story.phase("agree")
    story.phase("unmask")
    story.on(MasksRemoved())
    assert (story.result.reason, len(story.result.aggregated)) == ("enough", 4)
    assert story.machine.lost == {name_of(0): "stale"}


@pytest.mark.parametrize("phase", PHASES)
def test_too_few_devices_in_a_phase_end_the_round_without_a_step(phase):
    story = Story(threshold=4)
    story.until(phase)
    story.phase(phase, [name_of(0), name_of(1)])
    story.on(Tick(), DEADLINE_S)
    assert (story.result.reason, story.result.aggregated) == ("too-few", ())
    assert not any(isinstance(action, RemoveMasks) for action in story.actions)


def test_no_phase_closes_while_a_vector_is_added():
    story = Story()
    story.until("masked")
    story.phase("masked", adds=False)
    assert story.machine.secure.phase == "masked"
    found = [story.on(AggregationDone(update_of(name))) for name in map(name_of, range(5))]
    assert list(map(len, found)) == [0, 0, 0, 0, 1]


def test_a_vector_that_cannot_be_added_is_a_drop_out():
    story, name = Story(), name_of(1)
    story.until("masked")
    story.phase("masked", adds=False)
    story.on(AggregationRejected(update_of(name), "bad-payload", "masked vectors of 3 bytes"))
    for other in map(name_of, (0, 2, 3, 4)):
        story.on(AggregationDone(update_of(other)))
    story.finish("agree")
    assert update_of(name) in story.result.dropped


def test_a_revoked_device_leaves_the_sum_before_the_survivors_are_shown():
    story, name = Story(), name_of(1)
    story.until("masked")
    story.phase("masked", [name_of(4)])
    found = story.on(DeviceDisconnected(name, "revoked"))
    assert found == [RemoveVector(update_of(name)), DropUpdate(update_of(name), "revoked")]
    story.phase("masked")
    story.finish("agree")
    assert update_of(name) not in story.result.aggregated


@pytest.mark.parametrize("phase", ["agree", "unmask"])
def test_a_revoked_survivor_ends_the_round(phase):
    story = Story()
    story.until(phase)
    story.on(DeviceDisconnected(name_of(1), "revoked"))
    assert (story.result.reason, story.result.aggregated) == ("aborted", ())


def test_masks_that_do_not_cancel_end_the_round():
    story = Story()
    story.until("unmask")
    story.phase("unmask")
    story.on(MasksRemoved("the masks do not cancel" + 1000 * "!"))
    assert (story.result.reason, len(story.result.dropped)) == ("aborted", 5)
    assert story.result.detail == f"the masks do not cancel{1000 * '!'}"[:MAX_DETAIL]


def test_a_device_that_reconnects_within_its_phase_is_waited_for_again():
    story, name = Story(), name_of(1)
    story.phase("advertise", [name])
    story.on(DeviceDisconnected(name, "silent"))
    assert story.machine.secure.phase == "share", "nobody else was outstanding"
    assert story.on(DeviceConnected(name)) == [], "its phase is closed"
    story = Story()
    story.on(DeviceDisconnected(name, "silent"))
    assert story.on(DeviceConnected(name)) == [Reinstate(name, f"run.1.{name}")]
    story.phase("advertise")
    assert name in story.machine.requests


def test_a_message_that_is_not_valid_fails_its_device():
    story, name = Story(), name_of(1)
    [lost] = story.on(PhaseMessage(name, "advertise", b"\0"))
    assert (lost.device, lost.kind) == (name, "protocol")
    assert story.on(PhaseMessage(name, "advertise", b"\0")) == [], "it is not read again"
    assert story.on(PhaseMessage(name_of(2), "unmask", b"")) == [], "its phase is not open"


def test_a_person_stops_the_round_in_any_phase():
    for phase in PHASES:
        story = Story()
        story.until(phase)
        story.on(Stop())
        assert (story.result.reason, story.result.aggregated) == ("stopped", ())


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_restart_goes_on_in_the_phase_that_was_open(phase):
    story = Story()
    story.until(phase)
    told, seen = list[tuple[Any, float]](), 0
    for event, at in story.journalled:
        told.append((event, at))
        seen += isinstance(event, (PhaseMessage, UpdateArrived))
        if seen == 5:
            told.append((PhaseEnded(), at))
            seen = 0
    again = story.restarted(told)
    assert again.machine.requests == story.machine.requests
    for name in map(name_of, range(5)):
        if update_of(name) in again.machine.aggregating:
            again.on(AggregationDone(update_of(name)))
    again.finish(phase)
    assert again.result.reason == "all"


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_restart_before_a_full_phase_was_closed_goes_on_with_its_close(phase):
    story = Story()
    story.until(PHASES[PHASES.index(phase) + 1])
    kept, told = story.journalled, list[tuple[Any, float]]()
    for number, one in enumerate(kept, 1):
        told += [one, *([(PhaseEnded(), one[1])] if number % 5 == 0 and number < len(kept) else [])]
    again = story.restarted(told)
    assert (again.machine.shut, again.machine.closed) == (None, None)
    for update_id in sorted(again.machine.aggregating):
        again.on(AggregationDone(update_id))
    again.on(Tick())
    again.finish(PHASES[PHASES.index(phase) + 1])
    assert again.result.reason == "all"


def test_a_restart_keeps_that_the_round_was_stopped():
    story = Story()
    story.phase("advertise")
    again = Story()
    again.machine.replay([*story.told, (PhaseEnded(), 1.0), (Stop(), 1.0)])
    assert again.machine.closed is not None
    assert again.machine.closed.reason == "stopped"


def test_a_vector_that_is_damaged_after_the_survivors_were_shown_ends_the_round():
    story = Story()
    story.until("agree")
    told = story.journalled
    for at in (15, 10, 5):
        told.insert(at, (PhaseEnded(), 1.0))
    again = Story()
    again.machine.replay(told)
    assert again.machine.secure.phase == "agree"
    again.on(AggregationRejected(update_of(name_of(0)), "bad-payload", "the file is damaged"))
    for other in map(name_of, range(1, 5)):
        again.on(AggregationDone(update_of(other)))
    assert (again.result.reason, again.result.aggregated) == ("aborted", ())
    assert again.result.detail.startswith(f"the masked vector of {name_of(0)} was damaged")


def test_a_small_message_does_not_count_as_a_masked_vector():
    story, name = Story(), name_of(1)
    story.until("masked")
    [lost] = story.on(PhaseMessage(name, "masked", b""))
    assert (lost.device, lost.kind) == (name, "protocol")
    story.finish("masked")
    assert update_of(name) not in story.result.aggregated


def test_a_vector_whose_device_was_revoked_while_it_was_added_leaves_the_sum():
    story, name = Story(), name_of(1)
    story.until("masked")
    story.phase("masked", [name_of(4)], adds=False)
    assert story.on(DeviceDisconnected(name, "revoked")) == []
    assert story.on(AggregationDone(update_of(name))) == [
        RemoveVector(update_of(name)), DropUpdate(update_of(name), "revoked"),
    ]  # fmt: skip
    for other in map(name_of, (0, 2, 3)):
        story.on(AggregationDone(update_of(other)))
    story.finish("masked")
    assert update_of(name) not in story.result.aggregated
