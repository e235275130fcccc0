"""Requests and round trips where there is a wire, and the clock of a simulation where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.store.test_round_explanation import ASK, QUICK, ROUND
from thinwire.store.explaining import explain_rounds
from thinwire.store.round_explanation import explain_round
from thinwire.store.round_timing import STAGES

CHATTY = replace(ASK, download_s=0.1, evaluate_s=0.1, train_s=0.2, encode_s=0.0, pulled_at=100.1, began_at=130.0,
                 arrived_at=130.1, requests=40)  # fmt: skip
SIM = replace(
    ROUND, seconds=0.1, closed_at=100.1, slowest="pi-3",
    spent={"wait_s": 0.0, "train_s": 0.03, "upload_s": 0.0, "aggregate_s": 0.02, "step_s": 0.0, "store_s": 0.2},
)  # fmt: skip
IN_PROCESS = replace(
    ASK, pulled_at=100.0, began_at=100.1, arrived_at=100.1, download_s=0.0, evaluate_s=0.0, train_s=0.03, encode_s=0.0,
    requests=0,
)  # fmt: skip


def test_requests_are_told_with_the_round_trip_that_was_measured():
    found = explain_round(ROUND, [QUICK, CHATTY], rtts={"pi-3": 0.48, "pi-2": 9.0})
    assert "which spent 30 s in no measured stage (40 requests x 480 ms = 19 s)" in found.sentence
    assert (found.requests, found.rtt_s) == (40, 0.48)
    assert found.trips_s == pytest.approx(19.2), "and no stage: the 30 s are more than that"
    assert set(found.stages) <= set(STAGES)
    unmeasured = explain_round(ROUND, [QUICK, CHATTY])
    assert "which spent 30 s in no measured stage (40 requests)." in unmeasured.sentence
    assert unmeasured.trips_s is None


def test_of_what_round_trips_do_not_explain_it_is_said_what_else_a_device_does():
    found = explain_round(ROUND, [QUICK, CHATTY], rtts={"pi-3": 0.002})
    assert (
        "which spent 30 s in no measured stage (40 requests x 2 ms = 80 ms): it was offline or busy"
    ) in found.sentence


def test_of_a_run_the_requests_are_summed_and_the_round_trips_weighed_by_them():
    one, other = (
        explain_round(ROUND, [CHATTY], rtts={"pi-3": 0.4}),
        explain_round(ROUND, [replace(CHATTY, requests=10)]),
    )
    found = explain_rounds([one, other])
    assert found.requests == 50
    assert found.rtt_s == pytest.approx(0.4)
    assert found.trips_s == pytest.approx(20.0)
    assert "of it in the stage unaccounted" in explain_rounds([one]).sentence


def test_a_simulation_has_no_requests_and_its_clock_does_not_count_the_aggregator():
    found = explain_round(SIM, [IN_PROCESS], simulated=True, rtts={"pi-3": 0.4})
    assert found.sentence == (
        "Round 12 took 100 ms: waited 100 ms for pi-3, which spent 70 ms in no measured stage; the aggregator took "
        "220 ms (store 200 ms), which a simulation's clock does not count."
    )
    assert (found.requests, found.rtt_s) == (0, None)
    assert found.uncounted == {"aggregate": 0.02, "step": 0.0, "store": 0.2}
    assert sum(found.stages.values()) == pytest.approx(0.1)


def test_of_a_simulation_no_share_is_of_what_its_clock_did_not_count():
    found = explain_rounds([explain_round(SIM, [IN_PROCESS], simulated=True)] * 2)
    assert found.sentence == (
        "2 rounds took 200 ms, 70 % of it in the stage unaccounted; pi-3 was the slowest in 2 of 2; the "
        "aggregator took 440 ms (store 400 ms), which a simulation's clock does not count."
    )
    assert sum(found.stages.values()) == pytest.approx(found.seconds)
