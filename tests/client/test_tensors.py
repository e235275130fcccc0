"""A module and its vector: tied weights once, frozen ones in the digest, buffers beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.client import tensors
from thinwire.core.errors import TaskError
from thinwire.core.layout import Layout


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, dtype=torch.float64))


def test_tied_weights_stand_once() -> None:
    layout = tensors.layout_of(Tied())
    assert [t.name for t in layout.trained] == ["inner.weight", "outer.bias"]
    assert layout.aliases == (("outer.weight", "inner.weight"),)


def test_frozen_tensors_stand_in_the_digest_alone() -> None:
    torch.manual_seed(0)
    base = nn.Linear(2, 2).requires_grad_(False)
    module = nn.Sequential(base, nn.Linear(2, 2))
    layout = tensors.layout_of(module)
    assert layout.size == 6
    assert tensors.read(module, layout).size == 6
    with torch.no_grad():
        base.weight += 1
    assert tensors.layout_of(module).digest != layout.digest
    assert tensors.layout_of(module).trained == layout.trained


def test_what_is_written_is_read() -> None:
    module = normed()
    layout = tensors.layout_of(module)
    vector = np.arange(layout.size, dtype=np.float32)
    tensors.write(module, layout, vector)
    assert (tensors.read(module, layout) == vector).all()
    buffers = np.arange(8, dtype=np.float32)
    tensors.write_buffers(module, layout, buffers)
    assert (tensors.read_buffers(module, layout) == buffers).all()
    tensors.write_counters(module, layout, {"1.num_batches_tracked": 9})
    assert tensors.read_counters(module, layout) == {"1.num_batches_tracked": 9}


def test_reading_gives_a_copy() -> None:
    module = nn.Linear(2, 1)
    layout = tensors.layout_of(module)
    before = tensors.read(module, layout)
    kept = before.copy()
    tensors.write(module, layout, before + 1)
    assert (before == kept).all()


def test_a_layout_outlives_json() -> None:
    layout = tensors.layout_of(normed())
    assert Layout.from_json(layout.to_json()).digest == layout.digest


def test_a_buffer_that_is_not_kept_is_no_part_of_the_model() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    module.register_buffer("kept", torch.zeros(3))
    assert [t.name for t in tensors.layout_of(module).buffers] == ["kept"]


@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(2, 1).requires_grad_(False), nn.LazyLinear(2)])
def test_a_model_without_anything_to_train_is_refused(module: nn.Module) -> None:
    with pytest.raises(TaskError):
        tensors.layout_of(module)
