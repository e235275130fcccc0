"""A stock node that sends what is no update ends no run of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.server.scripted import LAYOUT, Device
from thinwire.core.messages import ask_from_bytes, reply_to_bytes
from thinwire.core.plan import RunPlan
from thinwire.flower.stock.carrying import Carried
from thinwire.flower.stock.folding_app import StockRun
from thinwire.server.step import Model
from thinwire.server.versions import Versions


@pytest.mark.parametrize("lie", ["no head", "no frames", "negative", "cut", "foreign frames"])
def test_a_stock_node_that_lies_ends_no_run(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RunPlan.parse('[run]\ntask = "toy"\n[local]\nlr = 0.1')
    run, versions = StockRun(cast(Any, None), plan, "toy-1", tmp_path), Versions(tmp_path, LAYOUT)
    stored = versions.write(0, np.zeros(LAYOUT.size, np.float32), np.zeros(0, np.float32), {}, 0.0)
    run.model = Model(LAYOUT, *versions.read(stored), {})

    def said(_kind: str, asks: Mapping[int, Carried]) -> dict[int, Carried]:
        head, frames = Device("a").reply(ask_from_bytes(asks[1].head))
        whole = b"".join(frames)
        bad = {
            "no head": Carried(b"{}", whole), "no frames": Carried(reply_to_bytes(replace(head, parts=())), b""),
            "negative": Carried(reply_to_bytes(replace(head, examples=-1)), whole),
            "cut": Carried(reply_to_bytes(head), whole[:-9]),
            "foreign frames": Carried(reply_to_bytes(head), bytes(len(whole))),
        }  # fmt: skip
        return {2: bad[lie], 1: Carried(reply_to_bytes(head), whole)}

    monkeypatch.setattr(run, "_exchange", said)
    run._round(1, [1, 2], versions, stored)
    assert run.model.params.any()
