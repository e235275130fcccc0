"""Folding at the speed of memory: 100 different updates from spool files into one sum, beside a plain copy.

python -m benchmarks.fold --preset small --json

An update of n parameters reads its payload and the sum and writes the sum; a copy of n values reads and writes them:

    share = ((payload bytes + 8 n) / seconds to add) / (8 n / seconds of the copy)

What is read and decoded is timed as the aggregator does it, from the files of its spool. The checks that come before
(digest, and all frames but the last, which is checked where it is added) are timed apart. `topk_updates_per_s` is of a
whole fold, its checks of frames included, on one thread. The spool was just written, so its files are in the page
cache, as those of updates that have just come are.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from thinwire.aggregation import WeightedMean
from thinwire.compression import parse
from thinwire.compression.chain import SegmentedCodec
from thinwire.compression.native import chosen, using_threads
from thinwire.core import Key, Layout
from thinwire.core.types import Arrived, Part, ReplyHeader, UpdateId, Vector
from thinwire.store import FileSpool

UPDATES = 100
CODECS = {"fp16": "fp16", "int8": "int8", "topk": "topk(0.01) > int8 > rice"}
TENSOR = 512 * 512 * 9  # the largest of ResNet-50's
FEW = 2  # clients of the other round whose memory is looked at, beside that of all


@dataclass(frozen=True)
class Preset:
    params: int = 25_557_032  # ResNet-50's
    updates: int = UPDATES


PRESETS = {"tiny": Preset(50_000, 3), "small": Preset(updates=20), "full": Preset()}


@dataclass(frozen=True)
class Timed(SegmentedCodec):
    """A codec that takes the time of its checks; what `decode_add` checks belongs to that."""

    check_s: list[float] = field(default_factory=list)

    def check(self, payload: Arrived, segment: int = 0) -> None:
        began = time.perf_counter()
        super().check(payload, segment)
        self.check_s.append(time.perf_counter() - began)


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    layout = Layout.of(shapes(preset.params))
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {"peak_models": 0.0}
    for name, spec in CODECS.items():
        note(f"{spec}: {preset.updates} updates of {preset.params} parameters")
        spool = FileSpool(folder / name)
        headers = list(sent(spool, spec, layout, preset.updates))
        row = _aggregated(spool, headers, spec, layout)
        row["peak_models"] = max(_peak_models(spool, headers[:count], spec, layout) for count in (FEW, len(headers)))
        rows.append(row)
        if name == "topk":
            figures["topk_updates_per_s"] = 1000 / row["fold_ms"]
        else:
            figures[f"{name}_bandwidth_share"] = row["bandwidth_share"]
        figures["peak_models"] = max(figures["peak_models"], row["peak_models"])
        for header in headers:
            spool.delete(header.update_id)
    figures["check_ms"] = max(row["check_ms"] + row["digest_ms"] for row in rows)
    return rows, figures


def shapes(params: int) -> dict[str, tuple[int, ...]]:
    whole, rest = divmod(params, TENSOR)
    return {f"w{i}": (512, TENSOR // 512) for i in range(whole)} | ({"rest": (rest,)} if rest else {})


def sent(spool: FileSpool, spec: str, layout: Layout, updates: int) -> Iterator[ReplyHeader]:
    """Put updates of normal values into the spool, no two alike."""
    codec = parse(spec).bind(layout)
    values: Vector = np.random.default_rng(1).standard_normal(layout.size + updates, np.float32)
    for number in range(updates):
        update_id = UpdateId("bench", f"device-{number}", 1)
        draft, parts = spool.draft(update_id), []
        with draft.open("wb") as out:
            for segment in layout.segments:
                x = values[number + segment.start : number + segment.stop]
                frame = codec.encode(x, codec.init(segment.index), Key(number), segment.index).payload
                out.write(frame)
                parts.append(Part(f"frame/{segment.index}", len(frame), hashlib.sha256(frame).hexdigest()))
        header = ReplyHeader(
            f"assignment-{number}", update_id, 0, examples=32, steps=10, a=10.0, parts=tuple(parts), codec=spec
        )
        spool.commit(draft, header)
        yield header


def _aggregated(spool: FileSpool, headers: list[ReplyHeader], spec: str, layout: Layout) -> dict[str, Any]:
    bound = parse(spec).bind(layout)
    codec = Timed(bound.spec, layout, bound.groups)
    tally = WeightedMean(codec, layout)
    source, copied = np.ones(layout.size, np.float32), np.ones(layout.size, np.float32)
    add_s, check_s, digest_s, copy_s = [], [], [], []
    for header in headers:
        began = time.perf_counter()
        for frame, part in zip(spool.open(header.update_id), header.parts, strict=True):
            assert hashlib.sha256(frame).hexdigest() == part.sha256
        digest_s.append(time.perf_counter() - began)
        codec.check_s.clear()
        began = time.perf_counter()
        tally.fold(partial(spool.open, header.update_id), header.examples, 1.0, header.a)
        check_s.append(sum(codec.check_s))
        add_s.append(time.perf_counter() - began - check_s[-1])
        began = time.perf_counter()
        np.copyto(copied, source)
        copy_s.append(time.perf_counter() - began)
    payload = sum(header.payload_bytes for header in headers) / len(headers)
    moved = 8 * layout.size
    return {
        "codec": spec,
        "updates": len(headers),
        "params": layout.size,
        "payload_bytes": payload,
        "add_ms": 1000 * median(add_s),
        "check_ms": 1000 * median(check_s),
        "digest_ms": 1000 * median(digest_s),
        "fold_ms": 1000 * median(a + c for a, c in zip(add_s, check_s, strict=True)),
        "memcpy_ms": 1000 * median(copy_s),
        "memcpy_gb_per_s": moved / median(copy_s) / 1e9,
        "bandwidth_share": (payload + moved) / median(add_s) / (moved / median(copy_s)),
        "path": chosen(),
        "threads": 1,
    }


def _peak_models(spool: FileSpool, headers: list[ReplyHeader], spec: str, layout: Layout) -> float:
    """The most memory at once of a round with these clients, in models of float32; parts that are mapped count too."""
    mapped = 0

    def frames(header: ReplyHeader) -> Iterator[Arrived]:
        nonlocal mapped
        for part in spool.open(header.update_id):
            mapped = max(mapped, len(part) if isinstance(part, memoryview) else 0)
            yield part

    tracemalloc.start()
    tally = WeightedMean(parse(spec).bind(layout), layout)
    for header in headers:
        tally.fold(partial(frames, header), header.examples, 1.0, header.a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak + mapped) / (4 * layout.size)


if __name__ == "__main__":
    with using_threads(1):
        run_in_folder("fold", __doc__, PRESETS, measure)
