"""`benchmarks.secure_round` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.secure_round import PRESETS, figures, plan_of, rounds_of
from tests.support.benchmark_document import document_of
from thinwire.core.events import Event, RoundClosed
from thinwire.core.run_events import PhaseClosed, SumUnmasked
from thinwire.core.types import PHASES

ROOT = Path(__file__).parents[2]
TIMES = {"plain_s", "secure_s", "advertise_s", "share_s", "masked_s", "agree_s", "unmask_s", "sum_s"}
FIGURES = {
    "round_slowdown", "share_margin_s", "plain_spread_s", "secure_spread_s", "cpu_s_plain", "cpu_s_secure",
    "requests_plain", "requests_secure", *TIMES,
}  # fmt: skip


def test_it_runs_and_the_document_has_its_shape() -> None:
    found = document_of("secure_round")
    assert found["figures"].keys() == FIGURES
    assert [(row["secure"], row["round"]) for row in found["rows"]] == [(False, 2), (True, 2)]
    for row in found["rows"]:
        assert row["seconds"] >= PRESETS["tiny"].wait_s, "no round ends before its clients' wait"
        assert row["routes"]["push"] >= (4 if row["secure"] else 1), "of each phase before the last, or of an update"
        assert row["requests"] == pytest.approx(sum(row["routes"].values()))
    assert found["figures"]["masked_s"] > 0, "no vector leaves before the wait ended"


def journal() -> list[Event]:
    """Two rounds: 6 s and 7 s, whose phases close after 1, 2, 6, 6.25 and 6.5 s."""
    found = list[Event]()
    closes = dict(zip(PHASES, (1.0, 2.0, 6.0, 6.25, 6.5), strict=True))
    for number, ends in ((1, 6.0), (2, 13.0)):
        found += [PhaseClosed(0.0, number, phase, at, {}) for phase, at in closes.items()]
        found.append(SumUnmasked(0.0, number, 3, 3, 1.0, 1.0, 1.0, 6.75, 0.1))
        found.append(RoundClosed(100.0 * number, number, "all", number, ["u"], [], [], ends, 6.0, {}))
    return found


def test_the_seconds_of_a_round_are_from_close_to_close_and_the_first_round_does_not_count() -> None:
    (row,) = rounds_of(journal(), wait_s=5.0)
    assert (row["round"], row["seconds"]) == (2, 7.0)
    assert (row["share_s"], row["share_margin_s"], row["sum_s"]) == (2.0, 3.0, 0.25)
    assert (row["from"], row["to"]) == (100.0, 200.0)


def test_the_figures_compare_medians_and_leave_the_wait_out_of_the_phase_that_has_it() -> None:
    (row,) = rounds_of(journal(), wait_s=5.0)
    secure = {**row, "secure": True, "requests": 9.0, "cpu_s": 2.0}
    plain = {"secure": False, "seconds": 3.5, "requests": 3.0, "cpu_s": 1.0}
    found = figures([plain, {**plain, "seconds": 3.0}, {**plain, "seconds": 9.0}, secure], wait_s=5.0)
    assert (found["round_slowdown"], found["plain_spread_s"]) == (2.0, 6.0)
    assert [found[f"{phase}_s"] for phase in PHASES] == [1.0, 1.0, 1.0, 0.25, 0.25]
    assert (found["requests_secure"], found["share_margin_s"]) == (9.0, 3.0)


def test_both_plans_are_the_same_but_for_secure_aggregation() -> None:
    plain, secure = (plan_of(PRESETS["full"], one).to_json() for one in (False, True))
    assert {name for name in plain if plain[name] != secure[name]} == {"secure"}
    full = PRESETS["full"]
    assert (full.clients, full.params, full.wait_s, full.rounds) == (8, 1_000_000, 5.0, 10)
