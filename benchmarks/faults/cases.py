"""Each fault of docs/explain/faults.md: what is broken in a run behind the gate and when, and how that is judged.

The machinery is that of the tests (tests/system): what is measured here is what is tested there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.at_aggregator import CutUpload, FullAggregator, KilledPage
from benchmarks.faults.at_device import (
    DEVICE,
    Frozen,
    FullDevice,
    Older,
    answered,
    answers_again,
    begin_another,
    end_another,
    end_device,
    fails_by_worker,
    kill_worker,
    lose_state,
    start_device,
    was_ended,
)
from tests.support.gated_task import DEVICES, KILLED, NOTHING, Fault
from tests.support.moments import APART, Moment, all_moments, drawn, spaced
from tests.support.processes import THE_DEMOS
from thinwire.core.events import Event, StateLost, UpdateDropped

SEED = 20261122
EITHER = ("cohort.min_updates=1",)  # rounds go on without the device that breaks
WIDE = Path(__file__).parents[2] / "tests/system/wide"
PLAIN = ("uplink.codec='identity'", "uplink.feedback='none'")

TRAINING = (Moment(0, "training", DEVICE),)
ANY = tuple(all_moments(1, DEVICES))


@dataclass(frozen=True)
class Case:
    """`kinds`: of what moments the strikes are drawn, some rounds apart; None: of all of the run's, close together, for
    faults that cost no answer. `told`: how many strikes met their aim, where the journal alone has that; without
    `strikes` it has how many there were too. `costs`: it may cost answers or a residual, and is compared with a run
    that lacks the same, else with the undisturbed one. `who` is started again, and how soon it is back is held to a
    goal. `disk`: the folder under the home with a disk of its own.
    """

    fault: Fault
    kinds: Sequence[Moment] | None = None
    who: str = ""
    told: Callable[[Sequence[Event]], int] | None = None
    strikes: bool = True
    costs: bool = False
    page: bool = False
    disk: str = ""
    example: Path = THE_DEMOS

    def moments(self, rounds: int, count: int) -> tuple[int, list[Moment]]:
        """Return how many rounds the run has, and the moments at which the fault strikes."""
        if self.kinds is None or not count:
            return rounds, drawn(count, max(1, rounds - 1), DEVICES, SEED)
        return 2 + APART * count, spaced(count, SEED, self.kinds)


def lost(why: str) -> Callable[[Sequence[Event]], int]:
    """Return a count of how often a device was found to have begun again for it."""
    return lambda events: sum(isinstance(e, StateLost) and e.why == why for e in events)


def dropped(reason: str) -> Callable[[Sequence[Event]], int]:
    """Return a count of the replies of the device were dropped for it."""
    return lambda events: sum(
        isinstance(e, UpdateDropped) and e.device == DEVICE and e.reason == reason for e in events
    )


def lying(how: str, *sets: str) -> Fault:
    return Fault(NOTHING.strike, sets=sets, programs={DEVICE: ("tests.support.liar", how)})


def slow(step_s: float) -> Mapping[str, float]:
    """So that a training of ten steps is long enough to be struck in it."""
    return {DEVICE: step_s}


def cases() -> Mapping[str, Case]:
    cut, frozen, full, older, page, room = CutUpload(), Frozen(), FullDevice(), Older(), KilledPage(), FullAggregator()
    return {
        "aggregator killed": Case(KILLED, who="aggregator"),
        "upload cut": Case(
            Fault(cut.strike, cut.goes_on, back=cut.arrived, sets=PLAIN),
            [Moment(0, "uploading", device) for device in DEVICES],
            example=WIDE,
        ),
        "device frozen": Case(
            Fault(
                frozen.stop, frozen.misses_deadline, frozen.wake, frozen.late, (*EITHER, "cohort.deadline_s=8"),
                step_s=slow(0.1),
            ),
            TRAINING,
            costs=True,
        ),
        "device killed": Case(
            Fault(end_device, was_ended, start_device, answers_again, EITHER, step_s=slow(0.02)),
            (*ANY, *TRAINING),
            who="device",
            costs=True,
        ),
        "device without its state": Case(
            Fault(lose_state, was_ended, start_device, answers_again, EITHER),
            ANY, who="device", told=lost("missing"), costs=True,
        ),
        "device with an older state": Case(
            Fault(older.keep, older.put_back, start_device, answers_again, EITHER),
            ANY, who="device", told=lost("older"), costs=True,
        ),
        "device twice": Case(Fault(NOTHING.strike, begin_another, end_another, shut=True), ANY),
        "answers twice": Case(lying("twice"), told=dropped("duplicate"), strikes=False),
        "answers garbage": Case(lying("garbage", *EITHER), told=dropped("bad-payload"), strikes=False, costs=True),
        "worker killed": Case(
            Fault(kill_worker, fails_by_worker, back=answered, sets=EITHER, step_s=slow(0.1)), TRAINING, costs=True
        ),
        "page killed": Case(Fault(page.strike, page.gone, back=page.new_one, shut=True), ANY, page=True),
        "device's disk full": Case(
            Fault(full.fill, full.fails, full.free, answered, EITHER, step_s=slow(0.02)),
            (*TRAINING, Moment(0, "RoundOpened")),
            costs=True,
            disk=f"clients/{DEVICE}",
        ),
        "aggregator's disk full": Case(Fault(room.fill, room.is_met, room.free), ANY, disk="aggregator"),
    }  # fmt: skip
