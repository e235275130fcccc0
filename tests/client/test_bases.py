"""One model for many handlers: read and decoded once, and otherwise as each of them would read it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from thinwire.aggregation import ModelReplica, write_model
from thinwire.aggregation.downlink import Downlink
from thinwire.client.payload import BaseModelCache, update_replica
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout, Tensor
from thinwire.core.types import Assignment, Part

LAYOUT = Layout.build([Tensor("w", (40, 10)), Tensor("running_mean", (10,), role="buffer")])
DOWN = "topk(0.1)"


def written(path: Path, seed: int) -> Assignment:
    """An assignment for the whole of some model, whose parts are put into a file."""
    draw = np.random.default_rng(seed)
    params, buffers = draw.normal(size=400).astype(np.float32), draw.normal(size=10).astype(np.float32)
    parts, digest = write_model(path, LAYOUT, params, buffers)
    return Assignment(f"a-{seed}", "t-1", "t", "train", {}, base_version=seed, base_digest=digest, parts=tuple(parts))


def test_every_session_gets_the_bits_that_it_would_have_read(tmp_path: Path) -> None:
    bases = BaseModelCache()
    for seed in (1, 1, 2, 1):
        path = tmp_path / f"{seed}.model"
        assignment = written(path, seed)
        alone, together = ModelReplica(LAYOUT, DOWN), ModelReplica(LAYOUT, DOWN)
        read, taken = update_replica(assignment, path, alone), bases.update_replica(assignment, path, together)
        assert read is not None and taken is not None
        assert (alone.params.tobytes(), read.tobytes()) == (together.params.tobytes(), taken.tobytes())
        assert alone.version == together.version == seed


def test_what_comes_again_is_not_read_again(tmp_path: Path) -> None:
    bases, path = BaseModelCache(), tmp_path / "1.model"
    assignment = written(path, 1)
    bases.update_replica(assignment, path, first := ModelReplica(LAYOUT, DOWN))
    path.unlink()
    bases.update_replica(assignment, path, second := ModelReplica(LAYOUT, DOWN))
    assert second.params is first.params


def test_changes_lead_only_whoever_holds_what_they_change(tmp_path: Path) -> None:
    layout, bundle = Layout.of({"w": (40, 10)}), tmp_path / "1.change"
    sender = Downlink(layout, DOWN, np.zeros(400, np.float32))
    news = sender.publish(np.ones(400, np.float32))
    (change,) = news.changes
    bundle.write_bytes(change)
    parts = (Part("1/0", len(change), hashlib.sha256(change).hexdigest()),)
    assignment = Assignment("a", "t-1", "t", "train", {}, base_version=1, base_digest=news.digest, parts=parts)
    bases = BaseModelCache()
    bases.update_replica(assignment, bundle, ModelReplica(layout, DOWN, np.zeros(400, np.float32), 0))
    with pytest.raises(BadPayload):
        bases.update_replica(assignment, bundle, ModelReplica(layout, DOWN))
