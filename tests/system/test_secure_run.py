"""Eight client processes over TLS sum under masks, while two of them and the aggregator are killed.

Another run, with noise of the clients under the masks, loses a client too, and in a third one a client is too late for
the deadline. All tests look at the same runs. What the aggregator's store shows decides when a process is killed: a
held client keeps the phase `masked` open for as long as the test wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file

from tests.support.counted_api import requests_of_rounds
from tests.support.processes import kill
from tests.support.secure_site import PLAIN, SECURE, SecureSite
from tests.system.masked.task import digits, model
from thinwire.client.booking import Booking
from thinwire.client.privacy_ledger import DeviceLedger
from thinwire.core.events import Event, RoundClosed
from thinwire.core.run_events import PhaseClosed, PrivacyCommitted, SumUnmasked
from thinwire.core.types import PHASES

pytestmark = pytest.mark.slow
DEVICES = tuple(f"pi-{number}" for number in range(8))
IN_MASKED, IN_AGREE, HELD = "pi-1", "pi-2", "pi-3"
ROUNDS = 10
LEARNT = (f"run.rounds={ROUNDS}", "local.steps=32")
NOISED = (
    *(one for one in SECURE if "metrics" not in one), "run.evaluate='off'", "run.metric='loss'",
    "privacy.mode='distributed'", "privacy.clip=0.5", "privacy.noise_multiplier=1.0", "privacy.delta=1e-3",
)  # fmt: skip
LATE_S = 20  # of a round: 16 s are for the updates, which seven clients send in a few tenths of a second
REQUESTS = 7  # of a client in a round, at most
T = TypeVar("T", bound=Event)


@dataclass
class Run:
    events: list[Event]
    accuracy: float
    without: float  # the accuracy of the same plan without secure aggregation
    killed_in: int  # the round in whose phase masked the aggregator was killed
    counted: str  # what the device API noted
    noised: list[Event]  # of a run with distributed privacy, in which a client is killed
    spent: dict[str, dict[str, int]]  # device -> release -> count, by the aggregator's ledger
    booked: dict[str, list[Booking]]  # device -> lines of its own ledger
    late: list[Event]  # of a round with distributed privacy, in which a client is held past the deadline
    booked_late: list[Booking]  # lines of that client's ledger for that run

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def closed(self, number: int) -> dict[str, PhaseClosed]:
        return {event.phase: event for event in self.of(PhaseClosed) if event.round == number}


def accuracy_of(site: SecureSite, run_id: str) -> float:
    """The accuracy of a run's last model over all images: half a point are nine of them."""
    row = site.until_done(run_id)
    assert (row.status, row.version) == ("done", ROUNDS), site.said()
    file = site.home.parent / f"{run_id}.safetensors"
    assert site.typed("runs", "model", run_id, "--out", str(file)).returncode == 0
    net = model()
    net.load_state_dict(load_file(file))
    pixels, classes = digits().tensors
    with torch.no_grad():
        return float((net(pixels).argmax(1) == classes).double().mean())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("secure")
    site = SecureSite(folder / "home", DEVICES)
    try:
        site.serve()
        site.hold(IN_MASKED)
        site.hold(HELD)
        site.join()
        run_id = site.begin(*LEARNT, *SECURE)
        assert site.until_waiting_for(run_id, IN_MASKED, HELD) == 1
        kill(site.clients[IN_MASKED])  # it has no vector in the sum
        kill(site.clients[IN_AGREE])  # its vector is stored
        site.release(IN_MASKED)
        site.release(HELD)
        site.until_event(run_id, RoundClosed, round=1)
        for name in (IN_MASKED, IN_AGREE):
            site.start_device(name)
        site.hold(HELD)
        killed_in = site.until_waiting_for(run_id, HELD)
        assert site.aggregator is not None
        kill(site.aggregator)
        site.serve()
        site.release(HELD)
        accuracy = accuracy_of(site, run_id)
        counted = site.counted.read_text()
        without = accuracy_of(site, site.begin(*LEARNT, *PLAIN))
        site.hold(IN_MASKED)
        noised = site.begin(*NOISED, "run.rounds=3")
        site.until_waiting_for(noised, IN_MASKED)
        kill(site.clients[IN_MASKED])
        site.release(IN_MASKED)
        site.until_event(noised, RoundClosed, round=1)
        site.start_device(IN_MASKED)
        assert site.until_done(noised).status == "done", site.said()
        with site.store() as store:
            spent = store.privacy.spent_by_device("digits")
        booked = {name: list(DeviceLedger(site.home / "clients" / name).bookings) for name in DEVICES}
        site.hold(HELD)
        late = site.begin(*NOISED, "run.rounds=1", f"cohort.deadline_s={LATE_S}", "privacy.population='late'")
        assert site.until_done(late).status == "done", site.said()
        site.release(HELD)
        own = [one for one in DeviceLedger(site.home / "clients" / HELD).bookings if one.run == late]
        yield Run(
            site.events(run_id), accuracy, without, killed_in, counted, site.events(noised), spent, booked,
            site.events(late), own,
        )  # fmt: skip
    finally:
        site.close()


def test_each_round_ends_with_a_sum(run: Run) -> None:
    assert [event.round for event in run.of(SumUnmasked)] == list(range(1, ROUNDS + 1))
    assert [event.version for event in run.of(RoundClosed)] == list(range(1, ROUNDS + 1))


def test_the_killed_clients_drop_out_in_two_phases(run: Run) -> None:
    dropped = {phase: event.dropped for phase, event in run.closed(1).items()}
    assert dropped == {**{phase: [] for phase in PHASES}, "masked": [IN_MASKED], "agree": [IN_AGREE]}
    assert run.of(SumUnmasked)[0].survivors == len(DEVICES) - 1, "the vector of the second one is in the sum"


def test_a_killed_client_takes_part_again(run: Run) -> None:
    assert set(run.of(PhaseClosed)[-1].received) <= set(DEVICES)
    assert run.of(SumUnmasked)[-1].survivors == len(DEVICES)


def test_a_killed_aggregator_goes_on_with_the_round_in_its_phase(run: Run) -> None:
    closed = [event.phase for event in run.of(PhaseClosed) if event.round == run.killed_in]
    assert closed == list(PHASES), "no phase was closed twice, and none was left out"
    assert run.closed(run.killed_in)["masked"].received.keys() >= {HELD}
    assert all(event.dropped == [] for event in run.closed(run.killed_in).values())


def test_a_client_makes_at_most_seven_requests_in_a_round(run: Run) -> None:
    disturbed = {0, 1, run.killed_in, ROUNDS}  # before the first one, with kills, and with the pull after the last one
    looked_at = 0
    for device in DEVICES:
        for number, routes in requests_of_rounds(run.counted, device):
            if number in disturbed or "hello" in routes:
                continue
            assert len(routes) <= REQUESTS, (device, number, routes)
            looked_at += 1
    assert looked_at >= len(DEVICES) * (ROUNDS - 6)


def test_the_accuracy_is_within_half_a_point_of_that_without_secure_aggregation(run: Run) -> None:
    """Rotations are drawn anew in each run: two of the 599 examples more or less are chance."""
    assert run.without > 0.95
    assert run.accuracy == pytest.approx(run.without, abs=0.005 + 2 / 599)


def test_each_round_with_noise_of_the_clients_is_spent_by_all_of_them_and_booked_by_each(run: Run) -> None:
    """A client that is killed has spent its round: its own ledger has the line that it wrote before it trained."""
    sums = [event.survivors for event in run.noised if isinstance(event, SumUnmasked)]
    assert sums == [7, 8, 8]
    assert len([event for event in run.noised if isinstance(event, PrivacyCommitted)]) == 3
    (release,) = {text for of in run.spent.values() for text in of}
    assert run.spent == {name: {release: 3} for name in DEVICES}
    for name in DEVICES:
        assert [(one.round, one.release) for one in run.booked[name]] == [(n, release) for n in (1, 2, 3)]


def test_a_noised_round_that_ends_by_its_deadline_has_the_sum_of_those_who_were_in_time(run: Run) -> None:
    """A client that is too late has spent the round too."""
    (closed,) = [event for event in run.late if isinstance(event, RoundClosed)]
    (masked,) = [event for event in run.late if isinstance(event, PhaseClosed) and event.phase == "masked"]
    (unmasked,) = [event for event in run.late if isinstance(event, SumUnmasked)]
    assert closed.reason == "deadline"
    assert HELD in masked.dropped
    assert unmasked.survivors == len(DEVICES) - len(masked.dropped) == len(masked.received)
    assert len([event for event in run.late if isinstance(event, PrivacyCommitted)]) == 1
    assert [one.round for one in run.booked_late] == [1]
