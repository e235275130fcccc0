"""An assignment that cannot be answered: what is told of the error, and that the state is as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.small_task import RUN, Aggregator, cross_entropy, normed, plan_of, task_of
from thinwire.aggregation import digest
from thinwire.client.handler import AssignmentHandler
from thinwire.core.errors import DataLost
from thinwire.core.serialization import reply_from_bytes, reply_to_bytes
from thinwire.core.types import Failure, ReplyHeader

SECRET = "patient 4711 has 0.25"


SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def raising(model, batch):
    secret = SECRET  # noqa: F841 -- a local that must not travel
    raise ValueError(SECRET)


@pytest.mark.parametrize("where", ["loss", "data", "model-forward"])
def test_a_failure_tells_the_class_and_the_place_and_nothing_of_the_data(tmp_path, where):
    class Telling(nn.Linear):
        def forward(self, inputs):
            raise KeyError(SECRET)

    def data(client):
        raise OSError(SECRET)

    broken = {
        "loss": task_of(loss=raising),
        "data": task_of(data=data),
        "model-forward": task_of(lambda: Telling(4, 3)),
    }[where]
    task = replace(broken, file=__file__)
    aggregator = Aggregator(tmp_path, task, plan_of(run='evaluate = "off"'))
    failure, bundle = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert isinstance(failure, Failure)
    assert bundle is None
    assert failure.kind == "task-error"
    said = {"loss": "ValueError", "data": "OSError", "model-forward": "KeyError"}[where]
    assert failure.text.startswith(f"{said} at test_handler_failures.py:")
    assert SECRET not in reply_to_bytes(failure).decode()
    assert SECRET in (tmp_path / "device" / "last-error.txt").read_text()


def test_a_local_buffer_that_holds_nan_is_not_kept(tmp_path):
    def loss(model, batch):
        found = cross_entropy(model, batch)  # of the batch's own statistics
        model[1].running_mean.data.fill_(float("nan"))
        return found

    task = task_of(normed, loss=loss)
    aggregator = Aggregator(tmp_path, task, plan_of('buffers = "local"', run='evaluate = "off"'))
    handler = aggregator.handler()
    assert aggregator.answer(handler, aggregator.assign())[0].kind == "non-finite"
    assert handler.runs[RUN][1].buffers is None


def test_a_refusal_that_the_tasks_own_code_raised_is_not_told_in_its_words(tmp_path):
    from thinwire.core.errors import TaskError

    def loss(model, batch):
        raise TaskError(SECRET)

    aggregator = Aggregator(tmp_path, task_of(loss=loss), plan_of())
    failure, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert failure == Failure("task-error", "TaskError", "a-1", "pi-01")


def nan_loss(model, batch):
    return cross_entropy(model, batch) * torch.nan


def test_a_loss_that_is_nan_is_a_failure_and_leaves_the_state_as_it_was(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler()
    aggregator.answer(handler, aggregator.assign())
    before = handler.runs[RUN][1]
    broken = AssignmentHandler(task_of(loss=nan_loss), tmp_path / "device", handler.client)
    failure, _ = aggregator.answer(broken, aggregator.assign(2))
    assert failure.kind == "non-finite"
    assert broken.unsent_replies() == [(e.header, handler.runs[RUN][0].path(e)) for e in before.outbox]


def test_a_change_that_is_not_finite_is_a_failure(tmp_path):
    def train(model, data, context):
        with torch.no_grad():
            model.weight[0, 0] = torch.inf
        return 3

    aggregator = Aggregator(tmp_path, task_of(train=train), plan_of())
    failure, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert failure.kind == "non-finite"


def test_a_change_as_large_as_float32_can_hold_is_still_an_answer_that_can_be_sent(tmp_path):
    def train(model, data, context):
        with torch.no_grad():
            model.weight += 1e30
        return 3

    aggregator = Aggregator(tmp_path, task_of(train=train), plan_of(run='evaluate = "off"'))
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert reply_from_bytes(reply_to_bytes(header)) == header
    assert header.norm == pytest.approx(1e30 * 12**0.5)


def test_another_model_or_a_damaged_one_is_a_failure_with_its_kind(tmp_path):
    aggregator = Aggregator(tmp_path, task_of(), plan_of())
    handler = aggregator.handler()
    failure, _ = aggregator.answer(handler, aggregator.assign(layout_digest="0" * 64))
    assert failure.kind == "layout-mismatch"
    failure, _ = aggregator.answer(handler, aggregator.assign(base_digest=digest(aggregator.first.vector + 1)))
    assert failure.kind == "base-mismatch"
    delivery = aggregator.assign()
    assert delivery.bundle is not None
    delivery.bundle.write_bytes(delivery.bundle.read_bytes()[:-3])
    failure, _ = aggregator.answer(handler, delivery)
    assert failure.kind == "base-mismatch"
    failure, _ = aggregator.answer(handler, aggregator.assign(run="../../elsewhere"))
    assert failure.kind == "protocol"
    failure, _ = aggregator.answer(handler, aggregator.assign(plan="digest only"))
    assert failure.kind == "need-plan"
    header, _ = aggregator.answer(handler, aggregator.assign())
    assert isinstance(header, ReplyHeader)


def test_a_disk_that_is_full_is_a_failure_and_the_assignment_can_be_answered_later(tmp_path):
    full = [True]

    def write(path, data):
        if full[0] and path.name == "state.json":
            raise DataLost("the disk is full")
        path.write_bytes(data)

    aggregator = Aggregator(tmp_path, task_of(), plan_of(**SPARSE))
    handler = aggregator.handler(write=write)
    failure, _ = aggregator.answer(handler, aggregator.assign())
    assert failure.kind == "disk"
    full[0] = False
    header, _ = aggregator.answer(handler, aggregator.assign())
    assert header.update_id.sequence == 1
