"""A round whose sum overflowed is folded again without the updates that did it: one device ends no run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from thinwire.core.types import ReplyHead
from thinwire.server.model.step import Fold, Frames

LARGEST = 2.0**100  # of one update's weighted change: codecs keep their laws up to here, and 2^27 of them add up
Folded = tuple[ReplyHead, Frames, float]  # a head, its frames, its discount


def spoilers(new: Callable[[], Fold], folded: Sequence[Folded]) -> list[ReplyHead]:
    """The updates that are too large to be part of any sum, each looked at alone."""
    found = []
    for head, frames, _ in folded:
        alone = new()
        alone.add(replace(head, examples=1, a=1.0), frames, 1.0)
        largest = float(max(alone.changes.total.max(), -alone.changes.total.min()))
        if not np.isfinite(largest) or largest * head.examples * max(head.a, 1.0) > LARGEST:
            found.append(head)
    return found


def refolded(new: Callable[[], Fold], folded: Sequence[Folded]) -> Fold:
    """A tally of these updates, in their order."""
    fold = new()
    for head, frames, discount in folded:
        fold.add(head, frames, discount)
    return fold
