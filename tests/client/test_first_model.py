"""A run's first model from this device: no verdict comes on it, so it is done with when the other end has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_task import RUN, Aggregator, plan_of, task_of
from thinwire.client.handler import AssignmentHandler
from thinwire.core.errors import DataLost
from thinwire.core.statedir import write_atomically
from thinwire.core.types import ReplyHeader


def asked(folder: Path, text: str = "") -> Aggregator:
    return Aggregator(folder, task_of(), plan_of(text, codec="topk(0.2) > int8", feedback="classic"))


def given(aggregator: Aggregator, **session: Any) -> tuple[AssignmentHandler, ReplyHeader]:
    """The session that has answered, and the answer."""
    made = aggregator.session(**session)
    delivery = aggregator.ask(0, kind="init", ask_id=f"{RUN}.init.pi-01", base_version=0, parts=(), base_digest="")
    head, _ = aggregator.answer(made, delivery)
    assert isinstance(head, ReplyHeader) and head.parts, aggregator.said
    return made, head


def on_disk(aggregator: Aggregator) -> list[str]:
    return sorted(path.name for path in (aggregator.folder / "device" / "runs" / RUN).glob("*.parts"))


@pytest.mark.parametrize("text", ["", 'durability = "exit"'])
def test_a_client_that_starts_anew_sends_it_again_until_it_has_arrived_and_never_after(
    tmp_path: Path, text: str
) -> None:
    aggregator = asked(tmp_path, text)
    session, head = given(aggregator)
    session.save(aggregator.said.append)
    ((again, bundle),) = aggregator.session().unsent()
    assert again == head and bundle is not None and bundle.stat().st_size == head.payload_bytes
    session.delivered(head, upload_s=1.0)
    session.save(aggregator.said.append)
    assert session.unsent() == [] and on_disk(aggregator) == []
    anew = aggregator.session()
    assert anew.unsent() == []
    later, _ = aggregator.answer(anew, aggregator.ask())
    assert later.update_id.sequence == head.update_id.sequence + 1, "no id is used twice"


def test_one_that_arrived_before_the_client_could_note_it_is_sent_once_more(tmp_path: Path) -> None:
    aggregator = asked(tmp_path)
    _, head = given(aggregator)  # it is killed here: what it pushed it does not know
    anew = aggregator.session()
    ((again, _),) = anew.unsent()
    anew.delivered(again)
    assert again == head and aggregator.session().unsent() == []


def test_on_a_full_disk_it_goes_with_the_next_commit(tmp_path: Path) -> None:
    aggregator, full = asked(tmp_path), list[bool]()

    def write(path: Path, data: bytes) -> None:
        if full:
            raise DataLost("the disk is full")
        write_atomically(path, data)

    session, head = given(aggregator, write=write)
    full.append(True)
    session.delivered(head)
    full.clear()
    assert aggregator.session().unsent() != [], "as far as the disk knows"
    aggregator.answer(session, aggregator.ask())
    assert [entry.file for entry in session.kept[RUN][1].outbox] == on_disk(aggregator)
    assert all(sent.ask_id != head.ask_id for sent, _ in aggregator.session().unsent())


def test_it_goes_into_no_residual_whatever_is_said_of_it(tmp_path: Path) -> None:
    aggregator, calm = asked(tmp_path / "told"), asked(tmp_path / "calm")
    session, head = given(aggregator)
    heard, told = aggregator.answer(session, aggregator.ask(verdicts=[(head.update_id.sequence, "dropped")]))
    other, _ = given(calm)
    unheard, untold = calm.answer(other, calm.ask())
    assert told.read_bytes() == untold.read_bytes() and heard.residual_norm == unheard.residual_norm
    after, before = (one.kept[RUN][1].residual for one in (session, other))
    assert after is not None and before is not None and np.array_equal(after, before)


def test_one_that_an_older_version_kept_is_known_by_its_round(tmp_path: Path) -> None:
    aggregator = asked(tmp_path)
    _, head = given(aggregator)
    state = tmp_path / "device" / "runs" / RUN / "state.json"
    raw = json.loads(state.read_bytes())
    del raw["outbox"][0]["first"]
    state.write_text(json.dumps(raw))
    session = aggregator.session()
    assert [sent for sent, _ in session.unsent()] == [head]
    session.delivered(head)
    assert aggregator.session().unsent() == []
