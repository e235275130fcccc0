"""`benchmarks.links` runs and prints the document that others read; who was sooner is not asserted."""

from __future__ import annotations

from pathlib import Path

from benchmarks.links import ALL, LADDER, figures
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("links", "--costs", "0.001,0.0005,0.006")
    assert {row["uplink"] for row in made["rows"]} == {*LADDER, ALL}
    assert 0.0 < made["figures"]["in_time_share"] <= 1.0 and "speedup" in made["figures"]
    ladder = next(row for row in made["rows"] if row["uplink"] == ALL)
    assert LADDER[1] in ladder["selected"], "in the third round broad links have climbed two steps"
    assert ladder["selected"][LADDER[-1]] > 8, "and thin ones stayed where all eight began"


def test_the_ladder_is_held_against_the_codec_that_was_best_for_most_seeds() -> None:
    rows = [
        {"uplink": uplink, "seed": seed, "seconds": seconds, "in_time_share": share}
        for seed, share in ((1, 1.0), (2, 0.9), (3, 0.8))
        for uplink, seconds in (*zip(LADDER, (90.0, 60.0, 40.0, None), strict=True), (ALL, 20.0))
    ]
    found = figures(rows)
    assert (found["speedup"], found[f"seconds {LADDER[2]}"]) == (2.0, 40.0)
    assert abs(found["in_time_share"] - 0.9) < 1e-12
