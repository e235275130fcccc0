"""What an assignment spends of privacy is in the device's ledger before its data are read, or it is declined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.gated_client import Device
from tests.support.small_task import plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.booking import DataSet, DataSets
from thinwire.client.errors import FAILED, WORK
from thinwire.client.policy import Policy
from thinwire.client.privacy_ledger import FILE, Account, DeviceLedger
from thinwire.core import RunPlan
from thinwire.core.errors import PlanError
from thinwire.core.types import Assignment, Failure
from thinwire.privacy.accounting import Budget, Release, epsilon
from thinwire.privacy.noise_plan import spending

RELEASE = Release("discrete-gaussian", sensitivity=10.0, variance=400.0, dimensions=64)
CENTRAL = """
steps = 3
buffers = "local"
[cohort]
deadline_s = 60
late = "drop"
clients = 10
[privacy]
mode = "central"
clip = 1.0
noise_multiplier = 1.0
"""


class Private(Device):
    """A device whose ledger is read again at each start."""

    def __init__(self, folder: Path, policy: Policy | None = None, **changed: Any) -> None:
        self.changed, self.dataset = changed, DataSet("", "/data/ward")
        super().__init__(folder, policy or Policy(), CENTRAL)

    def start(self) -> None:
        (self.folder / "device").mkdir(parents=True, exist_ok=True)
        self.ledger = DeviceLedger(self.folder / "device", "key")
        terms: dict[str, Any] = {"release": lambda assignment, plan: ("ward", RELEASE.to_json())} | self.changed
        self.admission_options["account"] = Account(self.ledger, lambda task: self.dataset, **terms)
        super().start()

    def data(self, client: object) -> Any:
        """The line is on disk before the data are read."""
        self.lines_at_read = len(DeviceLedger(self.folder / "device").bookings)
        return super().data(client)


def test_a_release_is_booked_before_the_data_are_read(tmp_path):
    device = Private(tmp_path)
    assert device.rule(1) == ""
    assert (device.read, device.lines_at_read) == (1, 1)
    (line,) = DeviceLedger(tmp_path / "device").bookings
    assert (line.population, line.release, line.round, line.key) == ("ward", RELEASE.to_json(), 1, "key")
    assert (line.dataset, line.at) == (device.dataset, device.at.timestamp())


def test_a_repeated_assignment_is_booked_once_and_another_reply_to_it_again(tmp_path):
    device = Private(tmp_path)
    first = device.assign(1, assignment_id="a-1")
    assert device.assign(1, assignment_id="a-1") == first
    device.start()
    assert device.assign(1, assignment_id="a-1") == first
    assert len(device.ledger.bookings) == 1
    device.handler.stop(device.aggregator.assign(2, "stop").assignment, print)  # its reply is forgotten
    assert device.rule(1, assignment_id="a-1") == ""
    assert len(device.ledger.bookings) == 2


def test_a_crash_in_the_middle_of_the_work_books_nothing_twice(tmp_path):
    device = Private(tmp_path, Policy(max_participations=1))
    device.admission.admit(device.aggregator.assign(1).assignment)
    device.start()
    assert device.admission.is_wanted(device.aggregator.assign(1).assignment)
    assert device.rule(1) == ""
    assert len(device.ledger.bookings) == 1
    assert not device.admission.is_wanted(device.aggregator.assign(2).assignment)
    assert device.rule(2) == "max_participations"


def test_what_the_ledger_has_with_the_next_release_decides_about_max_epsilon(tmp_path):
    most = 1.001 * epsilon({RELEASE: 3}, 1e-6)
    device = Private(tmp_path, Policy(max_epsilon=most, max_delta=1e-6))
    assert [device.rule(number) for number in (1, 2)] == ["", ""]
    device.start()
    assert [device.rule(number) for number in (3, 4)] == ["", "max_epsilon"]
    assert not device.admission.is_wanted(device.aggregator.assign(5).assignment)
    assert (len(device.ledger.bookings), device.read) == (3, 2)  # each process reads once
    device.dataset = DataSet("", "/data/other")
    assert device.rule(6, identity="next") == ""


def test_the_first_release_alone_decides_at_which_order_all_are_added_up(tmp_path):
    """An order that is best for what was released depends on outputs, if these decide what is released next."""
    first = Release("discrete-gaussian", 1.0, 4.4, 64, unit="record")
    more, most = Release("discrete-gaussian", 1.0, 1.0, 64, rate=0.01, unit="record"), 2.1
    after = {first: 1, more: 10}
    assert epsilon(after, 1e-5) < most < Budget(most, 1e-5).reached(after)

    def rules(folder: Path, first: Release) -> list[str]:
        """Return what a device says to ten releases, of which this is the first."""

        def release(assignment: Assignment, plan: RunPlan) -> tuple[str, str]:
            return "ward", (first if assignment.round == 1 else more).to_json()

        device = Private(folder, Policy(max_epsilon=most), release=release)
        return [device.rule(number) for number in range(1, 11)]

    made = rules(tmp_path / "whole", first).index("max_epsilon")
    assert Budget(most, 1e-5).reached({first: 1, more: made - 1}) <= most
    assert Budget(most, 1e-5).reached({first: 1, more: made}) > most
    assert rules(tmp_path / "sampled", more) == 10 * [""], "its first release is sampled, as are all others"


def test_another_run_and_another_task_spend_of_the_same_data_set(tmp_path):
    device = Private(tmp_path, Policy(max_participations=2))
    assert [device.rule(number, identity=run) for number, run in ((1, "aa"), (2, "bb"), (3, "cc"))] == [
        "", "", "max_participations",
    ]  # fmt: skip


def test_data_behind_a_link_that_leads_elsewhere_take_part_in_nothing_private_until_the_next_start(tmp_path):
    """The worker keeps the records that it has read, so the line would be booked for others."""
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.mkdir()
    new.mkdir()
    link.symlink_to(old)
    device = Private(tmp_path)

    def start() -> None:
        device.admission_options["account"] = replace(
            device.admission_options["account"], dataset=DataSets("", link, ["small"])
        )
        Device.start(device)

    start()
    assert device.rule(1) == ""
    link.unlink()
    link.symlink_to(new)
    answer = device.assign(2)
    assert isinstance(answer, Failure)
    assert answer.text == "privacy: the data of this client are elsewhere than when it started"
    assert [line.data for line in device.ledger.bookings] == [str(old)]
    start()
    assert device.rule(3, identity="next") == ""
    assert [line.data for line in device.ledger.bookings] == [str(old), str(new)]


def test_other_data_take_part_in_no_run_of_which_the_device_keeps_what_the_first_ones_taught_it(tmp_path):
    """Local buffers and personal layers of a run are of its data, and a release would be booked for others alone."""
    device = Private(tmp_path)
    assert device.rule(1) == ""
    device.dataset = DataSet("", "/data/other")
    answer = device.assign(2)
    assert isinstance(answer, Failure)
    assert answer.text == "privacy: other data of this device took part in this run, and it keeps some of it"
    assert not device.admission.is_wanted(device.aggregator.assign(3).assignment)
    plan, began = device.aggregator.plan, device.aggregator.assign(1).assignment.run
    run = plan.run.model_copy(update={"init": f"run:{began}"})
    device.aggregator.plan = plan.model_copy(update={"run": run})
    assert device.rule(4, identity="next") == "privacy", "it would begin with the personal layers of that run"
    device.aggregator.plan = plan
    assert device.rule(4, identity="next") == ""
    device.dataset = DataSet("", "/data/ward/7")
    assert device.rule(5) == "", "a part of the first data"
    assert [line.data for line in device.ledger.bookings] == ["/data/ward", "/data/other", "/data/ward/7"]


def test_a_damaged_ledger_declines_private_work_with_a_sentence(tmp_path):
    device = Private(tmp_path)
    assert device.rule(1) == ""
    path = tmp_path / "device" / FILE
    path.write_bytes(path.read_bytes().replace(b"ward", b"word", 1))
    device.start()
    answer = device.assign(2)
    assert isinstance(answer, Failure)
    assert answer.text.startswith(f"privacy: line 1 of {path} is damaged") or "privacy.jsonl" in answer.text
    assert device.read == 1


def test_a_ledger_that_is_not_writable_declines_and_nothing_is_read(tmp_path, monkeypatch):
    device = Private(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    answer = device.assign(1)
    assert isinstance(answer, Failure)
    assert answer.text.startswith("privacy: cannot write")
    assert device.read == 0


@pytest.mark.parametrize("policy", [Policy(), Policy(max_epsilon=8.0)])
def test_what_cannot_be_computed_is_declined(tmp_path, policy):
    def release(assignment: Assignment, plan: RunPlan) -> tuple[str, str]:
        raise PlanError("the width does not fit")

    device = Private(tmp_path, policy, release=release)
    assert device.assign(1).text == "privacy: the width does not fit"  # type: ignore[union-attr]
    unread = Private(tmp_path / "unread", policy, release=lambda assignment, plan: ("ward", "{}"))
    assert (unread.rule(1), unread.ledger.bookings) == ("privacy", ())
    absurd = Private(tmp_path / "absurd", policy, release=lambda assignment, plan: spending(plan, 64))
    absurd.aggregator.plan = plan_of(CENTRAL.replace("noise_multiplier = 1.0", "noise_multiplier = 1e18"))
    assert not absurd.admission.is_wanted(absurd.aggregator.assign(1).assignment)
    assert (absurd.rule(1), absurd.ledger.bookings) == ("plan", ())
    assert AdmissionController(policy, tmp_path / "none")._prospect(
        device.aggregator.assign(1).assignment, device.aggregator.assign(1).assignment.plan, 0  # type: ignore[arg-type]
    ).unknown == "this device keeps no privacy ledger"  # fmt: skip


MEAN: list[float] = []  # of the last data: globals of a task's file live as long as its process


class Scaled(Private):
    """A task whose model() begins with a mean of the data that its data() has read."""

    def model(self) -> nn.Module:
        made = nn.Linear(4, 3)
        nn.init.constant_(made.bias, MEAN[0] if MEAN else 0.0)
        return made

    def data(self, client: object) -> Any:
        found = super().data(client)
        MEAN[:] = [float(found.train[:][0].mean())]
        return found


def test_a_device_makes_no_first_model_for_a_private_run_because_model_may_know_what_data_has_read(tmp_path):
    """No private run begins with a model of a device, so nothing but an aggregator that deviates sends this."""
    device = Scaled(tmp_path)
    device.aggregator.task = task_of(model=device.model, data=device.data)
    device.start()
    assert device.rule(1) == ""
    assert MEAN != []
    assert [device.rule(2, "init"), device.rule(3, "evaluate")] == ["privacy", "privacy"]
    assert len(device.ledger.bookings) == 1
    assert not device.admission.is_wanted(device.aggregator.assign(4, "init").assignment)


def test_a_run_gets_no_more_rounds_of_the_data_than_its_plan_allows_whoever_counts_them(tmp_path):
    device = Private(tmp_path)
    device.aggregator.plan = RunPlan.parse(
        f'[run]\ntask = "small"\nrounds = 9\nevaluate = "off"\n[local]\nlr = 0.1\n{CENTRAL}\nmax_participations = 2'
    )
    assert [device.rule(number) for number in (1, 2)] == ["", ""]
    failure = device.assign(3)
    assert isinstance(failure, Failure)
    assert "its data took part in 2 rounds of this run, the plan allows 2" in failure.text
    assert device.rule(4, identity="another run") == ""


def test_a_device_declines_a_round_that_is_too_near_to_one_in_which_its_data_took_part(tmp_path):
    device = Private(tmp_path)
    tree = f'{CENTRAL}\nmechanism = "tree"\nmin_separation = 3'
    device.aggregator.plan = RunPlan.parse(
        f'[run]\ntask = "small"\nrounds = 9\nevaluate = "off"\n[local]\nlr = 0.1\n{tree}'
    )
    assert device.rule(1) == ""
    device.start()
    for number in (2, 3):
        failure = device.assign(number)
        assert isinstance(failure, Failure)
        assert "its data took part in round 1, the plan keeps 3 rounds apart" in failure.text
    assert device.rule(4) == ""
    assert [booking.round for booking in device.ledger.bookings] == [1, 4]


def test_a_failure_tells_nothing_of_the_data_also_where_the_plan_came_as_a_digest(tmp_path):
    device = Private(tmp_path)
    assert device.rule(1) == ""

    def broken(client: object) -> Any:
        raise ValueError("a fact of the data")

    device.aggregator.task = task_of(data=broken)
    device.start()
    answer = device.assign(2, plan=device.aggregator.plan.digest)
    assert isinstance(answer, Failure)
    assert (answer.kind, answer.text) == (FAILED, WORK)
