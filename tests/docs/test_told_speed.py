"""What pages say in words of how fast codecs are is what the committed runs measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from docs.generate.speed import disturbed
from tests.support.shell_blocks import ROOT

CODECS, FOLD = (json.loads((ROOT / f"docs/evidence/{name}.json").read_text())["figures"] for name in ("codecs", "fold"))
TWICE = ("drive", "eden(2)", "eden(4)")
ONCE = ("fp16", "bf16", "int8", "qsgd(4)", "natural", "ternary", "sign", "twobit(1)")


def more(codec: str) -> float:
    """Copies that an encode with feedback takes beyond one without."""
    return float(CODECS[f"encode_ratio {codec} + feedback"] - CODECS[f"encode_ratio {codec}"])


def test_the_readme_has_the_figures_of_the_committed_runs():
    told = r"([\d.]+) memory copies .* int8, and ([\d.]+) with `topk\(0\.01\) > int8 > rice`\. .* (\d+) such updates"
    ((int8, chain, added),) = re.findall(told, " ".join((ROOT / "README.md").read_text().split()))
    assert int8 == f"{CODECS['encode_ratio int8']:.1f}"
    assert chain == f"{CODECS['encode_ratio topk(0.01) > int8 > rice']:.1f}"
    assert added == f"{FOLD['topk_updates_per_s']:.0f}"


def test_the_first_sentence_of_the_readme_has_the_figure_of_the_committed_demo():
    text = (ROOT / "README.md").read_text()
    demo = json.loads((ROOT / "docs/evidence/demo.json").read_text())["figures"]
    assert f"{demo['uplink_ratio']:.0f} times smaller" in " ".join(text.split())
    assert len(text.splitlines()) <= 150


def test_feedback_and_a_rotation_cost_what_the_page_says():
    text = " ".join((ROOT / "docs/explain/codecs.md").read_text().split())
    for codecs, told in ((ONCE, "takes {} to {} copies more"), (TWICE, "`drive` and `eden` {} to {}.")):
        cost = [round(more(codec), 1) for codec in codecs]
        assert told.format(min(cost), max(cost)) in text
    added = [round(CODECS[f"decode_ratio {codec}"], 1) for codec in ("eden(0.1)", "eden(0.3)")]
    assert "takes {} to {} copies of the model".format(*added) in text


def row(memcpy_ms: float, **other: Any) -> dict[str, Any]:
    plain = {"codec": "int8", "feedback": False, "data": "normal", "threads": 1, "path": "avx512"}
    return {**plain, "memcpy_ms": memcpy_ms, **other}


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row(14.0), row(14.0), row(16.0)], ""),
        ([row(14.0), row(14.0), row(30.0, threads=2)], "`int8` (normal values, avx512, 2 threads: 30.0 ms)"),
        ([row(14.0), row(14.0), row(30.0, data="heavy", threads=2)], ""),  # no page shows it
    ],
)
def test_a_row_whose_copies_were_slow_is_named_under_the_table(rows, named):
    assert named in disturbed(rows)
    assert bool(disturbed(rows)) == bool(named)
