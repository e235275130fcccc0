"""Plans that a device holds by their digest: known again, checked, and thrown away."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.gated_client import Device
from tests.support.small_task import Aggregator, plan_of, task_of
from thinwire.client.policy import Policy
from thinwire.client.run_store import MAX_PLANS, PlanStore
from thinwire.core.errors import DataLost
from thinwire.core.plan import digest_of
from thinwire.core.types import Failure, ReplyHeader


def test_an_assignment_whose_plan_is_not_here_is_not_fetched_and_one_that_comes_again_is(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=2))
    named = device.aggregator.assign(1, plan=device.aggregator.plan.digest).assignment
    assert not device.admission.is_wanted(named)
    assert device.rule(1) == ""
    assert device.admission.is_wanted(named)


def test_a_plan_that_came_whole_is_known_by_its_digest_also_to_the_next_process(tmp_path):
    device = Device(tmp_path, Policy())
    plan = device.aggregator.plan
    assert device.assign(1, plan=plan.digest) == Failure(
        "need-plan", "the plan was sent by its digest only", "a-1", "pi-01"
    )
    assert device.read == 0
    assert isinstance(device.assign(1), ReplyHeader)
    assert isinstance(device.assign(2, plan=plan.digest), ReplyHeader)
    device.start()
    assert device.admission.plans.digests == (plan.digest,)
    assert isinstance(device.assign(3, plan=plan.digest), ReplyHeader)


def test_the_owners_policy_holds_for_a_plan_that_is_named_by_its_digest(tmp_path):
    device = Device(tmp_path, Policy())
    assert device.rule(1) == ""
    device.admission.policy = Policy(secure="required")
    assert device.rule(2, plan=device.aggregator.plan.digest) == "secure"


def test_a_plan_on_disk_that_is_not_what_its_name_says_is_thrown_away(tmp_path):
    device = Device(tmp_path, Policy())
    plan, folder = device.aggregator.plan, tmp_path / "device" / "plans"
    device.assign(1)
    less_compressed = {**plan.to_json(), "leak": True}
    (folder / f"{plan.digest}.json").write_text(json.dumps(less_compressed))
    (folder / "note.json").write_text("{}")
    device.start()
    assert (device.admission.plans.digests, list(folder.iterdir())) == ((), [])
    assert device.kind(2, plan=plan.digest) == "need-plan"


def test_a_plan_that_comes_under_another_digest_than_was_named_is_not_used(tmp_path):
    device = Device(tmp_path, Policy())
    assert device.kind(1, plan="0" * 64) == "need-plan"
    assert [device.kind(1) for _ in range(2)] == ["protocol"] * 2
    assert device.read == 0


@pytest.mark.parametrize("plan", ["", "../../etc/passwd", "0" * 65, None, 7, ["x"]])
def test_what_is_no_plan_and_no_digest_is_never_looked_for(tmp_path, plan):
    device = Device(tmp_path, Policy())
    assert device.kind(1, plan=plan) in ("need-plan", "protocol")
    assert device.read == 0


def test_so_many_plans_are_kept_and_the_one_unused_longest_goes(tmp_path):
    assignment = Aggregator(tmp_path / "assignments", task_of(), plan_of()).assign().assignment
    plans = PlanStore(tmp_path / "plans")
    numbered = [{"number": number} for number in range(MAX_PLANS + 1)]
    for plan in numbered[:MAX_PLANS]:
        plans.of(replace(assignment, plan=plan))
    plans.of(replace(assignment, plan=digest_of(numbered[0])))
    plans.of(replace(assignment, plan=numbered[MAX_PLANS]))
    gone = digest_of(numbered[1])
    for held in (plans, PlanStore(tmp_path / "plans")):
        assert len(held.digests) == MAX_PLANS
        assert gone not in held.digests
        assert digest_of(numbered[0]) in held.digests
    assert len(list((tmp_path / "plans").iterdir())) == MAX_PLANS


def test_a_full_disk_costs_a_plan_no_more_than_being_sent_again(tmp_path):
    def full(path, data):
        raise DataLost("the disk is full")

    assignment = Aggregator(tmp_path / "assignments", task_of(), plan_of()).assign().assignment
    plans = PlanStore(tmp_path / "plans", full)
    assert plans.of(assignment) == assignment.plan
    assert plans.of(replace(assignment, plan=digest_of(assignment.plan))) == assignment.plan
    assert PlanStore(tmp_path / "plans").digests == ()
