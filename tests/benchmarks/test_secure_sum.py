"""`benchmarks.secure_sum` runs, and prints the document that others read. How fast it was is not asserted.

The run itself checks that each side's sum decodes to the clients' update.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.secure_case import Case
from benchmarks.secure_cohort import measure
from benchmarks.secure_sum import OURS, PRESETS, RESNET_50, THEIRS, figures
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]
COMPARED = {
    "client_cpu_ratio", "server_cpu_ratio", "server_cpu_ratio_drop", "bytes_ratio_dense", "bytes_ratio_modulus",
    "bytes_ratio_support",
}  # fmt: skip
COSTS = {"client_cpu_s", "client_vector_cpu_s", "server_cpu_s", "uplink_bytes", "client_peak_models", "threshold"}


def test_it_runs_and_the_document_has_its_shape():
    pytest.importorskip("flwr")
    made = document_of("secure_sum")
    assert set(made["figures"]) == {*COMPARED, "server_peak_models", "client_peak_models"}
    assert all(made["figures"][name] > 0 for name in COMPARED)
    assert [row["system"] for row in made["rows"]] == [OURS, OURS, THEIRS, THEIRS, OURS, OURS, OURS]
    for row in made["rows"]:
        assert all(row[name] > 0 for name in COSTS)
        assert (row["clients"], row["params"], row["threshold"], row["repeats"]) == (4, 20_000, 3, 1)
    plain, _, theirs, *_, hybrid = made["rows"]
    assert 20_000 * 8 < theirs["uplink_bytes"] < 20_000 * 8 + 5000
    assert 20_000 * 10 / 8 < plain["uplink_bytes"] < 20_000 * 10 / 8 + 5000  # 4 clients, 8 bits: sums have 10
    assert hybrid["uplink_bytes"] - plain["uplink_bytes"] > 2 * 1184 + 6 * 1088  # keys, ciphertexts, escrow


def test_our_round_is_not_larger_in_memory_than_four_models_on_either_side(tmp_path: Path):
    """At 4 million parameters, a thread's working memory of a megabyte is little beside a model's 16."""
    row = subprocess.run(
        [sys.executable, "-c", "from tests.benchmarks.test_secure_sum import report; report()", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert row.returncode == 0, row.stderr
    made = json.loads(row.stdout)
    assert 1 < made["client_peak_models"] <= 4
    assert 1 < made["server_peak_models"] <= 4


def report() -> None:
    """Print what a round of 4 million parameters takes; run in a process of its own."""
    print(json.dumps(measure(Case(4, 4_000_000, dropout=0.3, rotate=1 << 16), Path(sys.argv[1]))))


def test_without_flower_the_figures_that_compare_are_missing():
    rows = [{"system": OURS, "params": 20_000, "server_peak_models": 1.5, "client_peak_models": 2.5}]
    assert figures(rows, PRESETS["tiny"]) == {"server_peak_models": 1.5, "client_peak_models": 2.5}


def test_only_one_file_imports_flower():
    module = importlib.util.find_spec("benchmarks.secagg_plus")
    assert module is not None
    for name in ("secure_sum", "secure_case", "secure_cohort"):
        text = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert "import flwr" not in text and "from flwr" not in text


def test_the_full_preset_has_the_cases_of_the_design():
    cases = [case for system, case in PRESETS["full"].cases() if system == OURS]
    assert {(case.clients, case.params) for case in cases} == {
        (clients, params) for clients in (10, 50, 100) for params in (1_000_000, RESNET_50)
    }
    assert {case.dropout for case in cases} == {0.0, 0.1, 0.3}
    assert {case.bits for case in cases} == {8, 4}
    assert {case.support for case in cases} == {1.0, 0.1, 0.01}
    assert {case.rotate for case in cases} == {0, 1 << 12, 1 << 14, 1 << 16}
    assert {case.post_quantum for case in cases} == {False, True}
    assert PRESETS["full"].cohorts[0] == PRESETS["small"].cohorts[0] == (10, RESNET_50)


def test_the_crossed_preset_has_each_option_with_each_other_one():
    cases = [case for system, case in PRESETS["crossed"].cases() if system == OURS]
    assert len(cases) == len(set(cases)) == 2 * 3 * 4 * 2 * 3
    assert {(case.clients, case.params) for case in cases} == {(10, RESNET_50)}


def test_the_committed_preset_lacks_of_the_full_one_only_rows_of_flower_that_take_long():
    committed, full = ([*PRESETS[name].cases()] for name in ("committed", "full"))
    missing = [case for case in full if case not in committed]
    assert {(system, case.clients, case.params) for system, case in missing} == {
        (THEIRS, 50, RESNET_50), (THEIRS, 100, RESNET_50)
    }  # fmt: skip
    assert [case for case in full if case not in missing] == committed
