"""Runs with secure aggregation on a virtual clock: the model moves by the survivors' mean, whoever drops out."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.support import crashes
from tests.support.crashes import LAYOUT, Fate, Killed, Outcome, Whole, change, killed, undisturbed_once
from tests.support.explained import whys
from tests.support.secure_fleet import SecureBehavior, SecureDevice, SecureFleet, toy_plan
from thinwire.aggregation.plan_codecs import LATTICE
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.errors import ThinwireError
from thinwire.core.events import ClientFailed, ModelStored, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.statedir import AggregatorHome, private_folder
from thinwire.core.types import PHASES, Phase
from thinwire.privacy.contexts import identity_of, simulated_key
from thinwire.server.context import RunCommands
from thinwire.server.model_store import Versions
from thinwire.server.run import drive
from thinwire.server.secure_round_runner import SecureRoundRunner
from thinwire.server.service import serve
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedFleet, task_report
from thinwire.store import FileSpool, Store
from thinwire.store.round_timing import turns

SHARES = 2  # of all places: one test each
PLAN = RunPlan.parse(toy_plan("bits = 12\nclip = 20.0\nmax_dropout = 0.4"))


BEHAVIORS = {
    (2, "b"): SecureBehavior(silent="agree"),
    (2, "d"): SecureBehavior(silent="masked", compute_s=3.0),
    (3, "a"): SecureBehavior(silent="share"),
    (3, "c"): SecureBehavior(silent="unmask"),
}


class World(crashes.World):
    """Five devices; `BEHAVIORS` says who leaves a round in which phase."""

    kind = SecureFleet
    rounds = PLAN  # what they run

    def __init__(self, folder: Path, fate: Fate) -> None:
        devices = [
            SecureDevice(name, None, self.behavior_of(name), plan=self.rounds, layout=LAYOUT,  # type: ignore[arg-type]  # no Work
                         change=partial(change, name, LAYOUT.size)) for name in "abcde"
        ]  # fmt: skip
        super().__init__(folder, fate, self.rounds, devices)

    def behavior_of(self, name: str):  # a Script
        return lambda assignment: BEHAVIORS.get((assignment.round, name), SecureBehavior(compute_s=2.0))

    def live(self) -> Outcome:
        """The whole run, with one death at most; its identity, which decides the masks, is always the same."""
        with patch("thinwire.store.store.secrets.token_hex", lambda count: "5e" * count):
            return super().live()

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        for name in self.fleet.devices:
            key = identity_of(simulated_key(name))
            store.roster.enrol(name, hashlib.sha256(key).hexdigest(), key, "loopback")
        drive(
            run_id, store=store, fleet=self.fleet, home=self.home, clock=self.clock, commands=RunCommands(self._alive)
        )


class Leaving(World):
    """In each round a device fails right after its message of another phase, when the phase is still open."""

    def behavior_of(self, name: str):  # a Script
        last: dict[int, Phase] = {1: "advertise", 2: "share", 3: "agree"}
        return lambda assignment: SecureBehavior(fails_after=last.get(assignment.round) if name == "b" else None)


undisturbed = undisturbed_once(World)


@contextmanager
def killed_once(is_there: Callable[[SecureRoundRunner], bool]) -> Iterator[list[Phase]]:
    """Kill the aggregator once, before it sends the requests of a phase; yield the phases in which it was killed."""
    request, killed_in = SecureRoundRunner._request, list[Phase]()

    def killed_at(self: SecureRoundRunner, requests: Mapping[str, bytes]) -> None:
        if not killed_in and is_there(self):
            killed_in.append(self.machine.secure.phase)
            raise Killed(self.machine.secure.phase)
        request(self, requests)

    with patch.object(SecureRoundRunner, "_request", killed_at):
        yield killed_in


def survivors(made: Outcome, number: int) -> list[str]:
    closed = made.of(RoundClosed)[number - 1]
    return sorted(update_id.split("/")[1] for update_id in closed.aggregated)


def _device(made: Outcome, name: str) -> SecureDevice:
    found = made.fleet.devices[name]
    assert isinstance(found, SecureDevice)
    return found


def test_each_round_moves_the_model_by_the_mean_of_its_survivors(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    assert [survivors(made, number) for number in (1, 2, 3)] == [list("abcde"), list("abce"), list("bcde")]
    assert [e.survivors for e in made.of(SumUnmasked)] == [5, 4, 4]
    assert [e.reason for e in made.of(RoundClosed)] == ["all", "deadline", "enough"]


def test_the_model_moves_by_the_mean_of_what_the_survivors_sent(undisturbed: Whole) -> None:
    made, _ = undisturbed
    moved = np.zeros(LAYOUT.size, np.float32)
    for number in (1, 2, 3):
        sent = [_device(made, name).sent[f"toy-1.{number}.{name}"] for name in survivors(made, number)]
        moved += np.mean(sent, axis=0)
    params, _ = Versions(made.folder, LAYOUT, durable=False).read(made.of(ModelStored)[-1])
    assert np.allclose(params, moved, atol=1e-4)


def test_a_device_that_misses_a_phase_is_named_with_it(undisturbed: Whole) -> None:
    made, _ = undisturbed
    dropped = {(e.round, e.phase): e.dropped for e in made.of(PhaseClosed) if e.dropped}
    assert dropped == {(2, "masked"): ["d"], (2, "agree"): ["b"], (3, "share"): ["a"]}
    failed = {(e.round, e.device): (e.kind, e.text) for e in made.of(ClientFailed)}
    assert failed == {
        (2, "d"): ("stale", "no message in time for the phase masked"),
        (3, "a"): ("stale", "no message in time for the phase share"),
    }


def test_each_round_closes_its_phases_once_and_in_order(undisturbed: Whole) -> None:
    made, _ = undisturbed
    for number in (1, 2, 3):
        assert tuple(e.phase for e in made.of(PhaseClosed) if e.round == number) == PHASES


def test_a_round_is_explained_by_the_client_that_its_longest_phase_waited_for(undisturbed: Whole) -> None:
    made, _ = undisturbed
    with Store.open(AggregatorHome(made.folder.parents[1]).database) as store:
        run, rounds = store.run("toy-1"), store.rounds("toy-1")
        told = whys(run, rounds, store.updates("toy-1"), turns(rounds), {}, store.phases("toy-1"))
    assert "the phase masked lasted" in told[1].sentence
    assert "waiting for masked vectors of d until its deadline" in told[1].sentence
    assert told[1].waited_for == ("d",)
    for one in told:
        assert sum(one.stages.values()) == pytest.approx(one.seconds, abs=0.1)
        assert one.stages.get("unaccounted", 0.0) < 0.1


def test_a_round_and_its_updates_name_the_lattice_and_no_codec(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert {event.codec for event in made.of(RoundOpened)} == {LATTICE}
    assert {event.header["codec"] for event in made.of(UpdateAccepted)} == {LATTICE}


def test_the_record_of_a_round_has_no_time_of_what_a_client_does(undisturbed: Whole) -> None:
    made, _ = undisturbed
    spent = {"wait_s", "upload_s", "receive_s", "aggregate_s", "step_s", "store_s"}
    assert [set(e.spent) for e in made.of(RoundClosed)] == [spent] * 3


def test_a_wait_that_is_not_known_is_not_recorded_as_zero(tmp_path: Path) -> None:
    """The device API forgets when it delivered an assignment as soon as the client has advertised."""
    take = SecureFleet.receive

    def taken(self: SecureFleet, link: Any, reply: Any, *more: Any) -> None:
        link.in_flight.pop(reply.assignment_id, None)
        take(self, link, reply, *more)

    with patch.object(SecureFleet, "receive", taken):
        made = World(tmp_path, Fate()).live()
    assert all(event.header["transfer"]["pulled_at"] == 0 for event in made.of(UpdateAccepted))
    assert not any("wait_s" in event.spent for event in made.of(RoundClosed))


def test_nothing_of_a_round_is_left_on_the_disk_when_it_is_over(undisturbed: Whole) -> None:
    made, _ = undisturbed
    assert not (made.folder / "secure").exists()


def test_a_start_deletes_the_messages_of_runs_that_are_over_and_of_no_other(tmp_path: Path) -> None:
    """The process of `toy-1` died, or a person stopped it while no aggregator was running."""
    made, ending = World(tmp_path, Fate()).live(), threading.Event()
    home = AggregatorHome(made.folder.parents[1])
    fleet = ScriptedFleet(FileSpool(home.spool), VirtualClock(), task_report(PLAN, LAYOUT), [])
    with Store.open(home.database) as store:
        params, nothing = np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32)
        waiting = submit(store, home, PLAN, FirstModel(LAYOUT, task_report(PLAN, LAYOUT), params, nothing))
        for run_id in ("toy-1", waiting):
            private_folder(home.messages(run_id) / "3")
        ending.set()
        serve(fleet, store, home, ending=ending)
    assert not home.messages("toy-1").exists()
    assert home.messages(waiting).exists()


def test_an_aggregator_without_ml_kem_takes_no_plan_that_needs_it(tmp_path: Path) -> None:
    plan, home = RunPlan.parse(toy_plan("post_quantum = true")), AggregatorHome.under(tmp_path)
    params, nothing = np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32)
    first = FirstModel(LAYOUT, task_report(plan, LAYOUT), params, nothing)
    with Store.open(home.database) as store, patch("thinwire.privacy.keys.has_ml_kem", return_value=False):
        with pytest.raises(ThinwireError, match="ML-KEM-768, which this machine does not have"):
            submit(store, home, plan, first)
        assert store.runs() == []


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: Whole, tmp_path: Path, share: int) -> None:
    made, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert again.same() == made.same(), where
        assert not (again.folder / "secure").exists(), where

    killed(World, tmp_path, places, check, slice(share, None, SHARES), writers=True)


@pytest.fixture(name="leaving", scope="module")
def whole_of_leaving(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Leaving(tmp_path_factory.mktemp("leaving"), Fate()).live()


@pytest.mark.parametrize(
    ("number", "phase"), [(1, "share"), (1, "masked"), (1, "unmask"), (2, "masked"), (2, "agree"), (3, "unmask")]
)
def test_a_device_that_fails_after_its_message_is_in_that_phase_also_after_a_crash(
    leaving: Outcome, tmp_path: Path, number: int, phase: str
) -> None:
    """Otherwise the clients get another roster than before the crash, or their signatures are refused."""
    with killed_once(lambda runner: (runner.opened.round, runner.machine.secure.phase) == (number, phase)) as killed_in:
        made = Leaving(tmp_path, Fate()).live()
    assert killed_in
    assert made.same() == leaving.same()


@pytest.mark.parametrize("phase", ["share", "masked", "agree", "unmask"])
def test_a_device_that_is_revoked_while_the_aggregator_is_down_is_in_no_later_sum(tmp_path: Path, phase: str) -> None:
    """Before the survivors are shown it drops out. Afterwards the round ends without a sum."""

    class Revoking(World):
        def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
            if killed_in:
                store.roster.revoke("e")
                self.fleet.crash("e")
            super()._drive(run_id, store, agreed)

    with killed_once(lambda runner: runner.machine.secure.phase == phase) as killed_in:
        made = Revoking(tmp_path, Fate()).live()
    assert killed_in
    assert made.of(RoundClosed)[0].reason == ("aborted" if phase in ("agree", "unmask") else "enough")
    assert all("e" not in survivors(made, number) for number in range(1, len(made.of(RoundClosed)) + 1))
