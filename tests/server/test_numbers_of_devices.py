"""The largest numbers that a device may say end no run, and break no page that shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.server.test_hostile_devices import liar
from tests.support.server_bench import Bench, scripted
from thinwire.core.errors import BadPayload
from thinwire.core.score_histogram import MAX_METRIC_LETTERS
from thinwire.core.serialization import (
    MAX_EXAMPLES,
    MAX_METRICS,
    MAX_NORM,
    MAX_SECONDS,
    MAX_STEPS,
    reply_from_bytes,
    reply_to_bytes,
)
from thinwire.core.types import Assignment, ReplyHeader, Timings, UpdateId
from thinwire.web.run_queries import Reader

LARGEST: Mapping[str, Mapping[str, Any]] = {
    "sums": {"metrics": {"eval/loss": (9e99, 2e-100), "eval/accuracy": (2e-100, 2e-100), "train/loss": (9e99, 2e-100)}},
    "counts": {"metrics": {"eval/loss": (1.0, 9e99), "train/loss": (1.0, 9e99)}},
    "names": {"metrics": {"eval/": (1.0, 1.0), "train/": (1.0, 1.0), f"eval/{'x' * MAX_METRIC_LETTERS}": (1.0, 1.0)}},
    "many": {"metrics": {f"eval/{number}": (1.0, 1.0) for number in range(MAX_METRICS)}},
    "timings": {"timings": Timings(*[MAX_SECONDS] * 5)},
    "steps": {"steps": MAX_STEPS},
    "examples": {"examples": MAX_EXAMPLES, "a": 1e9},
    "least": {"a": 5e-324},
    "norms": {"norm": MAX_NORM, "residual_norm": MAX_NORM},
    "counters": {"counters": {"x" * 1000: 2**63 - 1, "b": 1 - 2**63}},
    "codec": {"codec": "x" * 100_000},
}


@pytest.mark.parametrize("which", LARGEST)
def test_the_largest_numbers_end_no_run_and_break_no_page(tmp_path: Path, which: str) -> None:
    def lie(_assign: Assignment, header: ReplyHeader) -> ReplyHeader:
        said = reply_from_bytes(reply_to_bytes(replace(header, **LARGEST[which])))
        assert isinstance(said, ReplyHeader)
        return replace(said, transfer=header.transfer)

    devices = [liar("a", lie), liar("c", lie), scripted("b")]
    bench = Bench(
        tmp_path, devices, run={"rounds": 2, "evaluate": "clients"}, cohort={"deadline_s": 9, "min_updates": 1}
    )
    run = bench.drive().run_id
    assert bench.store.run(run).status == "done"
    page = Reader(bench.store)
    shown = [page.run(run), page.round(run, 1), *page.runs(), *page.rounds(run)[0], *page.updates(run, None)[0]]
    assert json.dumps([one.model_dump(mode="json") for one in shown], allow_nan=False)


@pytest.mark.parametrize("seconds", [-1.0, 1.7e308])
@pytest.mark.parametrize("stage", ["download_s", "queue_s", "evaluate_s", "train_s", "encode_s"])
def test_no_stage_took_for_ever(stage: str, seconds: float) -> None:
    """Two of 1.7e308 s are infinity, which no page can show: the run's was gone for good."""
    header = ReplyHeader("toy-1.1.a", UpdateId("toy-1", "a", 1), 0, 10)
    with pytest.raises(BadPayload):
        reply_from_bytes(reply_to_bytes(replace(header, timings=Timings(**cast(Any, {stage: seconds})))))
