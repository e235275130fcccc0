"""Sums are added in the stated order, whatever the machine."""

from __future__ import annotations

import numpy as np

from tests.support.codec_examples import made
from thinwire.compression.vector_ops import bucket_sums, in_order


def test_sums_are_added_in_the_stated_order() -> None:
    x = made(5000, 5, "steep", 0)
    for bucket, found in zip((x[:4096], x[4096:]), bucket_sums(x, 2), strict=True):
        partials = [0.0] * 8
        for index, value in enumerate(bucket.tolist()):
            partials[index % 8] += value * value
        while len(partials) > 1:
            half = len(partials) // 2
            partials = [a + b for a, b in zip(partials[:half], partials[half:], strict=True)]
        assert found == partials[0]
    assert in_order(np.zeros(0)) == 0.0
