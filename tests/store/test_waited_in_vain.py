"""Whom a round waited for that brought it nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.test_round_explanation import ASK, QUICK, ROUND
from thinwire.store.explaining import explain_rounds
from thinwire.store.round_explanation import explain_round

FAILED = replace(
    ASK, outcome="failed", reason="offline: no request for 30 s", aggregated_round=None, failed_at=138.0,
    pulled_at=100.5,
    began_at=None, arrived_at=None, download_s=None, train_s=None, encode_s=None, requests=0,
)  # fmt: skip
ENOUGH = replace(
    ROUND, reason="enough", aggregated=["ecg-1/pi-2/12"], aggregated_count=1, failed=1, seconds=38.5, closed_at=138.2,
    slowest="pi-2", spent={"aggregate_s": 0.1, "store_s": 0.2},
)  # fmt: skip


def test_who_was_lost_is_named_with_the_wait_for_it_where_that_is_the_most():
    found = explain_round(ENOUGH, [QUICK, FAILED])
    assert found.sentence == "Round 12 took 38 s: waited 34 s for pi-3, which was lost."
    assert (found.waited_for, found.device) == (("pi-3",), "pi-2")
    assert found.stages["waiting"] == pytest.approx(138.2 - 104.0 - 0.1), "from the last update in the sum on"
    assert "; pi-3 had not replied in time in 1." in explain_rounds([found]).sentence


def test_who_was_lost_soon_after_the_last_answer_is_not_blamed_for_the_round():
    soon = explain_round(replace(ENOUGH, seconds=5.5, closed_at=105.2), [QUICK, replace(FAILED, failed_at=105.0)])
    assert soon.sentence.startswith("Round 12 took 5.5 s: waited 4.0 s for pi-2, which")
    assert soon.waited_for == ("pi-3",)


def test_who_failed_before_the_last_answer_held_nobody_up():
    early = explain_round(ROUND, [ASK, replace(FAILED, device="pi-2", failed_at=103.0)])
    assert early.waited_for == ()
    assert "for pi-3, which uploaded" in early.sentence


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"reason": "task-error: ValueError in task.py:3"}, "pi-3, which failed (task-error)"),
        ({"outcome": "dropped", "reason": "bad-payload", "failed_at": None, "arrived_at": 138.0},
         "pi-3, whose reply was dropped (bad-payload)"),
        ({"outcome": "selected", "reason": "", "failed_at": None}, "pi-3, which had not replied"),
        ({"outcome": "selected", "reason": "", "failed_at": 190.0}, "pi-3, which had not replied"),
        ({"outcome": "aggregated-late", "reason": "", "arrived_at": 190.0}, "pi-3, which was lost"),
    ],
)  # fmt: skip
def test_what_became_of_who_was_waited_for_is_said(changed, said):
    found = explain_round(replace(ENOUGH, reason="stopped"), [QUICK, replace(FAILED, **changed)])
    assert found.sentence == f"Round 12 took 38 s: waited 34 s for {said}."


def test_the_last_of_several_that_were_lost_is_named():
    other = replace(FAILED, device="pi-1", failed_at=120.0)
    assert "for pi-3, which was lost, and 1 more." in explain_round(ENOUGH, [other, QUICK, FAILED]).sentence


def test_a_round_to_which_nobody_came_names_who_was_lost():
    nobody = replace(ENOUGH, reason="too-few", aggregated=[], slowest="", spent={"aggregate_s": 0.0})
    assert explain_round(nobody, [FAILED]).sentence == "Round 12 took 38 s: waited 38 s for pi-3, which was lost."


def test_of_an_older_store_that_does_not_know_when_an_assignment_failed_nobody_is_blamed():
    found = explain_round(ENOUGH, [QUICK, replace(FAILED, failed_at=None)])
    assert found.waited_for == ()
    assert "for pi-2, which" in found.sentence


def test_a_deadline_counts_who_was_out_when_it_passed_and_not_who_was_lost_before():
    closed = replace(ENOUGH, reason="deadline", selected=["pi-1", "pi-2", "pi-3"], deadline_s=38.0, unanswered=1)
    silent = replace(FAILED, device="pi-1", outcome="selected", reason="", failed_at=None)
    found = explain_round(closed, [silent, QUICK, replace(FAILED, failed_at=120.0)])
    assert found.waited_for == ("pi-1",)
    assert "1 of 3 had not replied when its deadline of 38 s passed; pi-1 got the assignment" in found.sentence


def test_what_a_device_does_for_the_next_buffer_held_nothing_up():
    on = replace(FAILED, assignment_id="ecg-1.12+.pi-2", device="pi-2", outcome="selected", reason="", failed_at=None)
    found = explain_round(ENOUGH, [QUICK, on])
    assert found.waited_for == ()
    assert explain_round(ENOUGH, [QUICK, replace(on, assignment_id="ecg-1.12.pi-4", device="pi-4")]).waited_for == (
        "pi-4",
    )


def test_a_buffer_is_told_along_what_its_slowest_was_requested_it_and_not_for_the_next():
    on = replace(FAILED, assignment_id="ecg-1.12+.pi-2", device="pi-2", outcome="selected", reason="", failed_at=None)
    assert explain_round(ENOUGH, [on, QUICK]) == explain_round(ENOUGH, [QUICK, on]) == explain_round(ENOUGH, [QUICK])
