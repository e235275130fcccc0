"""Dropout and augmentation of private steps: a key of 128 bits decides the draws of torch, numpy and `random`."""

from __future__ import annotations

import random

import numpy as np
import torch

from thinwire.client.train.layout import Key
from thinwire.client.train.module import keep_generators, seed_in_secret

HALVES = (0, 1, 1 << 32, 5 << 40)


def draws(key: Key) -> tuple[bytes, bytes, float]:
    with keep_generators():
        seed_in_secret(key)
        return torch.rand(4).numpy().tobytes(), np.random.rand(4).tobytes(), random.random()  # noqa: NPY002


def test_each_bit_of_the_key_decides_the_draws() -> None:
    """A seed of 32 bits could be tried: a reader of the model would find the masks of dropout."""
    keys = [Key(a, b) for a in HALVES for b in HALVES]
    for one in zip(*map(draws, keys), strict=True):
        assert len(set(one)) == len(keys)
    assert draws(keys[5]) == draws(keys[5])


def test_torch_has_all_of_its_state_from_the_key() -> None:
    """Its state is written at a place that only its source tells (`CPUGeneratorImplStateLegacy`)."""
    with keep_generators():
        seed_in_secret(Key(3, 1 << 63))
        found = torch.empty(1000, dtype=torch.int32).random_()
    expected = np.random.RandomState([3, 0, 0, 1 << 31, 1])
    raw = expected.randint(2**32, size=1000, dtype=np.uint32)
    assert found.tolist() == (raw & 0x7FFFFFFF).tolist()


def test_the_libraries_do_not_draw_the_same_numbers() -> None:
    with keep_generators():
        seed_in_secret(Key(3, 4))
        ours = torch.empty(100, dtype=torch.int32).random_().numpy()
        theirs = np.random.randint(2**32, size=100, dtype=np.uint32) & 0x7FFFFFFF  # noqa: NPY002
    assert not np.array_equal(ours, theirs)
