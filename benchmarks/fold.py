"""Folding at the speed of memory: 100 different updates from spool files into one sum, beside a plain copy.

python -m benchmarks.fold --preset small --json

An update of n parameters reads its payload and the sum and writes the sum; a copy of n values reads and writes them:

    share = ((payload bytes + 8 n) / seconds to add) / (8 n / seconds of the copy)

What is read and decoded is timed as the aggregator does it, from the files of its spool. The checks before it (digest,
frames) are timed apart. `topk_updates_per_s` is of a whole fold, its checks of frames included, on one thread. In the
small preset the sum stays in the processor's cache: only the full one says what memory does.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.document import document, note, show
from thinwire.aggregation import WeightedMean, parse
from thinwire.aggregation.native import path
from thinwire.aggregation.native.threads import using_threads
from thinwire.core import Key, Layout
from thinwire.core.types import Arrived, Part, ReplyHead, UpdateId, Vector
from thinwire.store import FileSpool

UPDATES = 100
CODECS = {"fp16": "fp16", "int8": "int8", "topk": "topk(0.01) > int8 > rice"}
TENSOR = 512 * 512 * 9  # the largest of ResNet-50's
FEW = 2  # clients of the other round whose memory is looked at, beside that of all


@dataclass(frozen=True)
class Preset:
    params: int
    updates: int = UPDATES


PRESETS = {"tiny": Preset(50_000, 3), "small": Preset(1_000_000), "full": Preset(25_557_032)}


class Timed(WeightedMean):
    """The aggregator's tally, which takes the time of its checks."""

    check_s = 0.0

    def check(self, frames: Any) -> None:
        began = time.perf_counter()
        super().check(frames)
        self.check_s += time.perf_counter() - began


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    layout = Layout.of(_shapes(preset.params))
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {"peak_models": 0.0}
    for name, spec in CODECS.items():
        note(f"{spec}: {preset.updates} updates of {preset.params} parameters")
        spool = FileSpool(folder / name)
        heads = list(_sent(spool, spec, layout, preset.updates))
        row = _folded(spool, heads, spec, layout)
        row["peak_models"] = max(_peak_models(spool, heads[:count], spec, layout) for count in (FEW, len(heads)))
        rows.append(row)
        if name == "topk":
            figures["topk_updates_per_s"] = 1000 / row["fold_ms"]
        else:
            figures[f"{name}_bandwidth_share"] = row["bandwidth_share"]
        figures["peak_models"] = max(figures["peak_models"], row["peak_models"])
        for head in heads:
            spool.delete(head.update_id)
    figures["check_ms"] = max(row["check_ms"] + row["digest_ms"] for row in rows)
    return rows, figures


def _shapes(params: int) -> dict[str, tuple[int, ...]]:
    whole, rest = divmod(params, TENSOR)
    return {f"w{i}": (512, TENSOR // 512) for i in range(whole)} | ({"rest": (rest,)} if rest else {})


def _sent(spool: FileSpool, spec: str, layout: Layout, updates: int) -> Iterator[ReplyHead]:
    """Put updates of normal values into the spool, no two alike."""
    codec = parse(spec).bind(layout)
    for number in range(updates):
        draw = np.random.default_rng(number)
        update_id = UpdateId("bench", f"device-{number}", 1)
        draft, parts = spool.draft(update_id), []
        with draft.open("wb") as out:
            for segment in layout.segments:
                x: Vector = draw.standard_normal(segment.size, np.float32)
                frame = codec.encode(x, codec.init(segment.index), Key(number), segment.index).payload
                out.write(frame)
                parts.append(Part(f"frame/{segment.index}", len(frame), hashlib.sha256(frame).hexdigest()))
        head = ReplyHead(f"ask-{number}", update_id, 0, examples=32, a=10.0, parts=tuple(parts), codec=spec)
        spool.commit(draft, head)
        yield head


def _folded(spool: FileSpool, heads: list[ReplyHead], spec: str, layout: Layout) -> dict[str, Any]:
    tally = Timed(parse(spec).bind(layout), layout)
    source, copied = np.ones(layout.size, np.float32), np.ones(layout.size, np.float32)
    add_s, check_s, digest_s, copy_s = [], [], [], []
    for head in heads:
        began = time.perf_counter()
        for frame, part in zip(spool.open(head.update_id), head.parts, strict=True):
            assert hashlib.sha256(frame).hexdigest() == part.sha256
        digest_s.append(time.perf_counter() - began)
        tally.check_s, began = 0.0, time.perf_counter()
        tally.fold(partial(spool.open, head.update_id), head.examples, 1.0, head.a)
        add_s.append(time.perf_counter() - began - tally.check_s)
        check_s.append(tally.check_s)
        began = time.perf_counter()
        np.copyto(copied, source)
        copy_s.append(time.perf_counter() - began)
    payload = sum(head.payload_bytes for head in heads) / len(heads)
    moved = 8 * layout.size
    return {
        "codec": spec,
        "updates": len(heads),
        "params": layout.size,
        "payload_bytes": payload,
        "add_ms": 1000 * median(add_s),
        "check_ms": 1000 * median(check_s),
        "digest_ms": 1000 * median(digest_s),
        "fold_ms": 1000 * median(a + c for a, c in zip(add_s, check_s, strict=True)),
        "memcpy_ms": 1000 * median(copy_s),
        "memcpy_gb_per_s": moved / median(copy_s) / 1e9,
        "bandwidth_share": (payload + moved) / median(add_s) / (moved / median(copy_s)),
        "path": path.chosen(),
        "threads": 1,
    }


def _peak_models(spool: FileSpool, heads: list[ReplyHead], spec: str, layout: Layout) -> float:
    """The most memory at once of a round with these clients, in models of float32; parts that are mapped count too."""
    mapped = 0

    def frames(head: ReplyHead) -> Iterator[Arrived]:
        nonlocal mapped
        for part in spool.open(head.update_id):
            mapped = max(mapped, len(part) if isinstance(part, memoryview) else 0)
            yield part

    tracemalloc.start()
    tally = WeightedMean(parse(spec).bind(layout), layout)
    for head in heads:
        tally.fold(partial(frames, head), head.examples, 1.0, head.a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak + mapped) / (4 * layout.size)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fold", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder, using_threads(1):
        rows, figures = measure(PRESETS[chosen.preset], Path(folder))
    show(document("fold", chosen.preset, rows, figures), chosen.json)


if __name__ == "__main__":
    main()
