"""Why a round took as long as it did: stages that add up, and sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reasons import noted
from thinwire.core.events import RoundBecameCurrent
from thinwire.store import RoundRow, UpdateRow
from thinwire.store.explaining import explain_rounds
from thinwire.store.round_explanation import explain_round
from thinwire.store.round_timing import STAGES, UNACCOUNTED, assignment_stages, turns

ROUND = RoundRow(
    run_id="ecg-1", round=12, opened_at=100.0, closed_at=141.0, reason="all", base_version=11, version=12,
    deadline_s=60.0, codec="fp16", target_updates=2, min_updates=1, considered=2, selected=["pi-2",
        "pi-3"], not_selected={},
    aggregated=["ecg-1/pi-2/12", "ecg-1/pi-3/12"], aggregated_count=2, late=0, dropped=0, failed=0, seconds=41.0,
    payload_up=0,
    payload_down=0, wire_up=None, wire_down=None, metrics={}, spread={}, train_metrics={},
    spent={"wait_s": 0.5, "train_s": 3.0, "upload_s": 36.4, "aggregate_s": 0.1, "step_s": 0.0, "store_s": 0.2},
    slowest="pi-3",
)  # fmt: skip
ASK = UpdateRow(
    run_id="ecg-1", round=12, device="pi-3", assignment_id="ecg-1.12.pi-3", update_id="ecg-1/pi-3/12",
    outcome="aggregated",
    reason="", aggregated_round=12, staleness=0, assigned_at=100.0, pulled_at=100.5, began_at=104.3, arrived_at=140.7,
    download_s=0.2, queue_s=0.0, evaluate_s=0.1, train_s=3.0, encode_s=0.1, load_s=0.0, commit_s=0.0,
    examples=64, steps=50, norm=1.0,
    residual_norm=None, payload_up=9_100_000, payload_down=9_200_000, wire_up=None, wire_down=None, requests=2,
    metrics={},
)  # fmt: skip
QUICK = replace(ASK, device="pi-2", pulled_at=100.1, began_at=103.6, arrived_at=104.0)


def test_the_slowest_upload_is_told_with_its_bytes_and_its_speed():
    found = explain_round(ROUND, [QUICK, ASK])
    assert found.sentence == ("Round 12 took 41 s: waited 41 s for pi-3, which uploaded 9.1 MB at 2 Mb/s in 36 s.")
    assert found.stages["unaccounted"] == pytest.approx(0.4), "no remainder is called a stage"
    assert "waiting" not in found.stages
    assert found.waited_for == ()
    assert found.requests == 2


def test_a_deadline_says_whom_it_cut_off():
    closed = replace(
        ROUND, reason="deadline", deadline_s=25.0, seconds=25.0, closed_at=125.0, slowest="pi-2", unanswered=1
    )
    late = replace(ASK, outcome="aggregated-late")
    found = explain_round(closed, [QUICK, late])
    assert found.waited_for == ("pi-3",)
    assert found.sentence == (
        "Round 12 took 25 s: 1 of 2 had not replied when its deadline of 25 s passed; pi-3 took 41 s and uploaded "
        "9.1 MB at 2 Mb/s in 36 s."
    )


@pytest.mark.parametrize(
    ("pulled_at", "said"),
    [(100.5, "pi-3 got the assignment and has not replied yet."), (None, "pi-3 got no assignment that is known of.")],
)
def test_who_has_not_answered_is_told_by_what_was_seen_of_it(pulled_at, said):
    closed = replace(ROUND, reason="deadline", deadline_s=25.0, seconds=25.0, closed_at=125.0, slowest="pi-2")
    silent = replace(ASK, outcome="selected", pulled_at=pulled_at, began_at=None, arrived_at=None)
    assert explain_round(closed, [QUICK, silent]).sentence.endswith(said)


@pytest.mark.parametrize(
    ("outcome", "said"), [("over", "did not reply before the run's end."), ("failed", "did not reply.")]
)
def test_who_will_not_answer_any_more_is_not_said_to_be_waited_for_yet(outcome, said):
    closed = replace(ROUND, reason="deadline", deadline_s=25.0, seconds=25.0, closed_at=125.0, slowest="pi-2")
    gone = replace(ASK, outcome=outcome, pulled_at=100.5, began_at=None, arrived_at=None, failed_at=190.0)
    assert explain_round(closed, [QUICK, gone]).sentence.endswith(f"; pi-3 got the assignment and {said}")


def test_a_slow_aggregator_says_so():
    spent = {"wait_s": 0.1, "train_s": 1.0, "upload_s": 0.1, "aggregate_s": 0.2, "store_s": 2.6}
    assert explain_round(replace(ROUND, seconds=4.0, spent=spent)).sentence == (
        "Round 12 took 4.0 s: waited 1.2 s for pi-3, which trained for 1.0 s; the aggregator took 2.8 s (store 2.6 s)."
    )


def test_a_round_to_which_nothing_came_says_so():
    empty = replace(ROUND, reason="too-few", aggregated=[], slowest="", spent={})
    assert explain_round(empty).sentence == "Round 12 took 41 s: no update came to wait for."


def test_of_a_run_the_most_of_its_time_and_the_slowest_client_are_told():
    found = explain_rounds([explain_round(ROUND, [QUICK, ASK]), explain_round(replace(ROUND, round=13), [QUICK, ASK])])
    assert found.sentence == "2 rounds took 82 s, 89 % of it in the stage upload; pi-3 was the slowest in 2 of 2."
    assert found.stages["upload"] == pytest.approx(2 * 36.4)


def test_who_was_selected_in_the_middle_of_a_round_is_told_with_when_and_in_whose_place():
    replacement = replace(
        ASK,
        assigned_at=104.0,
        pulled_at=104.5,
        began_at=108.3,
        selection_reason=noted("1 of 2 could still come"),
        instead_of="pi-9",
    )
    found = explain_round(ROUND, [QUICK, replacement])
    assert found.stages["selection"] == 4.0
    assert sum(found.stages.values()) == pytest.approx(41.0, abs=0.01)
    assert found.sentence.endswith("which uploaded 9.1 MB at 2.25 Mb/s in 32 s (selected after 4.0 s instead of pi-9).")


BACK = replace(ASK, delivered_at=100.5, pulled_at=117.5, train_s=18.0, steps=1000, began_at=136.0, arrived_at=136.2)


def test_who_was_gone_and_got_its_assignment_again_is_told_with_when():
    found = explain_round(replace(ROUND, closed_at=136.3, seconds=36.5), [QUICK, BACK])
    assert found.stages["delivery"] == pytest.approx(0.5)
    assert found.stages["redelivery"] == pytest.approx(17.0)
    assert sum(found.stages.values()) == pytest.approx(36.5, abs=0.01)
    assert found.sentence.endswith(
        "waited 36 s for pi-3, which trained 1000 steps in 18 s (it got the assignment again after 17 s: what it had "
        "begun was lost)."
    )


def test_who_got_its_assignment_again_after_longer_than_all_else_is_told_so_once():
    back = replace(BACK, pulled_at=130.5, train_s=5.0)
    assert explain_round(replace(ROUND, closed_at=136.3, seconds=36.5), [QUICK, back]).sentence.endswith(
        "waited 36 s for pi-3, which got the assignment again after 30 s: what it had begun was lost."
    )


def test_an_assignment_that_was_handed_out_twice_in_a_moment_was_delivered_once():
    assert assignment_stages(replace(ASK, delivered_at=100.1)) == assignment_stages(ASK)


def test_without_an_aggregator_nobody_gets_an_assignment_again():
    stages = assignment_stages(BACK, [[105.0, 110.0]])
    assert (stages["redelivery"], stages["downtime"]) == pytest.approx((12.0, 5.0))


BUFFER = replace(
    ROUND, reason="buffer", selected=["pi-2"], aggregated=["ecg-1/pi-2/12", "ecg-1/pi-3/11"], seconds=5.0,
    closed_at=105.0,
    spent={"aggregate_s": 0.1}, slowest="pi-2",
)  # fmt: skip
EARLIER = replace(
    ASK, round=10, update_id="ecg-1/pi-3/11", outcome="aggregated-late", aggregated_round=12, staleness=2,
    assigned_at=60.0,
    pulled_at=60.5, began_at=101.5, arrived_at=104.5, train_s=40.0,
)  # fmt: skip
OWN = replace(QUICK, update_id="ecg-1/pi-2/12")


def test_a_buffer_says_what_of_it_was_requested_before_and_what_filled_it():
    found = explain_round(BUFFER, [OWN], earlier=[EARLIER])
    assert found.sentence == (
        "Round 12 took 5.0 s: its buffer was full with 2 updates, 1 of them assigned before it opened (pi-3's 2 "
        "versions behind); the last came from pi-3, which then uploaded 9.1 MB at 24.3 Mb/s in 3.0 s."
    )
    assert (found.device, found.waited_for) == ("pi-3", ())
    assert found.stages["train"] == pytest.approx(0.8), "what it had done before the buffer opened is not of this one"
    assert found.stages["unaccounted"] == pytest.approx(0.6 + 0.4), "before its upload, and after it"
    assert sum(found.stages.values()) == pytest.approx(5.0)


def test_a_buffer_of_whose_assignments_nothing_is_known_claims_nothing():
    assert explain_round(BUFFER).sentence == "Round 12 took 5.0 s: its buffer was full with 2 updates."
    only = replace(BUFFER, aggregated=["ecg-1/pi-3/11"], slowest="")
    found = explain_round(only, earlier=[EARLIER])
    assert "full with 1 update, all assigned before it opened (pi-3's" in found.sentence


def cut(
    assignment: UpdateRow = ASK, down_since: float = 101.0, back_at: float = 161.0, **more: object
) -> tuple[RoundRow, UpdateRow]:
    """The round and its slowest assignment, with an aggregator that was away for so long while the device had the
    assignment.
    """
    lost_s = back_at - 101.0
    moved: dict[str, Any] = {name: getattr(assignment, name) + lost_s for name in ("began_at", "arrived_at")}
    closed: dict[str, Any] = {"closed_at": 141.0 + lost_s, "seconds": 41.0 + lost_s, "downtimes": [[101.0, back_at]]}
    return replace(ROUND, **closed), replace(assignment, **{**moved, **more})


def test_an_aggregator_that_was_away_for_most_of_a_round_is_blamed_and_no_device():
    found, assignment = cut(back_at=221.0)
    said = explain_round(found, [QUICK, assignment])
    assert said.sentence == (
        "Round 12 took 2 min 41 s: the aggregator was offline for 2 min; waited 44 s for pi-3, which uploaded "
        "9.1 MB at 2 Mb/s in 36 s."
    )
    assert said.stages["downtime"] == pytest.approx(221.0 - 100.5 - 3.4), "the device worked when the downtime began"
    assert sum(said.stages.values()) == pytest.approx(161.0)
    assert explain_round(found).sentence.startswith(
        "Round 12 took 2 min 41 s: the aggregator was offline for 2 min; waited"
    )


def test_an_aggregator_that_was_away_while_a_device_worked_is_told_and_not_blamed():
    found, assignment = cut(replace(ASK, train_s=63.0, pulled_at=None), began_at=166.0, arrived_at=202.4)
    found = replace(found, closed_at=202.5, seconds=102.7)
    said = explain_round(found, [QUICK, assignment])
    assert said.sentence == (
        "Round 12 took 1 min 43 s: waited 1 min 42 s for pi-3, which trained 50 steps in 63 s; the aggregator was "
        "offline for 60 s meanwhile."
    )
    assert "delivery" not in said.stages, "when it was delivered is not known"
    assert sum(said.stages.values()) == pytest.approx(102.7)


def test_an_absence_after_the_last_answer_is_no_devices_either():
    found = replace(ROUND, closed_at=201.0, seconds=101.0, downtimes=[[140.8, 200.8]])
    said = explain_round(found, [QUICK, ASK])
    assert said.sentence.startswith(
        "Round 12 took 1 min 41 s: the aggregator was offline for 60 s; waited 41 s for pi-3"
    )
    assert said.stages["downtime"] == pytest.approx(60.0, abs=0.1)
    assert "waiting" not in said.stages
    assert sum(said.stages.values()) == pytest.approx(101.0)


def test_an_absence_before_a_device_was_selected_is_not_the_time_until_it_was():
    found = replace(ROUND, closed_at=201.0, seconds=101.0, downtimes=[[102.0, 162.0]])
    replacement = replace(
        ASK, assigned_at=164.0, pulled_at=164.5, began_at=168.3, arrived_at=200.7, selection_reason=noted("one left")
    )
    said = explain_round(found, [QUICK, replacement])
    assert (said.stages["selection"], said.stages["downtime"]) == (4.0, 60.0)
    assert sum(said.stages.values()) == pytest.approx(101.0, abs=0.01)


def test_a_deadline_does_not_count_an_absence_and_neither_does_what_is_said_of_who_missed_it():
    late = replace(ASK, pulled_at=None, began_at=164.3, arrived_at=200.7, outcome="aggregated-late")
    found = replace(
        ROUND, reason="deadline", deadline_s=25.0, seconds=85.0, closed_at=185.0, downtimes=[[101.0, 161.0]]
    )
    assert "; pi-3 took 43 s and uploaded 9.1 MB" in explain_round(found, [QUICK, late]).sentence


def test_a_run_says_how_much_of_it_was_without_an_aggregator():
    found, assignment = cut(back_at=221.0)
    assert explain_rounds([explain_round(found, [QUICK, assignment])]).sentence.startswith(
        "1 round took 2 min 41 s, 73 % of it in the stage downtime;"
    )


maybe = st.none() | st.floats(0, 50)


DURATIONS = ("download_s", "queue_s", "load_s", "evaluate_s", "train_s", "encode_s", "commit_s")
moments = st.floats(60, 180)


@given(
    st.lists(maybe, min_size=len(DURATIONS), max_size=len(DURATIONS)), st.none() | moments, moments, moments, moments,
    st.lists(moments, min_size=4, max_size=4), st.floats(0, 60), st.booleans(),
)  # fmt: skip
def test_the_stages_and_what_is_unaccounted_are_a_rounds_seconds_and_none_is_negative(
    took, pulled_at, began_at, arrived_at, opened_at, ends, seconds, is_stopped
):
    first, until, since, last = sorted(ends)
    assignment = replace(
        ASK, pulled_at=pulled_at, began_at=began_at, arrived_at=arrived_at, **dict(zip(DURATIONS, took, strict=True))
    )
    found = replace(
        ROUND, opened_at=opened_at, closed_at=opened_at + 0.9 * seconds, seconds=seconds, slowest="pi-3",
        reason="stopped" if is_stopped else "all", downtimes=[[first, until], [since, last]],
    )  # fmt: skip
    silent = replace(ASK, device="pi-9", assignment_id="ecg-1.12.pi-9", outcome="selected", arrived_at=None)
    said = explain_round(found, [assignment, silent] if is_stopped else [assignment])
    assert set(said.stages) <= set(STAGES)
    assert sum(said.stages.values()) == pytest.approx(seconds, abs=1e-6)
    assert min(said.stages.values(), default=0.0) >= 0.0
    measured = sum(one or 0.0 for one in took)
    assert sum(said.stages.get(name.removesuffix("_s"), 0.0) for name in DURATIONS) <= measured + 1e-6


def test_a_stage_that_nobody_measured_is_nowhere():
    bare = replace(ASK, **dict[str, Any](dict.fromkeys(DURATIONS)))
    assert set(assignment_stages(bare)) == {"delivery", "work", "upload"}
    assert set(explain_round(replace(ROUND, spent={}), [bare]).stages) == {"delivery", "work", "upload", UNACCOUNTED}


def test_waiting_counts_from_when_the_last_update_was_in_the_sum_until_the_round_closed():
    closed = replace(ROUND, reason="deadline", seconds=61.5, closed_at=160.7, spent={
        "receive_s": 0.5, "aggregate_s": 1.5, "step_s": 0.2, "store_s": 0.3})  # fmt: skip
    silent = replace(ASK, device="pi-9", assignment_id="ecg-1.12.pi-9", outcome="selected", arrived_at=None)
    said = explain_round(closed, [ASK, silent])
    assert said.stages["waiting"] == pytest.approx(160.7 - 140.7 - 2.0)
    assert [said.stages[name] for name in ("receive", "aggregate", "step", "store")] == pytest.approx(
        [0.5, 1.5, 0.2, 0.3]
    )
    assert said.stages["unaccounted"] == pytest.approx(0.4 + 61.5 - 60.7 - 0.5)


def test_a_round_selected_ahead_counts_from_when_its_answers_were_taken_however_long_that_was_after_the_one_before():
    before = replace(ROUND, round=11, opened_at=90.0, closed_at=100.0, seconds=10.0, spent={})
    waited = replace(ROUND, opened_at=95.0, closed_at=164.8, seconds=3.0, spent={"step_s": 0.3, "store_s": 0.2})
    assignment = replace(ASK, assigned_at=95.0, pulled_at=162.5, began_at=164.0, arrived_at=164.5, train_s=1.0)
    turn_at = turns([before, waited])[12]
    assert turn_at == pytest.approx(164.8 + 0.5 - 3.0), "a round is closed before its step is made and stored"
    said = explain_round(waited, [assignment], turn_at=turn_at)
    assert said.sentence.startswith("Round 12 took 3.0 s: waited 2.2 s for pi-3")
    assert sum(said.stages.values()) == pytest.approx(3.0)


def test_a_round_counts_from_its_opening_or_from_when_the_one_before_it_closed():
    before = replace(ROUND, round=11, opened_at=90.0, closed_at=100.0, seconds=10.0, spent={})
    never = replace(ROUND, opened_at=95.0, closed_at=120.0, reason="stopped", seconds=0.0, spent={})
    ahead = replace(ROUND, opened_at=95.0, closed_at=None, reason="", seconds=None, spent={})
    assert turns([before]) == {11: 90.0}
    assert turns([before, never])[12] == 120.0
    assert turns([before, ahead])[12] == 100.0
    assert turns([before, ahead], RoundBecameCurrent(90.0, 11, 1.0))[12] is None, "its turn has not come"
    assert turns([before, ahead], RoundBecameCurrent(160.0, 12, 2.0))[12] == 160.0, "the run waited for devices before"
    assert turns([replace(before, seconds=10.5)])[11] == 90.0, "never before its opening"
    header = replace(before, closed_at=None, reason="", seconds=None)
    assert turns([header, ahead]) == {11: 90.0, 12: None}, "an older journal says nothing of turns, but which are open"
