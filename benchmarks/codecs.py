"""Measure what each codec costs beside a plain copy: 25.56 million float32 in ResNet-50's shapes, there and back.

    python -m benchmarks.codecs [--preset small|full] --json

Copies into warm memory and calls take turns, so that a machine that gets slower gets slower for both; times are
medians of them. `decode_add` adds into a vector that is there already, as a server does. Ratios are to the copy.
`place_bits` are computed: what the places of the largest 1 % take by themselves, beside their entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.document import document, note, show
from benchmarks.entry import arguments
from benchmarks.limited import limited
from benchmarks.places import place_bits
from benchmarks.resnet50 import shapes
from thinwire.compression import feedback, native, parse
from thinwire.compression.base import BoundCodec
from thinwire.compression.catalog import measure_codec, steps
from thinwire.core import Layout
from thinwire.core.errors import CodecError
from thinwire.core.types import Vector

ROLES = ("quantizer", "sparsifier", "lowrank")
SPECS = (
    *(steps[name].examples[0] for name in steps if steps[name].role in ROLES),
    "topk(0.01) > int8 > rice", "topk(0.01) > int8 > rans", "ternary > rans", "topk(0.001)",
    "topk(0.001) > qsgd(4) > rice", "eden(4)", "eden(0.3)", "eden(0.1)",
)  # fmt: skip
DATA = ("normal", "heavy")

# Rounds that are not counted. The C library maps its first large blocks again, with a fault a page and zeros to write:
# only the fourth frame of 32 MB is written into memory that it kept.
WARM = 4
SLOW_MS, SLOW_TRIES = 300, 3  # an encode that takes so long, on numpy's path, is measured no more often


@dataclass(frozen=True)
class Preset:
    """Sets how much is measured: `share` of ResNet-50's tensors, from the first on. Paths other than the one that this
    processor takes, where they are measured, get normal values and one thread.
    """

    share: float
    tries: int
    data: Sequence[str]
    threads: Sequence[int]
    all_paths: bool
    specs: Sequence[str] = SPECS


PRESETS = {
    "tiny": Preset(0.02, 1, DATA[:1], (1,), False, ("int8", "topk(0.01)", "eden(0.3)")),  # for the tests
    "small": Preset(1.0, 5, DATA, (1,), False),
    "full": Preset(1.0, 7, DATA, (1, 2), True),
}


def made(kind: str, size: int) -> Vector:
    """Normal values, or Student's with two degrees of freedom: a few are hundreds of times larger than most."""
    draw = np.random.default_rng(1)
    x: Vector = draw.standard_normal(size, np.float32)
    if kind == "heavy":
        x /= np.sqrt(draw.exponential(1.0, size)).astype(np.float32)
    return x


def values_of(kind: str, layout: Layout) -> list[Vector]:
    """Return the values of each segment."""
    x = made(kind, layout.size)
    return [x[segment.span] for segment in layout.segments]


def measured(bound: BoundCodec, xs: Sequence[Vector], tries: int) -> dict[str, float]:
    """Medians in ms of the turns after those that warm up, and the ratios to a copy."""
    done = measure_codec(bound, xs, WARM + tries, SLOW_MS, 1 + min(tries, SLOW_TRIES))
    warm = WARM if len(done.copy_ms) == WARM + tries else 1
    memcpy, encode, add = (median(times[warm:]) for times in (done.copy_ms, done.encode_ms, done.decode_add_ms))
    return {
        "encode_ms": encode, "decode_add_ms": add, "memcpy_ms": memcpy,
        "encode_ratio": encode / memcpy, "decode_ratio": add / memcpy,
        "bits_per_param": 8 * done.payload_bytes / sum(x.size for x in xs), "relative_error": done.relative_error,
    }  # fmt: skip


def rows(preset: Preset) -> list[dict[str, Any]]:
    layout = Layout.of(shapes(preset.share))
    paths = [path for path in native.available() if preset.all_paths or path == native.chosen()]
    found = []
    for data in preset.data:
        xs = values_of(data, layout)
        for fed, spec in product((False, True), preset.specs):
            try:
                bound = feedback(parse(spec)).bind(layout) if fed else parse(spec).bind(layout)
            except CodecError as refused:  # as feedback around a codec that is unbiased by itself
                note(f"{spec}: {refused}")
                continue
            for path, threads in product(paths, preset.threads):
                if path != paths[0] and (data, threads) != (DATA[0], 1):
                    continue  # of the paths that nobody takes here one figure is enough
                with native.using(path), limited(threads):
                    row = {"codec": spec, "feedback": fed, "data": data, "threads": threads, "path": path}
                    row |= measured(bound, xs, preset.tries)
                note(f"{spec}{' + feedback' * fed}, {data}, {path}, {threads}: {row['encode_ratio']:.2f}")
                found.append(row)
    return found


def figures(found: Sequence[dict[str, Any]], params: int) -> dict[str, float]:
    """Return the figures of normal values, one thread, and the best path: what the limits are for."""
    out = {"memcpy_gb_s": 8 * params / 1e6 / median(row["memcpy_ms"] for row in found), "l3_mb": l3_mb()}
    for row in found:
        if (row["data"], row["threads"], row["path"]) == ("normal", 1, found[0]["path"]):
            name = row["codec"] + " + feedback" * row["feedback"]
            out[f"encode_ratio {name}"] = row["encode_ratio"]
            out[f"decode_ratio {name}"] = row["decode_ratio"]
    return out


def l3_mb() -> float:
    """Return the megabytes of the third-level cache; 0 if Linux does not report them."""
    path = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return float(path.read_text().strip().rstrip("K")) / 1024 if path.exists() else 0.0


def main() -> int:
    parser = arguments("codecs", __doc__, PRESETS)
    parser.add_argument("--codec", choices=SPECS, action="append", help="only these (again and again)")
    given = parser.parse_args()
    preset = PRESETS[given.preset]
    preset = replace(preset, specs=given.codec or preset.specs)
    found = rows(preset)
    layout = Layout.of(shapes(preset.share))
    told = figures(found, layout.size) | place_bits(values_of("normal", layout))
    show(document("codecs", given.preset, found, told), given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
