"""Runs that do not fit into memory together go on one after the other, and say why they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.server_bench import LAYOUT
from tests.support.several_runs import Site, steady
from thinwire.core import RunPlan
from thinwire.core.events import RoundClosed, RoundOpened, RunStatusChanged
from thinwire.server.service import Admission, available_memory, memory_limit, memory_of, vectors_of

ONE = 4 * LAYOUT.size * 4  # bytes of a run of the plan below


def opened_at(site: Site, run_id: str) -> float:
    return float(site.events(run_id, RoundOpened)[0].at)


def test_a_run_that_does_not_fit_beside_others_waits_in_the_queue_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    first, second, third = (site.submit(run={"seed": seed}) for seed in range(3))
    site.serve(memory_bytes=2 * ONE)
    assert [site.store.run(run_id).status for run_id in (first, second, third)] == ["done"] * 3
    said = [event.text for event in site.events(third, RunStatusChanged) if event.status == "queued"]
    assert said[-1].startswith(
        f"waiting for memory: it needs about 9.92 kB, and of 19.8 kB others have {first} 9.92 kB"
    )
    over = min(site.events(one, RoundClosed)[-1].at for one in (first, second))
    assert opened_at(site, second) < over <= opened_at(site, third)
    assert len(said) == 2, "the reason is recorded once"


def test_a_small_run_does_not_pass_a_large_one_for_ever(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    first = site.submit()
    large = site.submit(run={"seed": 1}, server={"optimizer": "fedadam"})
    small = site.submit(run={"seed": 2})
    site.serve(memory_bytes=2 * ONE)
    assert site.events(first, RoundClosed)[-1].at <= opened_at(site, large) <= opened_at(site, small)


def test_a_run_that_is_alone_begins_though_it_is_above_the_limit_and_has_a_note(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    run_id = site.submit()
    site.serve(seconds=1.5, memory_bytes=ONE - 1)
    site.serve(memory_bytes=ONE - 1)
    row = site.store.run(run_id)
    assert row.status == "done"
    assert [note[0][0] for note in row.notes] == ["memory"], "once, though there was a restart"


def test_without_a_limit_all_runs_begin(tmp_path: Path) -> None:
    site = Site(tmp_path, steady({"a": 1.0}))
    runs = [site.submit(run={"seed": seed}) for seed in range(3)]
    site.serve()
    assert not any("memory" in event.text for run_id in runs for event in site.events(run_id, RunStatusChanged))
    row = site.store.run(runs[0])
    assert (Admission().refusal(row, [row]), memory_of(row)) == ("", ONE)


@pytest.mark.parametrize(
    ("sections", "vectors"),
    [
        ("", 4),
        ('[server]\noptimizer = "fedadam"', 6),
        ('[server]\noptimizer = "fedadagrad"', 6),
        ('[server]\noptimizer = "fedavgm"\n[downlink]\ncodec = "int8"', 7),
        ("[secure]\nenabled = true", 7),
    ],
)
def test_the_plan_says_how_many_vectors_of_the_model_there_are(sections: str, vectors: int) -> None:
    assert vectors_of(RunPlan.parse(f'[run]\ntask = "toy"\n[local]\nlr = 1\n{sections}')) == vectors


def test_the_limit_of_a_control_group_counts_where_it_is_less(tmp_path: Path) -> None:
    meminfo, version1 = tmp_path / "meminfo", tmp_path / "v1" / "memory"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable: 2000 kB\n")
    assert available_memory(meminfo, tmp_path) == 2000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_memory(meminfo, tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 2000 * 1024
    version1.mkdir(parents=True)
    (version1 / "memory.limit_in_bytes").write_text("500000")
    (version1 / "memory.usage_in_bytes").write_text("600000")
    assert available_memory(meminfo, tmp_path / "v1") == 0


def test_the_settings_decide_before_the_machine_does() -> None:
    assert memory_limit(100) == 100_000_000
    assert 0 < memory_limit(None) < 2**50
