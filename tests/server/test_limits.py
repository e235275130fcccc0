"""An answer's size is bounded by its run's model."""

from __future__ import annotations

from pathlib import Path

from tests.support.server_bench import LAYOUT, REPORT, Bench, scripted
from thinwire.core import RunPlan
from thinwire.server.service import BASE_BYTES, RunLimits


def test_an_answer_may_be_as_large_as_its_model_allows_and_no_larger(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a")])
    limits = RunLimits(bench.store)
    assert limits.of(f"{bench.run_id}.1.a").payload_bytes == BASE_BYTES + 8 * LAYOUT.size
    assert limits.of("unknown-9.1.a") == limits.of("") == limits.of("latest.1.a")
    assert limits.of("").payload_bytes == BASE_BYTES


def test_a_reply_has_to_name_the_identity_of_its_run_also_after_a_restart(tmp_path: Path) -> None:
    """Ids are counted: a new state directory's first run has the id of another's first run."""
    bench = Bench(tmp_path, [scripted("a")])
    assert RunLimits(bench.store).of(f"{bench.run_id}.1.a").identity == bench.store.run(bench.run_id).identity


def test_no_reply_is_taken_to_an_assignment_of_no_run_that_selects_devices(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a")])
    simulated = bench.store.create_run(
        "other", RunPlan.parse('[run]\ntask = "other"\n[local]\nlr = 0.1'), LAYOUT, REPORT, source="sim"
    )
    limits = RunLimits(bench.store)
    assert [limits.of(f"{run}.1.a").identity for run in (simulated, "unknown-9", "")] == [None, None, None]
