"""Older events of a run are compressed together, and are read as if they were rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from sqlalchemy import Table, func, select

from tests.support.reasons import noted
from tests.support.store_story import LAYOUT, PLAN
from thinwire.core.events import DeviceOnline, RoundBecameCurrent, RunNoted
from thinwire.core.fleet import TaskReport
from thinwire.reports.reason_text import sentence
from thinwire.store import Store, journal
from thinwire.store.journal import to_json
from thinwire.store.tables import Journal, Segment

KEPT, EVENTS = 5, 43


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with patch.object(journal, "SEGMENT_EVENTS", KEPT):
        yield


def new_run(store: Store) -> str:
    return store.create_run("toy", PLAN, LAYOUT, TaskReport("toy", layout_digest=LAYOUT.digest))


def rows(store: Store, table: Table) -> int:
    with store._database.reading() as connection:
        return int(connection.scalar(select(func.count()).select_from(table)) or 0)


def test_events_are_the_same_from_any_number_on(store: Store) -> None:
    run_id, other = new_run(store), new_run(store)
    said = [RunNoted(float(at), noted(f"é {at} \"{{'")) for at in range(EVENTS)]
    for at, event in enumerate(said):
        store.record(run_id, [event])
        store.record(other, [event])
        if at % 9 == 0:
            store.record_device(DeviceOnline(float(at), "pi-01"))
    assert rows(store, Segment) == 2 * ((EVENTS - 1) // KEPT - 1)
    assert rows(store, Journal) <= 4 * KEPT + 5
    whole = store.events(run_id)
    assert [to_json(event) for _, event in whole] == json.loads(json.dumps([to_json(event) for event in said]))
    assert [seq for seq, _ in whole] == sorted({seq for seq, _ in whole})
    for at, (seq, _) in enumerate(whole):
        assert store.events(run_id, after=seq) == whole[at + 1 :]
        assert store.events(run_id, after=seq, limit=7) == whole[at + 1 : at + 8]
        assert store.events(run_id, after=seq, limit=1) == whole[at + 1 : at + 2]
    assert list(store.stream(run_id)) == whole
    assert list(store.stream(run_id, whole[20][0])) == whole[21:]
    assert store.last_seq(run_id) == whole[-1][0]
    assert len(store.events(None)) == 5, "events of devices stay rows"


def test_numbers_rise_after_the_events_before_are_compressed(store: Store, address: str) -> None:
    run_id = new_run(store)
    store.record(run_id, [RunNoted(1.0, noted(str(at))) for at in range(EVENTS)])
    with Store.open(address) as again:  # another process, which has to count the rows
        again.record(run_id, [RunNoted(2.0, noted("later"))])
        assert rows(again, Journal) <= 2 * KEPT
        found = again.events(run_id)
    assert [sentence(event.note) for _, event in found if isinstance(event, RunNoted)] == [
        *map(str, range(EVENTS)),
        "later",
    ]
    assert found[-1][0] > found[-2][0]


def test_the_round_that_became_current_is_found_in_a_segment(store: Store) -> None:
    run_id = new_run(store)
    assert store.current_round(run_id) is None
    store.record(run_id, [RoundBecameCurrent(1.0, 1, 1.0), RunNoted(1.0, noted("")), RoundBecameCurrent(2.0, 2, 2.0)])
    for at in range(EVENTS):
        store.record(run_id, [RunNoted(3.0, noted(str(at)))])
    assert store.current_round(run_id) == RoundBecameCurrent(2.0, 2, 2.0)


def test_an_append_that_fails_compresses_nothing(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [RunNoted(1.0, noted(str(at))) for at in range(EVENTS)])
    whole = store.events(run_id)
    with patch("thinwire.store.journal.Projection", side_effect=RuntimeError), pytest.raises(RuntimeError):
        store.record(run_id, [RunNoted(2.0, noted("lost"))])
    assert (rows(store, Segment), store.events(run_id)) == (0, whole)
    store.record(run_id, [RunNoted(2.0, noted("later"))])
    assert store.events(run_id)[:-1] == whole
