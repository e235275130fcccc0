"""A module and its vector: tied weights once, frozen ones in the digest, buffers beside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.aggregation import counters, float_buffers
from thinwire.aggregation.mean import fixed_buffers, pack_fixed, unpack_fixed
from thinwire.client.train import module as tensors
from thinwire.client.train.errors import BadTask
from thinwire.client.train.layout import slices
from thinwire.client.train.runtime import AsBuilt
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout, differences


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, dtype=torch.float64))


def test_tied_weights_stand_once() -> None:
    places = tensors.layout_of(Tied())
    assert [t.name for t in places.trained] == ["inner.weight", "outer.bias"]
    assert places.aliases == (("outer.weight", "inner.weight"),)


def test_frozen_tensors_stand_in_the_digest_alone() -> None:
    torch.manual_seed(0)
    base = nn.Linear(2, 2).requires_grad_(False)
    module = nn.Sequential(base, nn.Linear(2, 2))
    places = tensors.layout_of(module)
    assert places.size == 6
    assert tensors.read(module, places).size == 6
    with torch.no_grad():
        base.weight += 1
    assert tensors.layout_of(module).frozen_digest != places.frozen_digest
    assert tensors.layout_of(module).trained == places.trained


def test_the_frozen_tensor_or_fixed_buffer_that_is_another_is_named() -> None:
    def made(change: Callable[[nn.Module], object] = lambda module: None) -> Layout:
        module = nn.Sequential(*(nn.Linear(2, 2).requires_grad_(False) for _ in range(9)), nn.Linear(2, 2))
        module.register_buffer("order", torch.tensor([1, 0]))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        with torch.no_grad():
            change(module)
        return Layout.from_json(tensors.layout_of(module).to_json())

    assert differences(made(), made()) == ""
    assert (
        differences(made(lambda module: module.get_parameter("7.weight").mul_(2)), made())
        == "7.weight has other values"
    )
    assert differences(made(lambda module: module.get_buffer("order").add_(1)), made()) == "order has other values"


def test_fixed_buffers_stand_in_the_digest_with_their_values() -> None:
    digests = set()
    for order, mask, turn in [([0, 1], [True, False], 1j), ([1, 0], [True, False], 1j), ([0, 1], [True, True], 1j),
                              ([0, 1], [True, False], 2j)]:  # fmt: skip
        module = nn.Linear(2, 2)
        module.register_buffer("order", torch.tensor(order))
        module.register_buffer("mask", torch.tensor(mask))
        module.register_buffer("turn", torch.tensor(turn))  # of one element, and no counter
        places = tensors.layout_of(module)
        assert [t.name for t in places.fixed] == ["order", "mask", "turn"]
        digests.add(Layout.from_json(places.to_json()).digest)
    assert len(digests) == 4


def test_a_float_buffer_that_is_not_finite_is_fixed() -> None:
    digests = set()
    for at in (0, 1):
        module = normed()
        mask, short, wide = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)
        mask[at], short[at], wide[at] = float("-inf"), float("nan"), 1e300  # no float32 holds it
        for name, buffer in (("mask", mask), ("short", short), ("wide", wide)):
            module.register_buffer(name, buffer)
        module.register_buffer("finite", torch.ones(3))
        places = tensors.layout_of(module)
        layout = Layout.from_json(places.to_json())
        digests.add(layout.digest)
        assert [t.name for t in places.fixed] == [t.name for t in fixed_buffers(layout)] == ["mask", "short", "wide"]
        assert [t.name for t in float_buffers(layout)] == [t.name for t in places.buffers]
        assert {t.name for t in places.buffers} == {"1.running_mean", "1.running_var", "finite"}
        values = tensors.read_fixed(module, places, module)
        found = unpack_fixed(layout, pack_fixed(values))
        assert {name: array.tobytes() for name, array in found.items()} == {n: a.tobytes() for n, a in values.items()}
        assert (found["wide"][at], found["mask"][at]) == (1e300, -np.inf)
        built = AsBuilt(module, places)
        mask.fill_(0)
        assert built.changed() == "float buffer mask was changed"
    assert len(digests) == 2


def test_the_digest_of_a_layout_without_fixed_buffers_is_what_it_always_was() -> None:
    last = nn.Linear(4, 1, dtype=torch.float64)
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), last)
    before = "2b6b27af6db36b9c72d6976ac4118a7e917b1a94a736c7915e4a2ec22996295b"
    assert Layout.from_json(tensors.layout_of(module).to_json()).digest == before
    last.weight.data.fill_(0.5)
    last.bias.data.fill_(0.25)
    last.requires_grad_(False)
    before = "a510b519714a41a1918831282a6d93bcf10d2e41a26aff258653db28c30f0e5c"
    assert Layout.from_json(tensors.layout_of(module).to_json()).digest == before


def test_a_type_that_no_exported_file_can_hold_is_refused_by_the_buffers_name() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("turn", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(BadTask, match="the buffer turn is torch.complex128"):
        tensors.layout_of(module)


def test_a_complex_parameter_is_refused_with_what_to_do() -> None:
    module = nn.Linear(2, 1)
    module.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(BadTask, match="turn is trained as torch.complex64") as refused:
        tensors.layout_of(module)
    assert "view_as_complex" in refused.value.hint


def test_what_is_written_is_read() -> None:
    module = normed()
    places = tensors.layout_of(module)
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
    places = tensors.layout_of(module)
    before = tensors.read(module, places)
    kept = before.copy()
    tensors.write(module, places, before + 1)
    assert (before == kept).all()


def test_the_layout_that_an_aggregator_knows_has_the_same_places() -> None:
    places = tensors.layout_of(normed())
    layout = Layout.from_json(places.to_json())
    assert layout.to_json() == places.to_json()
    offsets = [(t.name, span.start) for t, span in slices(places.trained)]
    assert (layout.size, [(t.name, t.offset) for t in layout.trained]) == (places.size, offsets)
    assert [t.name for t in float_buffers(layout)] == [t.name for t in places.buffers]
    assert [t.name for t in counters(layout)] == [t.name for t in places.counters]


def test_fixed_tensors_come_back_from_their_bytes_or_are_refused() -> None:
    module = normed()
    module.register_buffer("order", torch.tensor([[2, 0, 1]]))
    module.register_buffer("nothing", torch.zeros(0, dtype=torch.int32))
    places = tensors.layout_of(module)
    layout = Layout.from_json(places.to_json())
    values = tensors.read_fixed(module, places, module)
    assert [t.name for t in fixed_buffers(layout)] == list(values) == ["order", "nothing"]
    packed = pack_fixed(values)
    found = unpack_fixed(layout, packed)
    assert {name: array.tolist() for name, array in found.items()} == {"order": [[2, 0, 1]], "nothing": []}
    trained = {**values, "0.weight": np.zeros((4, 2), np.float32)}
    flat = {**values, "order": values["order"].reshape(-1)}
    none = hashlib.sha256(b"none").digest() + b"none"
    for wrong in (b"", packed[:-1], packed[:-1] + b"x", pack_fixed({"order": values["order"]}), pack_fixed(trained),
                  pack_fixed(flat), none):  # fmt: skip
        with pytest.raises(BadPayload):
            unpack_fixed(layout, wrong)
    assert pack_fixed({}) == b""
    assert unpack_fixed(Layout.of({"w": (2,)}), b"") == {}


def test_a_buffer_that_is_not_kept_is_no_part_of_the_model() -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    module.register_buffer("kept", torch.zeros(3))
    assert [t.name for t in tensors.layout_of(module).buffers] == ["kept"]


@pytest.mark.parametrize("module", [nn.Identity(), nn.Linear(2, 1).requires_grad_(False), nn.LazyLinear(2)])
def test_a_model_without_anything_to_train_is_refused(module: nn.Module) -> None:
    with pytest.raises(BadTask):
        tensors.layout_of(module)
