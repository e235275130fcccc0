"""A run's first model from this device: no outcome comes on it, so it is done with when the other end has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client.handler import AssignmentHandler
from thinwire.core.errors import DataLost
from thinwire.core.statedir import write_atomically
from thinwire.core.types import ReplyHeader


def assigned(folder: Path, text: str = "") -> Aggregator:
    return Aggregator(folder, task_of(), plan_of(text, codec="topk(0.2) > int8", feedback="classic"))


def given(aggregator: Aggregator, **handler: Any) -> tuple[AssignmentHandler, ReplyHeader]:
    """The handler that has answered, and the answer."""
    made = aggregator.handler(**handler)
    delivery = aggregator.assign(
        0, kind="init", assignment_id=f"{RUN}.init.pi-01", base_version=0, parts=(), base_digest=""
    )
    header, _ = aggregator.answer(made, delivery)
    assert isinstance(header, ReplyHeader) and header.parts, aggregator.said
    return made, header


def on_disk(aggregator: Aggregator) -> list[str]:
    return sorted(path.name for path in (aggregator.folder / "device" / "runs" / RUN).glob("*.parts"))


@pytest.mark.parametrize("text", ["", 'durability = "exit"'])
def test_a_client_that_starts_again_sends_it_again_until_it_has_arrived_and_never_after(
    tmp_path: Path, text: str
) -> None:
    aggregator = assigned(tmp_path, text)
    handler, header = given(aggregator)
    handler.save(aggregator.said.append)
    ((again, bundle),) = aggregator.handler().unsent_replies()
    assert again == header and bundle is not None and bundle.stat().st_size == header.payload_bytes
    handler.mark_delivered(header, upload_s=1.0)
    handler.save(aggregator.said.append)
    assert handler.unsent_replies() == [] and on_disk(aggregator) == []
    restarted = aggregator.handler()
    assert restarted.unsent_replies() == []
    later, _ = aggregator.answer(restarted, aggregator.assign())
    assert later.update_id.sequence == header.update_id.sequence + 1, "no id is used twice"


def test_one_that_arrived_before_the_client_could_note_it_is_sent_once_more(tmp_path: Path) -> None:
    aggregator = assigned(tmp_path)
    _, header = given(aggregator)  # it is killed here: what it pushed it does not know
    restarted = aggregator.handler()
    ((again, _),) = restarted.unsent_replies()
    restarted.mark_delivered(again)
    assert again == header and aggregator.handler().unsent_replies() == []


def test_on_a_full_disk_it_goes_with_the_next_commit(tmp_path: Path) -> None:
    aggregator, full = assigned(tmp_path), list[bool]()

    def write(path: Path, data: bytes) -> None:
        if full:
            raise DataLost("the disk is full")
        write_atomically(path, data)

    handler, header = given(aggregator, write=write)
    full.append(True)
    handler.mark_delivered(header)
    full.clear()
    assert aggregator.handler().unsent_replies() != [], "as far as the disk knows"
    aggregator.answer(handler, aggregator.assign())
    assert [entry.file for entry in handler.runs[RUN][1].outbox] == on_disk(aggregator)
    assert all(sent.assignment_id != header.assignment_id for sent, _ in aggregator.handler().unsent_replies())


def test_it_goes_into_no_residual_whatever_is_said_of_it(tmp_path: Path) -> None:
    aggregator, calm = assigned(tmp_path / "told"), assigned(tmp_path / "calm")
    handler, header = given(aggregator)
    heard, told = aggregator.answer(handler, aggregator.assign(outcomes=[(header.update_id.sequence, "dropped")]))
    other, _ = given(calm)
    unheard, untold = calm.answer(other, calm.assign())
    assert told.read_bytes() == untold.read_bytes() and heard.residual_norm == unheard.residual_norm
    after, before = (one.runs[RUN][1].residual for one in (handler, other))
    assert after is not None and before is not None and np.array_equal(after, before)
