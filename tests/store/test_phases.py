"""The phases of a secure round, and its sum, as the tables have them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.secure_story import BYTES, DEVICES, SecureStory, four_rounds
from tests.support.store_agreement import assert_sums_agree
from tests.support.store_story import closed, new_run, opened
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.run_events import PhaseClosed
from thinwire.core.types import PHASES
from thinwire.store import Store


def test_a_round_has_its_phases_in_order_with_their_seconds_bytes_and_drop_outs(store: Store) -> None:
    run_id = four_rounds(store).run_id
    found = store.phases(run_id, 2)
    assert [row.phase for row in found] == list(PHASES)
    assert [row.seconds for row in found] == pytest.approx([0.4, 0.7, 5.2, 0.2, 0.3])
    assert [len(row.received) for row in found] == [10, 9, 8, 7, 7]
    assert [row.dropped for row in found] == [[], ["pi-03"], ["pi-07"], ["pi-09"], []]
    assert found[1].received_bytes == sum(BYTES["share"] + place for place in range(9))
    assert list(found[2].received) == [device for device in DEVICES if device not in ("pi-03", "pi-07")]


def test_a_sum_has_its_survivors_its_weight_and_its_clips_and_a_round_without_one_has_none(store: Store) -> None:
    run_id = four_rounds(store).run_id
    first, second, third, fourth = store.rounds(run_id)
    assert second.secure_sum == {
        "survivors": 8, "weight": 8, "norm": 0.75, "clip": 2.0, "next_clip": 1.5, "elapsed_s": pytest.approx(6.8),
        "unmask_s": 0.04,
    }  # fmt: skip
    assert first.secure_sum["survivors"] == 10
    assert (third.reason, third.secure_sum, fourth.secure_sum) == ("too-few", {}, {})
    assert [row.phase for row in store.phases(run_id, 3)] == ["advertise", "share"]
    assert [row.phase for row in store.phases(run_id, 4)] == ["advertise", "share"]
    assert_sums_agree(store, run_id)


def test_the_phases_of_all_rounds_begin_anew_in_each(store: Store) -> None:
    run_id = four_rounds(store).run_id
    found = store.phases(run_id)
    assert [row.round for row in found] == [1] * 5 + [2] * 5 + [3] * 2 + [4] * 2
    assert [row.seconds for row in found if row.phase == "advertise"] == pytest.approx([0.4] * 4)


def test_the_journal_makes_the_same_rows_again_event_by_event_and_twice(store: Store) -> None:
    story = four_rounds(store)
    row = store.run(story.run_id)
    plan = RunPlan.from_json(row.plan)
    copy = store.create_run(row.task, plan, Layout.from_json(row.layout), row.task_report)
    for _, event in store.events(story.run_id):
        store.record(copy, [event])
        if isinstance(event, PhaseClosed):
            store.record(copy, [event])  # as after a restart
    assert store.phases(copy) == store.phases(story.run_id)
    for ours, theirs in zip(store.rounds(copy), store.rounds(story.run_id), strict=True):
        assert dataclasses.replace(ours, run_id="") == dataclasses.replace(theirs, run_id="")


def test_a_sum_and_its_round_in_one_commit_are_both_there(store: Store) -> None:
    story = SecureStory(store)
    story.store.record(story.run_id, [event for batch in story._round({}, "unmask", "all", 6) for event in batch])
    assert store.rounds(story.run_id)[0].secure_sum["survivors"] == 10
    assert len(store.phases(story.run_id)) == 5


def test_a_round_in_the_clear_has_no_phases(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), closed(1, [])])
    assert (store.phases(run_id), store.rounds(run_id)[0].secure_sum) == ([], {})
