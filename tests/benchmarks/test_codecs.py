"""`benchmarks.codecs` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.codecs import PRESETS
from benchmarks.resnet50 import shapes
from tests.support.benchmark_document import document_of
from thinwire.core import Layout

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "codec", "feedback", "data", "threads", "path", "encode_ms", "decode_add_ms", "memcpy_ms", "encode_ratio",
    "decode_ratio", "bits_per_param", "relative_error",
}  # fmt: skip


def test_resnet_50_has_as_many_parameters_as_in_the_paper():
    assert sum(math.prod(shape) for shape in shapes().values()) == 25_557_032
    assert len(shapes()) == 161


def test_the_document_has_its_shape():
    made = document_of("codecs")
    assert [(row["codec"], row["feedback"]) for row in made["rows"]] == [
        ("int8", False), ("topk(0.01)", False), ("eden(0.3)", False), ("int8", True), ("topk(0.01)", True),
    ], "feedback around eden(0.3) is refused"  # fmt: skip
    assert all(set(row) == COLUMNS for row in made["rows"])
    assert {"memcpy_gb_s", "l3_mb", "encode_ratio int8", "decode_ratio topk(0.01)"} <= set(made["figures"])
    params = Layout.of(shapes(PRESETS["tiny"].share)).size
    room = 8 * 8 / params  # of the law, in bits a parameter
    least = made["figures"]["place_entropy topk(0.01)"]
    assert least < made["figures"]["place_bits topk(0.01) > rice"] < 1.02 * least + room
