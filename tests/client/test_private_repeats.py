"""What an aggregator that does not follow the protocol gets of a device without a line in its ledger: nothing."""

from __future__ import annotations

import pytest

from tests.client.test_policy import plan, rule_of
from tests.client.test_private_assignments import CENTRAL, Private
from thinwire.client.policy import Policy
from thinwire.client.privacy_ledger import DeviceLedger
from thinwire.core import RunPlan


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_of_the_same_name_in_between_gives_no_release_for_free(tmp_path, restarts):
    device = Private(tmp_path)
    for count in (1, 2, 3):
        assert device.rule(1, identity="beef", assignment_id="a-1") == ""
        assert len(device.ledger.bookings) == count
        if restarts:
            device.start()
        assert device.rule(1, "init", identity="another run", assignment_id="b-1") == ""
    assert device.ledger.spent(device.dataset) == DeviceLedger(tmp_path / "device").spent(device.dataset)


def test_an_aggregator_that_makes_the_device_forget_gets_no_more_rounds_than_the_plan_allows(tmp_path):
    device = Private(tmp_path)
    most = device.aggregator.plan.run.rounds
    for _ in range(most):
        assert device.rule(1, identity="beef", assignment_id="a-1") == ""
        device.rule(1, "init", identity="another run", assignment_id="b-1")
    assert device.rule(1, identity="beef", assignment_id="a-1") == "privacy"


def test_a_kill_behind_the_commit_of_a_reply_is_made_good_by_the_next_process(tmp_path, monkeypatch):
    device = Private(tmp_path)
    monkeypatch.setattr(device.ledger, "answered", lambda *_: None)  # the kill
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    device.start()
    assert [header.assignment_id for header, _ in device.session.unsent()] == ["a-1"]
    device.rule(1, "init", identity="another run", assignment_id="b-1")
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    assert len(device.ledger.bookings) == 2


def test_a_reply_that_failed_leaves_its_booking_open(tmp_path):
    device = Private(tmp_path)
    device.gate.admit(device.aggregator.assign(1, identity="beef", assignment_id="a-1").assignment)
    device.start()
    assert device.rule(1, identity="beef", assignment_id="a-1") == ""
    assert len(device.ledger.bookings) == 1


def test_metrics_of_a_private_plan_are_declined_whatever_the_aggregator_checked():
    """The aggregator refuses such plans; a device does not rely on that, because its ledger books the noise alone."""
    private = {"mode": "distributed", "clip": 1.0, "noise_multiplier": 1.0}
    masked = plan(privacy=private, secure={"enabled": True, "metrics": {"loss": 10.0}})
    assert rule_of(Policy(), masked) == "privacy"
    assert rule_of(Policy(), plan(privacy=private, secure={"enabled": True})) == ""
    assert rule_of(Policy(), plan(privacy={"mode": "central"}), kind="evaluate") == "privacy"
    assert rule_of(Policy(), plan(secure={"enabled": True, "metrics": {"loss": 10.0}})) == ""


def test_a_second_reply_to_a_round_of_a_tree_is_too_near_to_the_first(tmp_path):
    device = Private(tmp_path)
    tree = f'{CENTRAL}\nmechanism = "tree"\nmin_separation = 3'
    device.aggregator.plan = RunPlan.parse(f'[run]\ntask = "small"\nrounds = 9\n[local]\nlr = 0.1\n{tree}')
    for rule in ("", "privacy"):
        assert device.rule(1, identity="beef", assignment_id="a-1") == rule
        device.rule(1, "init", identity="another run", assignment_id="b-1")
