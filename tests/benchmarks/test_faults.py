"""`benchmarks.faults` runs, and prints the document that others read: nothing lost, nothing doubled, the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.system.outcome import identical_share
from thinwire.core.events import Event, ModelStored, RoundClosed, UpdateAccepted, UpdateDropped

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_and_the_document_has_its_shape() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--preset", "tiny", "--only", "aggregator killed", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["preset"]) == ("faults", "tiny")
    assert [(row["fault"], row["struck"]) for row in found["rows"]] == [("aggregator killed", 1)]
    figures = found["figures"]
    assert (figures["lost_updates"], figures["double_folds"], figures["identical_share"]) == (0, 0, 1.0)
    assert figures["aggregator_max_recovery_s"] == figures["max_recovery_s"] > 0


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
        (4, {"folded": ["r/b/1", "r/a/1"]}),
        (4, {"dropped": ["r/c/1"]}),
        (4, {"reason": "deadline"}),
        (1, {"staleness": 1}),
    ],
)
def test_a_version_is_identical_by_its_bits_and_by_what_was_folded_and_given_back(
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
