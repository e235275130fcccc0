"""What an aggregator that does not follow the protocol gets of a device without a line in its ledger: nothing."""

from __future__ import annotations

import errno
import os

import pytest

from tests.client.test_policy import plan, rule_of
from tests.client.test_private_assignments import CENTRAL, Private
from thinwire.client.errors import FAILED
from thinwire.client.policy import Policy
from thinwire.client.privacy_ledger import DeviceLedger
from thinwire.core import RunPlan
from thinwire.core.records import replace


def forget(device):
    """Let the device do the work of another run of this name, without privacy: it forgets its reply to the first."""
    values = device.aggregator.plan.to_json()
    del values["privacy"]
    assert device.rule(1, identity="another run", assignment_id="b-1", plan=values) == ""


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_of_the_same_name_in_between_gives_no_release_for_free(tmp_path, restarts):
    device = Private(tmp_path)
    for count in (1, 2, 3):
        assert device.rule(1, identity="beef", assignment_id="a-1") == ""
        assert len(device.ledger.bookings) == count
        if restarts:
            device.start()
        forget(device)
    assert device.ledger.spent(device.dataset) == DeviceLedger(tmp_path / "device").spent(device.dataset)


def test_an_aggregator_that_makes_the_device_forget_gets_no_more_rounds_than_the_plan_allows(tmp_path):
    device = Private(tmp_path)
    most = device.aggregator.plan.run.rounds
    for _ in range(most):
        assert device.rule(1, identity="beef", assignment_id="a-1") == ""
        forget(device)
    assert device.rule(1, identity="beef", assignment_id="a-1") == "privacy"


def test_a_kill_behind_the_commit_of_a_reply_is_made_good_by_the_next_process(tmp_path, monkeypatch):
    device = Private(tmp_path)
    monkeypatch.setattr(device.ledger, "mark_answered", lambda *_: None)  # the kill
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    device.start()
    assert [header.assignment_id for header, _ in device.handler.unsent_replies()] == ["a-1"]
    forget(device)
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    assert len(device.ledger.bookings) == 2


def test_a_kill_before_the_reply_leaves_its_booking_open(tmp_path):
    device = Private(tmp_path)
    device.admission.admit(device.aggregator.assign(1, identity="beef", assignment_id="a-1").assignment)
    device.start()
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    assert len(device.ledger.bookings) == 1


class Failing(Private):
    def data(self, client):
        super().data(client)
        raise ValueError


def test_each_failure_costs_a_line_because_it_may_tell_of_the_data(tmp_path):
    device = Failing(tmp_path, Policy(max_participations=2))
    kinds = [device.kind(1, identity="beef", assignment_id="a-1") for _ in range(3)]
    assert (kinds, len(device.ledger.bookings)) == ([FAILED, FAILED, "declined"], 2)


def test_one_id_for_assignments_of_several_runs_is_booked_for_each_of_them(tmp_path):
    device = Private(tmp_path)
    assignment = device.aggregator.assign(1, identity="beef", assignment_id="a-1").assignment
    for count, run in enumerate(("small-1", "small-2", "small-3"), 1):
        device.admission.admit(replace(assignment, run=run))
        device.admission.admit(replace(assignment, run=run))  # it came twice
        assert len(device.ledger.bookings) == count


def test_nothing_of_a_reply_leaves_before_the_ledger_has_noted_it(tmp_path, monkeypatch):
    device, pwrite = Private(tmp_path), os.pwrite

    def full(descriptor, data, at):
        if b"answered" in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        assert device.kind(1, identity="beef", assignment_id="a-1") == FAILED
        device.start()
        assert device.handler.unsent_replies() == []
    monkeypatch.undo()
    assert [header.assignment_id for header, _ in device.handler.unsent_replies()] == ["a-1"]
    assert len(device.ledger.bookings) == 1


def test_metrics_of_a_private_plan_are_declined_whatever_the_aggregator_checked():
    """The aggregator refuses such plans; a device does not rely on that, because its ledger books the noise alone."""
    private = {"mode": "distributed", "clip": 1.0, "noise_multiplier": 1.0}
    metrics, clients = {"enabled": True, "max_dropout": 0.2, "metrics": {"loss": 10.0}}, {"evaluate": "clients"}
    cohort = {"clients": 10}
    assert rule_of(Policy(), plan(privacy=private, secure=metrics, run=clients, cohort=cohort)) == "plan"
    assert rule_of(Policy(), plan(privacy=private, secure={**metrics, "metrics": {}}, cohort=cohort)) == ""
    assert rule_of(Policy(), plan(privacy={"mode": "central"}), kind="evaluate") == "privacy"
    assert rule_of(Policy(), plan(secure=metrics, run=clients)) == ""


def test_a_second_reply_to_a_round_of_a_tree_is_too_near_to_the_first(tmp_path):
    device = Private(tmp_path)
    tree = f'{CENTRAL}\nmechanism = "tree"\nmin_separation = 3'
    device.aggregator.plan = RunPlan.parse(
        f'[run]\ntask = "small"\nrounds = 9\nevaluate = "off"\n[local]\nlr = 0.1\n{tree}'
    )
    for rule in ("", "privacy"):
        assert device.rule(1, identity="beef", assignment_id="a-1") == rule
        forget(device)
