"""Tests of the parts that an assignment announces: their sizes are checked before any of them is downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_task import plan_of
from thinwire.aggregation import write_model
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.downlink import Downlink
from thinwire.client.errors import CannotReply
from thinwire.client.payload import require_parts
from thinwire.core.layout import Layout, Tensor
from thinwire.core.types import Assignment, Part


def zeros(name: str, length: int) -> Part:
    return Part(name, length, "0" * 64)


@pytest.mark.parametrize(
    ("count", "length", "said"),
    [(1001, 60, "1001 parts are announced"), (1000, 60, "parts of 60,000 bytes in all"), (1, 400, "part 1/0 of 400")],
)
def test_changes_are_never_longer_together_than_the_model(count: int, length: int, said: str) -> None:
    layout = Layout.of({"w": (20,)})
    plan = plan_of('[downlink]\ncodec = "topk(0.5) > fp16"\nlog_rounds = 999')
    parts = tuple(zeros(f"{version}/0", length) for version in range(1, count + 1))
    assignment = Assignment(
        "a-1", "small-1", "small", "train", plan.to_json(), layout_digest=layout.digest, parts=parts
    )
    with pytest.raises(CannotReply, match=said):
        require_parts(assignment, plan, layout)
    require_parts(replace(assignment, parts=(zeros("1/0", 60), zeros("2/0", 40))), plan, layout)
    require_parts(replace(assignment, parts=()), plan, layout)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("codec", ["identity", "fp16", "topk(0.5)", "topk(0.05) > int8 > zstd", "eden(4)", "qsgd(8)"])
def test_no_honest_model_and_no_honest_change_is_refused(tmp_path: Path, algorithm: str, codec: str) -> None:
    """Values of which no codec leaves anything out, which no coder makes smaller, and buffers beside them."""
    tensors = [Tensor("w", (50, 40)), Tensor("b", (7,)), Tensor("m", (9,), role="buffer")]
    model = Layout.build(tensors)
    plan = plan_of(f'[downlink]\ncodec = "{codec}"', run=f'algorithm = "{algorithm}"')
    layout, draw = transmitted_layout(algorithm_of(plan), model), np.random.default_rng(1)
    vector = draw.standard_normal(layout.size).astype(np.float32)
    full, _ = write_model(tmp_path / "model", layout, vector, np.ones(9, np.float32))
    assignment = Assignment(
        "a-1", "small-1", "small", "train", plan.to_json(), layout_digest=model.digest, parts=tuple(full)
    )
    require_parts(assignment, plan, model)
    if codec != "identity":
        changes = Downlink(layout, codec, vector).publish(-100 * vector).changes
        parts = [Part(f"1/{index}", len(change), "") for index, change in enumerate(changes)]
        require_parts(replace(assignment, parts=(*parts, full[-1])), plan, model)
