"""Stretches of time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from thinwire.store import UpdateRow
from thinwire.web.run_text import stretches

ROW = UpdateRow(
    run_id="r-1", round=1, device="a", assignment_id="r-1.1.a", update_id="r-1/a/1", outcome="aggregated", reason="",
    aggregated_round=1, staleness=0, assigned_at=100.0, pulled_at=None, began_at=None, arrived_at=None, download_s=None,
    queue_s=None, evaluate_s=None, train_s=None, encode_s=None, load_s=None, commit_s=None,
    examples=1, steps=1, norm=1.0, residual_norm=None,
    payload_up=1, payload_down=1, wire_up=None, wire_down=None, requests=1, metrics={},
)  # fmt: skip
maybe = st.none() | st.floats(0, 50)


@given(
    st.lists(maybe, min_size=5, max_size=5),
    st.none() | st.floats(90, 160),
    st.none() | st.floats(90, 160),
    st.floats(90, 160),
    st.none() | st.floats(90, 160),
)
@example([None, None, None, None, 8.8e-71], 90.0, None, 101.0, None)
def test_stretches_follow_each_other_whatever_the_clocks_say(took, pulled_at, began_at, arrived_at, delivered_at):
    names = ("download_s", "queue_s", "evaluate_s", "train_s", "encode_s")
    row = replace(
        ROW, pulled_at=pulled_at, delivered_at=delivered_at, began_at=began_at, arrived_at=arrived_at,
        **dict(zip(names, took, strict=True)),
    )  # fmt: skip
    found = stretches(row, 100.0)
    assert all(s.begin_s < s.end_s for s in found)
    assert all(a.end_s <= b.begin_s for a, b in pairwise(found))


def test_who_worked_while_no_aggregator_was_there_did_not_wait_with_the_assignment():
    row = replace(ROW, train_s=20.0, began_at=165.0, arrived_at=166.0)
    assert stretches(row, 100.0)[0].stage == "delivery", "as far as is known it got the assignment so late"
    found = stretches(row, 100.0, [[105.0, 160.0]])
    assert [(s.stage, s.begin_s, s.end_s) for s in found] == [("train", 0.0, 20.0), ("upload", 65.0, 66.0)]
    late = stretches(replace(row, began_at=185.0, arrived_at=186.0), 100.0, [[105.0, 160.0]])
    assert [(s.stage, s.begin_s, s.end_s) for s in late][1] == ("between", 75.0, 85.0), "the rest was no aggregator's"


def test_what_was_between_stages_is_not_drawn_where_no_aggregator_was_there():
    row = replace(ROW, train_s=18.0, pulled_at=100.0, began_at=152.0, arrived_at=152.0)
    found = stretches(row, 100.0, [[135.0, 154.0]])
    assert [(s.stage, s.begin_s, s.end_s) for s in found] == [("train", 0.0, 18.0), ("between", 18.0, 35.0)]


def test_who_got_its_assignment_again_is_drawn_at_work_from_then_on_and_starts_the_worker_before_it_trains():
    row = replace(
        ROW, delivered_at=100.5, pulled_at=117.5, download_s=0.5, train_s=10.0, began_at=135.0, arrived_at=136.0
    )
    assert [(s.stage, s.begin_s, s.end_s) for s in stretches(row, 100.0)] == [
        ("delivery", 0.0, 0.5), ("again", 0.5, 17.5), ("download", 17.5, 18.0), ("between", 18.0, 25.0),
        ("train", 25.0, 35.0), ("upload", 35.0, 36.0),
    ]  # fmt: skip


def test_an_assignment_without_an_answer_has_no_stretches():
    assert stretches(ROW, 100.0) == []


def test_a_device_without_a_stopwatch_still_shows_its_upload():
    row = replace(ROW, pulled_at=101.0, began_at=103.0, arrived_at=104.0)
    shown = [("delivery", 0.0, 1.0), ("between", 1.0, 3.0), ("upload", 3.0, 4.0)]
    assert [(s.stage, s.begin_s, s.end_s) for s in stretches(row, 100.0)] == shown
