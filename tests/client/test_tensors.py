"""A module and its vector: tied weights once, frozen ones in the digest, buffers beside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.aggregation import counters, float_buffers
from thinwire.client.compute import tensors
from thinwire.client.compute.errors import BadTask
from thinwire.client.compute.places import placed
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
    places = tensors.places_of(Tied())
    assert [t.name for t in places.trained] == ["inner.weight", "outer.bias"]
    assert places.aliases == (("outer.weight", "inner.weight"),)


def test_frozen_tensors_stand_in_the_digest_alone() -> None:
    torch.manual_seed(0)
    base = nn.Linear(2, 2).requires_grad_(False)
    module = nn.Sequential(base, nn.Linear(2, 2))
    places = tensors.places_of(module)
    assert places.size == 6
    assert tensors.read(module, places).size == 6
    with torch.no_grad():
        base.weight += 1
    assert tensors.places_of(module).frozen_digest != places.frozen_digest
    assert tensors.places_of(module).trained == places.trained


def test_what_is_written_is_read() -> None:
    module = normed()
    places = tensors.places_of(module)
    vector = np.arange(places.size, dtype=np.float32)
    tensors.write(module, places, vector)
    assert (tensors.read(module, places) == vector).all()
    buffers = np.arange(8, dtype=np.float32)
    tensors.write_buffers(module, places, buffers)
    assert (tensors.read_buffers(module, places) == buffers).all()
    tensors.write_counters(module, places, {"1.num_batches_tracked": 9})
    assert tensors.read_counters(module, places) == {"1.num_batches_tracked": 9}


def test_reading_gives_a_copy() -> None:
    module = nn.Linear(2, 1)
    places = tensors.places_of(module)
    before = tensors.read(module, places)
    kept = before.copy()
    tensors.write(module, places, before + 1)
    assert (before == kept).all()


def test_the_layout_that_an_aggregator_knows_has_the_same_places() -> None:
    places = tensors.places_of(normed())
    layout = Layout.from_json(places.to_json())
    assert layout.to_json() == places.to_json()
    offsets = [(t.name, span.start) for t, span in placed(places.trained)]
    assert (layout.size, [(t.name, t.offset) for t in layout.trained]) == (places.size, offsets)
    assert [t.name for t in float_buffers(layout)] == [t.name for t in places.buffers]
    assert [t.name for t in counters(layout)] == [t.name for t in places.counters]


def test_a_buffer_that_is_not_kept_is_no_part_of_the_model() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    module.register_buffer("kept", torch.zeros(3))
    assert [t.name for t in tensors.places_of(module).buffers] == ["kept"]


@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(2, 1).requires_grad_(False), nn.LazyLinear(2)])
def test_a_model_without_anything_to_train_is_refused(module: nn.Module) -> None:
    with pytest.raises(BadTask):
        tensors.places_of(module)
