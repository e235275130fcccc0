"""Seconds and memory of a reduction, for `benchmarks.robust`: ours from the spool, Flower's from vectors in memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.document import note
from benchmarks.fold import sent, shapes
from benchmarks.robust_rounds import CLIENTS, FLOWERS
from benchmarks.secure_case import Meter
from thinwire.aggregation import UpdateRows
from thinwire.aggregation.reductions import reduction_of
from thinwire.core import Layout, RunPlan
from thinwire.core.types import Vector
from thinwire.server.aggregator import Model, SumConfig
from thinwire.server.reducing_aggregator import ReducingAggregator
from thinwire.store import FileSpool

KINDS = {"dense": ("int8", "median"), "sparse": ("topk(0.01) > int8 > rice", "krum(3)")}  # codec and reduction


def seconds(params: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each of Flower's functions and of our reductions on the same vectors of 20 clients.

    Ours include writing the rows; neither includes decoding.
    """
    updates = [_vector(params, number) for number in range(CLIENTS)]
    for spec, theirs in FLOWERS.items():
        began = time.perf_counter()
        rows = UpdateRows(folder, params)
        for number, update in enumerate(updates):
            rows.add(f"{number:02}", [update])
        found = reduction_of(spec).reduce(rows)
        ours_s = time.perf_counter() - began
        began = time.perf_counter()
        (expected,) = theirs([([update], 1) for update in updates])
        flower_s = time.perf_counter() - began
        apart = float(np.abs(found - expected).max())
        note(f"{spec}: {ours_s:.2f} s, Flower {flower_s:.2f} s, apart {apart:.2g}")
        yield {
            "what": "seconds", "reduce": spec, "params": params, "clients": CLIENTS, "ours_s": ours_s,
            "flower_s": flower_s, "ratio": flower_s / ours_s, "flower_apart": apart,
        }  # fmt: skip
        del rows, found, expected
        gc.collect()


def _vector(params: int, seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(params, np.float32)


def memory(params: int, cohorts: tuple[int, ...], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the most memory of a round above that of its model, in models of float32, by codec and cohort."""
    layout = Layout.of(shapes(params))
    for kind, (codec, spec) in KINDS.items():
        raw = {"run": {"task": "bench"}, "local": {"lr": 1.0}, "server": {"reduce": spec}}
        plan = RunPlan.from_json({**raw, "cohort": {"late": "drop"}})
        for cohort in cohorts:
            spool = FileSpool(folder / f"{kind}-{cohort}")
            headers = list(sent(spool, codec, layout, cohort))
            model = Model(layout, np.ones(layout.size, np.float32), np.zeros(0, np.float32), {})
            meter = Meter()
            meter.base()
            with meter:
                aggregator = ReducingAggregator(folder, plan, layout, codec, SumConfig())
                for header in headers:
                    aggregator.add(header, partial(spool.open, header.update_id), 1.0)
                aggregator.step(model)
            peak = meter.peak_bytes / (4 * layout.size)
            note(f"{kind}, {cohort} clients: {peak:.2f} models")
            yield {
                "what": "memory", "kind": kind, "codec": codec, "reduce": spec, "params": params, "clients": cohort,
                "peak_models": peak,
            }  # fmt: skip
            for header in headers:
                spool.delete(header.update_id)
            del aggregator, model
