"""A round is folded again where its end shows that an update counts otherwise than it was folded.

One counts less where its client's weight is over the cap, which the medians of the whole round say. One counts not at
all where the sum is too large for a model: one device ends no run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thinwire.core.types import ReplyHead
from thinwire.server.model.step import Fold, Frames

TOO_LARGE = "bad-payload: numbers too large to be added"
Folded = tuple[ReplyHead, Frames, float]  # a head, its frames, its discount


def folded_without(new: Callable[[], Fold], folded: Sequence[Folded]) -> tuple[Fold, list[ReplyHead]]:
    """A tally of the updates whose sum fits, in their order, and those that are left out.

    One is left out where the sum of those before it fits and with it does not: that depends on their order alone, so
    that a restart leaves out the same.
    """
    fold, spoilers = new(), list[ReplyHead]()
    for head, frames, discount in folded:
        before = fold.copy()
        fold.add(head, frames, discount)
        if not fold.fits():
            fold = before
            spoilers.append(head)
    return fold, spoilers


def refolded(new: Callable[[], Fold], folded: Sequence[Folded]) -> Fold:
    """A tally of these updates, in their order."""
    fold = new()
    for head, frames, discount in folded:
        fold.add(head, frames, discount)
    return fold
