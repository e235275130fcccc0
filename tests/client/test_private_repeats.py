"""An assignment whose reply was made is booked again, whatever an aggregator does to make the device forget the reply."""

from __future__ import annotations

import pytest

from tests.client.test_private_assignments import Private
from thinwire.client.privacy_ledger import DeviceLedger


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
