"""`benchmarks.faults` runs, and prints the document that others read: nothing lost, nothing doubled, the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.__main__ import PRESETS, figures, row_of
from benchmarks.faults.cases import cases
from benchmarks.faults.judged import Judge
from tests.support.benchmark_document import document_of
from tests.support.gated_task import Gated
from tests.support.run_outcome import identical_share
from thinwire.core.events import Event, ModelStored, RoundClosed, RoundOpened, UpdateAccepted, UpdateDropped

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_and_a_strike_costs_what_its_row_says() -> None:
    """What each of the other faults costs is held by tests/system/test_faults.py, with the same machinery."""
    fault = "aggregator killed"
    found = document_of("faults", "--only", fault)
    (row,) = found["rows"]
    assert (row["fault"], row["struck"], row["met"], row["late"]) == (fault, 1, 1, 0)
    assert (row["unanswered"], row["late_answers"]) == (0, 0)
    told = found["figures"]
    assert (told["lost_updates"], told["double_aggregations"], told["identical_share"]) == (0, 0, 1.0)
    assert len(row["recoveries_s"]) == 1
    assert told.get("aggregator_max_recovery_s") == told.get("max_recovery_s") == row["recovery_s"]


def test_a_row_of_which_no_strike_met_its_aim_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "_made", lambda *_: Gated(list(TWO_VERSIONS), struck=2, met=0))
    row = row_of("worker killed", PRESETS["small"], cases()["worker killed"], Judge(tmp_path))
    assert row == {"fault": "worker killed", "failed": "worker killed: none of 2 strikes met its aim"}
    assert figures([row])["failed"] == 1


def test_lies_that_nobody_dropped_have_met_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assigned = RoundOpened(0.0, 1, 0.0, 0, "", ["pi-b"], {"pi-b": "1.b"}, "int8", 600.0, 1, 1)
    monkeypatch.setattr(Judge, "_made", lambda *_: Gated([assigned, *TWO_VERSIONS]))
    row = row_of("answers twice", PRESETS["small"], cases()["answers twice"], Judge(tmp_path))
    assert row["failed"] == "answers twice: none of 1 strikes met its aim"


@pytest.mark.parametrize("name", cases())
def test_each_fault_strikes_as_often_as_its_preset_says_at_moments_of_its_kinds(name: str) -> None:
    case, preset = cases()[name], PRESETS["full"]
    rounds, moments = case.moments(preset.rounds, preset.count(name, case))
    assert len(moments) == preset.count(name, case)
    assert [moment for moment in moments if moment.round >= rounds] == []
    if case.kinds is not None:
        assert {(one.what, one.device) for one in moments} <= {(one.what, one.device) for one in case.kinds}


def test_an_answer_whose_bytes_are_not_what_it_says_is_left_out_of_what_is_compared() -> None:
    wrong = UpdateAccepted(0.5, 1, 1, "c", "1.c", "r/c/1", 0, 1.0, False, 1.0, {})
    dropped = UpdateDropped(0.6, 1, 1, "c", "1.c", "r/c/1", "bad-payload", 1.0, detail="damaged")
    assert identical_share([wrong, dropped, *changed(4, dropped=["r/c/1"])], TWO_VERSIONS) == 1.0


def test_that_somebody_was_lost_is_told_by_what_was_aggregated_and_not_by_the_reason_of_the_close() -> None:
    assert identical_share(changed(4, reason="enough"), TWO_VERSIONS) == 1.0


TWO_VERSIONS: tuple[Event, ...] = (
    ModelStored(0.0, 0, "first", "v0"),
    UpdateAccepted(0.0, 1, 1, "a", "1.a", "r/a/1", 0, 1.0, False, 1.0, {}),
    UpdateAccepted(0.0, 1, 1, "b", "1.b", "r/b/1", 0, 1.0, False, 2.0, {}),
    ModelStored(3.0, 1, "second", "v1", state="momentum"),
    RoundClosed(3.0, 1, "all", 1, ["r/a/1", "r/b/1"], [], [], 3.0, 3.0, {}),
)


def changed(at: int, **fields: Any) -> list[Event]:
    return [replace(event, **fields) if place == at else event for place, event in enumerate(TWO_VERSIONS)]


@pytest.mark.parametrize(
    ("at", "fields"),
    [
        (3, {"digest": "other"}),
        (3, {"state": "other"}),
        (4, {"aggregated": ["r/b/1", "r/a/1"]}),
        (4, {"dropped": ["r/c/1"]}),
        (4, {"reason": "deadline"}),
        (1, {"staleness": 1}),
    ],
)
def test_a_version_is_identical_by_its_bits_and_by_what_was_aggregated_and_given_back(
    at: int, fields: Mapping[str, Any]
) -> None:
    assert identical_share(changed(at, **fields), TWO_VERSIONS) == 0.5


def test_a_round_that_made_no_step_or_a_version_too_many_is_not_identical() -> None:
    empty = RoundClosed(4.0, 2, "too-few", 1, [], [], [], 4.0, 1.0, {})
    assert identical_share([*TWO_VERSIONS, empty], TWO_VERSIONS) == 0.5
    assert identical_share([*TWO_VERSIONS, ModelStored(5.0, 2, "third", "v2")], TWO_VERSIONS) == 2 / 3


def test_a_second_answer_that_was_dropped_changes_nothing_of_what_is_compared() -> None:
    twice = UpdateDropped(2.5, 1, 1, "b", "1.b", "r/b/99", "duplicate", 2.5)
    assert identical_share([twice, *changed(4, dropped=["r/b/99"])], TWO_VERSIONS) == 1.0
