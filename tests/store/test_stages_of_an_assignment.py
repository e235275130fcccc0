"""Stages of an assignment on the aggregator's clock: they follow each other without a gap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thinwire.store import UpdateRow
from thinwire.store.round_timing import Stretch, assignment_stages, stretches

ROW = UpdateRow(
    run_id="r-1", round=1, device="a", assignment_id="r-1.1.a", update_id="r-1/a/1", outcome="aggregated", reason="",
    aggregated_round=1, staleness=0, assigned_at=100.0, pulled_at=None, began_at=None, arrived_at=None, download_s=None,
    queue_s=None, evaluate_s=None, train_s=None, encode_s=None, load_s=None, commit_s=None,
    examples=1, steps=1, norm=1.0, residual_norm=None,
    payload_up=1, payload_down=1, wire_up=None, wire_down=None, requests=1, metrics={},
)  # fmt: skip
AWAY = [[105.0, 112.0], [130.0, 141.0]]
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
    found = stretches(row, AWAY)
    assert all(s.begin_s < s.end_s for s in found)
    assert all(a.end_s == b.begin_s for a, b in pairwise(found))
    assert all(took >= 0.0 for took in assignment_stages(row, AWAY).values())
    assert sum(assignment_stages(row, AWAY).values()) == pytest.approx(max(0.0, arrived_at - 100.0), abs=1e-6)


def drawn(found: list[Stretch]) -> list[tuple[str, float, float]]:
    return [(one.stage, one.begin_s - 100.0, one.end_s - 100.0) for one in found]


def test_who_worked_while_no_aggregator_was_there_is_not_away_meanwhile():
    row = replace(ROW, train_s=20.0, began_at=165.0, arrived_at=166.0)
    assert drawn(stretches(row)) == [("train", 0.0, 20.0), ("unaccounted", 20.0, 65.0), ("upload", 65.0, 66.0)]
    assert drawn(stretches(row, [[105.0, 160.0]])) == [
        ("train", 0.0, 20.0), ("downtime", 20.0, 60.0), ("unaccounted", 60.0, 65.0), ("upload", 65.0, 66.0),
    ]  # fmt: skip


def test_an_assignment_whose_delivery_is_not_recorded_has_no_such_stage():
    row = replace(ROW, train_s=20.0, began_at=165.0, arrived_at=166.0)
    assert "delivery" not in assignment_stages(row), "when it was delivered is not known, and no remainder gives it"
    assert assignment_stages(row)["unaccounted"] == 45.0


def test_an_assignment_is_delivered_around_a_downtime():
    row = replace(ROW, pulled_at=110.0, train_s=5.0, began_at=115.0, arrived_at=116.0)
    assert assignment_stages(row, [[102.0, 108.0]]) == {"delivery": 4.0, "train": 5.0, "upload": 1.0, "downtime": 6.0}


def test_who_got_its_assignment_again_is_drawn_at_work_from_then_on():
    row = replace(
        ROW, delivered_at=100.5, pulled_at=117.5, download_s=0.5, load_s=7.0, train_s=10.0, began_at=135.0,
        arrived_at=136.0,
    )  # fmt: skip
    assert drawn(stretches(row)) == [
        ("delivery", 0.0, 0.5), ("redelivery", 0.5, 17.5), ("download", 17.5, 18.0), ("load", 18.0, 25.0),
        ("train", 25.0, 35.0), ("upload", 35.0, 36.0),
    ]  # fmt: skip


def test_an_assignment_without_an_answer_has_no_stretches():
    assert stretches(ROW) == []


def test_a_device_without_a_stopwatch_still_shows_its_upload():
    row = replace(ROW, pulled_at=101.0, began_at=103.0, arrived_at=104.0)
    assert drawn(stretches(row)) == [("delivery", 0.0, 1.0), ("work", 1.0, 3.0), ("upload", 3.0, 4.0)]
