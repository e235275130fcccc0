"""What a device keeps of a compressed downlink: the replica at its version, on disk with each answer."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.aggregation import Downlink, digest
from thinwire.client.handler import AssignmentHandler
from thinwire.core import RunPlan
from thinwire.core.fleet import Delivery
from thinwire.core.types import Failure, Part, ReplyHeader, Vector

SPEC = "topk(0.5) > int8"


class Sender(Aggregator):
    """Announces versions, each a step from the one before, and sends a range of them as changes."""

    def __init__(self, folder: Path) -> None:
        plan = plan_of(codec="topk(0.2) > int8", feedback="classic").to_json()
        plan["downlink"]["codec"] = SPEC
        super().__init__(folder, task_of(), RunPlan.from_json(plan))
        self.down = Downlink(self.first.layout, SPEC, self.first.vector)
        self.news = [self.down.publish(self.first.vector + version) for version in (1, 2, 3)]

    def changes(self, first: int, last: int) -> Delivery:
        """An assignment at version `last` with the changes from `first` on."""
        named = [(f"{v}/{i}", c) for v in range(first, last + 1) for i, c in enumerate(self.news[v - 1].changes)]
        bundle = self.folder / f"{first}-{last}"
        bundle.write_bytes(b"".join(change for _, change in named))
        parts = tuple(Part(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in named)
        assigned = self.assign(last + 1, parts=parts, base_digest=self.news[last - 1].digest)
        return replace(assigned, bundle=bundle)


def replica(handler: AssignmentHandler) -> tuple[Vector, int]:
    state = handler.runs[RUN][1]
    assert state.replica is not None
    return state.replica, state.replica_version


def test_changes_are_applied_to_what_the_last_answer_was_made_from(tmp_path):
    sender = Sender(tmp_path)
    handler = sender.handler()
    assert isinstance(sender.answer(handler, sender.assign(1))[0], ReplyHeader)
    assert isinstance(sender.answer(handler, sender.changes(1, 1))[0], ReplyHeader)
    again = sender.handler()  # another process
    header, _ = sender.answer(again, sender.changes(2, 3))
    assert isinstance(header, ReplyHeader), header
    assert (digest(replica(again)[0]), replica(again)[1]) == (sender.news[2].digest, 3)


def test_a_device_without_the_model_says_base_mismatch_and_takes_the_same_assignment_in_full(tmp_path):
    sender = Sender(tmp_path)
    handler = sender.handler()
    failure, _ = sender.answer(handler, sender.changes(2, 3))
    assert isinstance(failure, Failure)
    assert failure.kind == "base-mismatch"
    full = replace(sender.assign(4, params=sender.down.replica))
    assert isinstance(sender.answer(handler, full)[0], ReplyHeader)
    assert digest(replica(handler)[0]) == sender.news[2].digest


def test_what_does_not_come_out_right_leaves_what_was_held(tmp_path):
    sender = Sender(tmp_path)
    handler = sender.handler()
    sender.answer(handler, sender.assign(1))
    before = replica(handler)[0].tobytes()
    delivery = sender.changes(1, 2)
    wrong = replace(delivery, assignment=replace(delivery.assignment, base_digest="0" * 64))
    assert sender.answer(handler, wrong)[0].kind == "base-mismatch"
    assert (replica(handler)[0].tobytes(), replica(handler)[1]) == (before, 0)
    assert isinstance(sender.answer(handler, delivery)[0], ReplyHeader)


def test_a_replica_that_is_damaged_on_disk_is_not_believed(tmp_path):
    sender = Sender(tmp_path)
    sender.answer(sender.handler(), sender.assign(1))
    (file,) = (tmp_path / "device").rglob("replica-*")
    file.write_bytes(file.read_bytes()[:-4] + b"xxxx")
    handler = sender.handler()
    assert sender.answer(handler, sender.changes(1, 1))[0].kind == "base-mismatch"
    assert "the replica of small-1 is not readable" in " ".join(sender.said)


def test_an_assignment_at_the_version_that_is_held_needs_no_parts(tmp_path):
    sender = Sender(tmp_path)
    handler = sender.handler()
    sender.answer(handler, sender.assign(1))
    sender.answer(handler, sender.changes(1, 2))
    same = sender.assign(9, parts=(), base_version=2, base_digest=sender.news[1].digest)
    assert isinstance(sender.answer(handler, replace(same, bundle=None))[0], ReplyHeader)


def test_without_compression_no_model_is_kept(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    aggregator.answer(aggregator.handler(), aggregator.assign())
    assert not list((tmp_path / "device").rglob("replica-*"))
