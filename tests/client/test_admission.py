"""What passes before an assignment is worked on: no data is read for what is declined, and what is counted stays
counted.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.fork_server import run_forked
from tests.support.gated_client import NOON, Device
from tests.support.processes import environment
from tests.support.small_task import RUN
from thinwire.client.admission import CLOCK_TOLERANCE, FREE_RESTARTS, QuotaFile, key_of
from thinwire.client.execute import Begun
from thinwire.client.policy import Kind, Policy
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.protocol import Split
from thinwire.core.errors import DataLost
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Failure, ReplyHeader

KINDS: tuple[Kind, ...] = get_args(Kind)


DAMAGED = b'{"format":2,"date"'


FORBIDS: dict[str, tuple[Policy, dict[str, Any]]] = {
    "tasks": (Policy(tasks=["other"]), {}),
    "kinds": (Policy(kinds=["train"]), {}),
    "secure": (Policy(secure="required"), {}),
    "adversary": (Policy(adversary="curious"), {}),
    "max_corrupt_assumed": (Policy(max_corrupt_assumed=0.1), {}),
    "min_cohort": (Policy(min_cohort=3), {}),
    "min_survivors": (Policy(min_survivors=3), {}),
    "post_quantum": (Policy(post_quantum="required"), {}),
    "privacy": (Policy(privacy=["central"]), {}),
    "max_epsilon": (Policy(max_epsilon=1.0), {}),
    "min_noise": (Policy(min_noise=1.0), {}),
    "hours": (Policy(hours="22:00-06:00"), {}),
    "metered": (Policy(metered="refuse"), {}),
    "plan": (Policy(), {"plan": {"run": {"task": "small"}, "local": {"lr": 0.1}, "leak": True}}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", FORBIDS)
def test_what_is_declined_never_reads_the_data(tmp_path, rule, kind):
    policy, changed = FORBIDS[rule]
    if rule == "kinds":
        policy = Policy(kinds=[other for other in KINDS if other != kind])
    device = Device(tmp_path, policy)
    assert device.rule(1, kind, **changed) == rule
    assert device.read == 0
    assert not (tmp_path / "device" / "runs").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_count_declines_every_kind_and_reads_no_data(tmp_path, kind):
    device = Device(tmp_path, Policy(rounds_a_day=5))
    device.counts.write_bytes(DAMAGED)
    answer = device.assign(1, kind)
    assert isinstance(answer, Failure)
    assert (
        answer.text
        == "rounds_a_day: policy.json on this device is not readable; thinwire client doctor shows its owner what to do"
    )
    assert (device.read, device.counts.read_bytes()) == (0, DAMAGED)
    device.counts.unlink()
    assert device.rule(2) == ""


def test_a_count_of_another_format_is_named_and_stays_as_it_is(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assert device.rule(1) == ""
    later = json.dumps({**json.loads(device.counts.read_bytes()), "format": 4}).encode()
    device.counts.write_bytes(later)
    answer = device.assign(2)
    assert isinstance(answer, Failure)
    assert answer.text.startswith("rounds_a_day: policy.json on this device has another format than its client reads")
    assert device.counts.read_bytes() == later
    with pytest.raises(DataLost) as refused:
        QuotaFile(device.counts.parent).read()
    assert "has format 4, and this program reads 3" in refused.value.why
    assert "install the thinwire that wrote it" in refused.value.hint


def test_with_the_rules_kept_the_data_are_read(tmp_path):
    device = Device(tmp_path, Policy(tasks=["small"], hours="11:00-13:00", rounds_a_day=9, metered="refuse"))
    device.price = False
    assert (device.rule(1), device.rule(2, "evaluate"), device.read) == ("", "", 1)


def test_a_decision_is_not_remembered_for_another_policy_or_kind(tmp_path):
    device = Device(tmp_path, Policy(kinds=["train"]))
    assert [device.rule(1, "train"), device.rule(2, "train"), device.rule(3, "evaluate")] == ["", "", "kinds"]
    device.admission.set_policy(Policy(tasks=["other"]))
    assert device.rule(4, "train") == "tasks"
    device.admission.set_policy(Policy())
    assert device.rule(5, "train") == ""


def test_who_may_not_evaluate_does_not_measure_on_the_way_to_training_either(tmp_path):
    for policy, measured in ((Policy(kinds=["train", "evaluate"]), True), (Policy(kinds=["train"]), False)):
        device = Device(tmp_path / str(measured), policy)
        header = device.assign(1)
        assert isinstance(header, ReplyHeader)
        assert any(name.startswith("eval/") for name in header.metrics) is measured
        assert "train/loss" in header.metrics


def test_the_day_counts_each_kind_apart_and_begins_again(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=2))
    assert [device.rule(number) for number in (1, 2, 3)] == ["", "", "rounds_a_day"]
    assert [device.rule(number, "evaluate") for number in (4, 5, 6)] == ["", "", "rounds_a_day"]
    device.at += timedelta(hours=11, minutes=59)
    assert device.rule(7) == "rounds_a_day"
    device.at += timedelta(minutes=1)
    assert [device.rule(number) for number in (8, 9, 10)] == ["", "", "rounds_a_day"]


def test_an_assignment_that_was_answered_is_answered_again_unchecked_and_uncounted(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    first = device.assign(1)
    assert isinstance(first, ReplyHeader)
    device.admission.policy = Policy(rounds_a_day=1, tasks=["other"])
    device.counts.write_bytes(DAMAGED)
    assert device.assign(1) == first
    device.start()
    assert device.assign(1) == first


def test_one_id_does_not_buy_a_second_answer(tmp_path):
    """Once its answer was forgotten (an outcome came), the same id again is another answer, and counts."""
    device = Device(tmp_path, Policy(rounds_a_day=2))
    assert device.rule(1) == ""
    assert device.rule(1, outcomes=[(1, "aggregated")], assignment_id="a-2") == ""
    assert (
        device.rule(1, outcomes=[(1, "aggregated"), (2, "aggregated")], assignment_id="a-2") == ""
    )  # the answer that is there
    device.start()
    device.handler.stop(device.aggregator.assign(3, "stop").assignment, print)
    assert device.rule(1, assignment_id="a-2") == "rounds_a_day"


def test_an_assignment_whose_work_failed_is_counted_again(tmp_path):
    """It cost its owner as much as one that succeeds: else an aggregator repeats what fails after hours, for free."""

    class Failing(Device):
        def data(self, client: object) -> Split:
            self.read += 1
            raise RuntimeError("no such file")

    device = Failing(tmp_path, Policy(rounds_a_day=2))
    assert [device.kind(1) for _ in range(5)] == ["task-error", "task-error", "declined", "declined", "declined"]
    assert device.read == 2
    device.start()
    assert device.rule(1) == "rounds_a_day"


def test_an_assignment_that_was_withdrawn_is_counted_again(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    delivery = device.aggregator.assign(1)
    with pytest.raises(Cancelled):
        device.handler.handle(delivery, lambda: True, print)
    device.handler.mark_withdrawn(delivery.assignment)
    assert device.rule(1) == "rounds_a_day"


def test_an_assignment_whose_model_led_nowhere_counts_and_counts_again_when_it_comes_in_full(tmp_path):
    """The aggregator decides what it sends, so an attempt that it caused to fail is not free."""
    device = Device(tmp_path, Policy(rounds_a_day=2))
    assert device.kind(1, base_digest="0" * 64) == "base-mismatch"
    assert (device.rule(1), device.rule(2)) == ("", "rounds_a_day")


def test_a_run_that_changes_its_identity_does_not_buy_attempts(tmp_path):
    """With another identity the device forgets its replies, and then the first one's assignment is new to it again.

    An assignment that is declined replaces no state, so the last reply is still there and is sent again.
    """
    device = Device(tmp_path, Policy(rounds_a_day=3))
    assigned = [device.rule(1, identity=letter * 16) for letter in "abababab"]
    assert assigned == ["", "", "", "rounds_a_day", "", "rounds_a_day", "", "rounds_a_day"]


def test_an_attempt_that_a_restart_cut_off_is_free_three_times_and_then_counts(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=2))
    assignment = device.aggregator.assign(1).assignment
    for _ in range(1 + FREE_RESTARTS):
        device.admission.admit(assignment)
        device.start()
    kept = json.loads(device.counts.read_text())["open"]["train"]
    assert [key[32:] for key in kept] == ["", *["+"] * FREE_RESTARTS]
    assert device.rule(1) == "", "it counts, and is the second"
    assert [device.rule(number) for number in (2, 1)] == ["rounds_a_day", ""], "the reply is there, and is sent again"


def test_an_overlapping_assignment_that_comes_again_while_its_answer_is_made_does_not_end_it(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1), text="[local.overlap]\nmax_delay = 1\n")
    delivery = device.aggregator.assign(1)
    begun = device.handler.begin(delivery, lambda: False, print)
    assert isinstance(begun, Begun)
    with pytest.raises(Cancelled):
        device.handler.begin(delivery, lambda: False, print)
    device.handler.mark_withdrawn(delivery.assignment)
    kept = json.loads(device.counts.read_text())
    assert (kept["open"], kept["ended"]) == ({"train": [key_of(delivery.assignment)]}, {})
    assert isinstance(device.handler.finish(begun)[0], ReplyHeader)
    kept = json.loads(device.counts.read_text())
    assert (kept["open"], kept["ended"]) == ({"train": []}, {"train": 1})


def test_the_counts_of_a_day_do_not_grow_with_its_assignments(tmp_path):
    device = Device(tmp_path, Policy(hours="00:00-23:59"))
    sizes = set[int]()
    for number in range(1, 5):
        assert device.rule(number) == ""
        assert device.kind(100 + number, base_digest="0" * 64) == "base-mismatch"
        sizes.add(len(device.counts.read_bytes()))
    assert len(sizes) == 1


def test_a_disk_that_refuses_the_end_of_an_attempt_does_not_cost_its_reply(tmp_path):
    class Full:
        writes = 0

        def __call__(self, path: Path, data: bytes) -> None:
            self.writes += path.name == "policy.json"
            if self.writes > 1:
                raise DataLost("the disk is full")
            write_atomically(path, data)

    device = Device(tmp_path, Policy(rounds_a_day=1), write=Full())
    assert isinstance(device.assign(1), ReplyHeader)


def test_counts_are_on_disk_before_the_data_are_read_and_survive_a_kill(tmp_path):
    """A process is killed with SIGKILL in `data()`, between the count and the training."""
    script = (
        "import sys, os, signal, pathlib\n"
        "from tests.support import gated_client as t\n"
        "class Dying(t.Device):\n"
        "    def data(self, client): os.kill(os.getpid(), signal.SIGKILL)\n"
        "Dying(pathlib.Path(sys.argv[1]), t.Policy(rounds_a_day=1)).assign(1)\n"
    )
    died = run_forked([sys.executable, "-c", script, str(tmp_path)], 60, env=environment())
    assert died.returncode == -signal.SIGKILL
    kept = json.loads((tmp_path / "device" / "policy.json").read_text())
    assert [len(keys) for keys in kept["open"].values()] == [1]
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assert device.rule(2) == "rounds_a_day"
    assert device.rule(1) == "", "the one that was killed comes again, and is not counted twice"


def test_a_disk_that_cannot_keep_the_count_lets_nothing_in(tmp_path):
    def full(path, data):
        raise DataLost("the disk is full")

    device = Device(tmp_path, Policy(rounds_a_day=1), write=full)
    answer = device.assign(1)
    assert isinstance(answer, Failure)
    assert (answer.kind, device.read) == ("disk", 0)


@pytest.mark.parametrize("policy", [Policy(hours="00:00-23:59"), Policy(rounds_a_day=9)])
def test_a_clock_that_was_never_set_or_was_set_back_is_not_believed(tmp_path, policy):
    device = Device(tmp_path, policy)
    device.at = datetime(1970, 1, 1, 12, tzinfo=UTC)
    assert device.rule(1) != ""
    device.at = NOON
    assert device.rule(1) == ""
    device.at = NOON - CLOCK_TOLERANCE / 2
    assert device.rule(2) == ""
    device.at = NOON - 2 * CLOCK_TOLERANCE
    answer = device.assign(3)
    assert isinstance(answer, Failure)
    assert "was set back" in answer.text


def test_a_clock_that_steps_back_over_midnight_does_not_begin_the_day_again(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    device.at = NOON.replace(hour=0, minute=5)
    assert device.rule(1) == ""
    device.at -= timedelta(minutes=10)
    assert device.rule(2) == "rounds_a_day"
    device.at += timedelta(minutes=10)
    assert device.rule(3) == "rounds_a_day"


@pytest.mark.parametrize(("skew_s", "admitted"), [(-3590.0, True), (3590.0, True), (3610.0, False), (-3610.0, False)])
def test_a_clock_that_is_hours_from_the_aggregators_is_not_believed(tmp_path, skew_s, admitted):
    device = Device(tmp_path, Policy(hours="00:00-23:59"), skew_s=lambda: skew_s)
    assert (device.rule(1) == "") is admitted


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b'{"format":1}', b'{"format":3,"date":"2026-11-21","at":"2026-11-21T12:00:00","open":{},"ended":{}}',
     b'{"format":3,"date":"2026-11-21","at":"2026-11-21T12:00:00+01:00","open":{"train":"abc"},"ended":{}}',
     b'{"format":3,"date":"2026-11-21","at":"2026-11-21T12:00:00+01:00","open":{},"ended":{"train":"abc"}}'],
)  # fmt: skip
def test_no_damage_of_the_counts_begins_the_day_again(tmp_path, damage):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assert device.rule(1) == ""
    device.counts.write_bytes(damage)
    assert device.rule(2) == "rounds_a_day"


def test_what_was_declined_is_no_error_of_the_device(tmp_path):
    device = Device(tmp_path, Policy(secure="required"))
    assert device.rule(1) == "secure"
    assert not (tmp_path / "device" / "last-error.txt").exists()
    assert any(line.startswith("round 1: declined: secure: ") for line in device.aggregator.said)


@pytest.mark.parametrize("rule", FORBIDS)
def test_what_will_be_declined_is_not_fetched(tmp_path, rule):
    """On a dear link the model would be paid for and thrown away."""
    policy, changed = FORBIDS[rule]
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assigned = device.aggregator.assign(1, "evaluate", **changed).assignment
    assert device.admission.is_wanted(assigned) is (rule != "plan")
    device.admission.policy = policy
    assert not device.admission.is_wanted(assigned)
    assert (device.read, device.counts.exists(), device.admission.plans.digests) == (0, False, ())


def test_runs_do_not_share_an_answers_place(tmp_path):
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assert device.rule(1) == ""
    assert device.rule(1, run=f"{RUN}1") == "rounds_a_day"


def test_on_a_day_that_is_used_up_only_an_attempt_that_is_open_is_fetched_for(tmp_path):
    """Else an aggregator has the same model fetched all day."""
    device = Device(tmp_path, Policy(rounds_a_day=1))
    assignments = [device.aggregator.assign(number).assignment for number in (1, 2)]
    device.admission.admit(assignments[0])
    assert [device.admission.is_wanted(assignment) for assignment in assignments] == [True, False], (
        "it may have been sent again in full"
    )
    device.start()
    assert [device.admission.is_wanted(assignment) for assignment in assignments] == [True, False], (
        "a new process goes on with it"
    )
    assert device.rule(1) == ""
    assert [device.admission.is_wanted(assignment) for assignment in assignments] == [False, False]
