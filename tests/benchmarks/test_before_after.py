"""`benchmarks.before_after` compares figures of two commits, whatever figures the two have."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.before_after import Side, compared, interval, worst


def side(**runs: list[dict[str, float]]) -> Side:
    return Side("0" * 40, Path(), runs)


def test_above_1_the_new_commit_is_worse_whatever_the_figure_is() -> None:
    old = side(fold=[{"time": 1.0, "updates_per_s": 150.0}] * 3)
    new = side(fold=[{"time": 2.0, "updates_per_s": 100.0}] * 3)
    _, figures = compared("fold", old, new)
    assert figures == {
        "fold_time": 2.0, "fold_time_low": 2.0, "fold_updates_per_s": 1.5, "fold_updates_per_s_low": 1.5,
    }  # fmt: skip


def test_the_verdict_is_the_worst_benchmark_of_each_of_time_and_memory() -> None:
    old = side(fold=[{"time": 1.0, "memory": 4.0, "own_time": 1.0}], codecs=[{"time": 1.0, "memory": 4.0}])
    new = side(fold=[{"time": 1.25, "memory": 2.0, "own_time": 9.0}], codecs=[{"time": 0.5, "memory": 3.0}])
    rows = [row for name in ("fold", "codecs") for row in compared(name, old, new)[0]]
    assert worst(rows) == {"worst_time_low": 1.25, "worst_memory_low": 0.75}
    assert worst([]) == {}


def test_a_renamed_benchmark_runs_under_the_name_that_its_commit_has(tmp_path: Path) -> None:
    old, new = Side("0" * 40, tmp_path / "old"), Side("1" * 40, tmp_path / "new")
    for one, name in ((old, "node_footprint"), (new, "device_footprint")):
        (one.folder / "benchmarks").mkdir(parents=True)
        (one.folder / f"benchmarks/{name}.py").touch()
    assert [one.name_of("device_footprint") for one in (old, new)] == ["node_footprint", "device_footprint"]
    assert old.name_of("gone") == "gone"


def test_the_lower_end_is_under_the_ratio_where_runs_differ() -> None:
    ratio, low, high = interval([1.0, 2.0, 3.0, 4.0], [1.1, 1.9, 3.2, 3.9], larger=False)
    assert low < ratio < high


def test_figures_that_one_commit_lacks_are_named_and_stop_nothing() -> None:
    old, new = side(codecs=[{"time": 1.0, "gone": 1.0}]), side(codecs=[{"time": 1.0, "new": 2.0}])
    rows, figures = compared("codecs", old, new)
    assert {row["figure"]: row.get("only in") for row in rows} == {"time": None, "gone": "before", "new": "after"}
    assert set(figures) == {"codecs_time", "codecs_time_low"}


def test_a_benchmark_that_does_not_run_on_one_commit_is_a_row_with_the_reason() -> None:
    old = side()
    old.failed["mailbox"] = "No module named benchmarks.mailbox"
    assert compared("mailbox", old, side(mailbox=[{"time": 1.0}])) == (
        [{"benchmark": "mailbox", "not run": "before", "why": "No module named benchmarks.mailbox"}], {},
    )  # fmt: skip


def test_a_figure_of_0_has_no_ratio() -> None:
    rows, figures = compared("fold", side(fold=[{"lost": 0.0}]), side(fold=[{"lost": 1.0}]))
    assert "ratio" not in rows[0]
    assert not figures


@pytest.mark.parametrize(
    "name", ["encode_ratio int8", "check_ms", "idle_rss_mb", "memory", "noop_ours_s", "unaccounted_share"]
)
def test_times_and_memory_are_worse_where_they_are_larger(name: str) -> None:
    _, figures = compared("x", side(x=[{name: 1.0}]), side(x=[{name: 2.0}]))
    assert figures[f"x_{name}"] == 2.0
