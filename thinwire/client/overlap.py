"""Delayed averaging: a device trains on while its updates travel (Zhu, Lin et al. 2021).

    w = x^_V + sum(pending)

`x^_V` is the version that an ask names; pending are the device's own changes that no version up to V holds, as they
were trained, not as they were sent: what a codec left out is in the residual and comes later, and the device has it
already. Law: w is computed anew for each ask from what is exact on both ends. Nothing is ever taken off a model that
was trained on, and no difference to a decoded change is added up, so that nothing drifts.

A change is pending until an ask brings the verdict on it: folded into a version up to the ask's own, or dropped, and
then it goes back into the residual (client/outbox.py). At most `max_delay` of them are, since the aggregator sends no
more asks ahead; of more, which a lost verdict can leave, or an answer that came when all rounds were closed, the oldest
are not counted on any longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.core.types import ReplyHead, Vector, Verdict

Pending = Mapping[str, "Vector"]  # sequence of the answer -> its change


def delay_of(plan: Mapping[str, Any] | str | None) -> int:
    """How many changes the plan lets be under way while training goes on; 0: none, or not known.

    >>> delay_of({"local": {"lr": 0.1, "overlap": {"max_delay": 2}}}), delay_of({"local": {"lr": 0.1}})
    (2, 0)
    """
    found: Any = plan  # as it came: nothing has checked it yet
    for name in ("local", "overlap", "max_delay"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else 0


def with_one(pending: Pending, head: ReplyHead, change: Vector) -> Pending:
    """With the change of this answer beside the others; it is copied, since it is about to be encoded."""
    return {**pending, str(head.update_id.sequence): change.copy()}


def without(pending: Pending, sequences: Iterable[int]) -> Pending:
    """Without these answers' changes."""
    gone = {str(sequence) for sequence in sequences}
    return {name: change for name, change in pending.items() if name not in gone}


def still_pending(pending: Pending, verdicts: Iterable[Verdict], version: int, most: int) -> Pending:
    """What is still under way where training starts from `version`, at most `most` changes: the newest.

    >>> from thinwire.core.types import UpdateId, Verdict
    >>> told = [Verdict(UpdateId("run", "pi", 1), "folded", 4), Verdict(UpdateId("run", "pi", 2), "folded", 5)]
    >>> list(still_pending({"1": None, "2": None}, told, version=4, most=2))
    ['2']
    """
    over = (
        verdict.update_id.sequence
        for verdict in verdicts
        if verdict.outcome == "dropped" or (verdict.outcome == "folded" and verdict.version <= version)
    )
    left = _in_order(without(pending, over))
    return dict(list(left.items())[-most:])


def start(base: Vector, pending: Pending) -> Vector:
    """Where training starts: `base` itself where nothing is pending, else a new vector."""
    if not pending:
        return base
    found: Vector = base.copy()
    for change in _in_order(pending).values():
        found += change
    return found


def _in_order(pending: Pending) -> dict[str, Vector]:
    """By sequence, which is the order of training, whatever order a file gave them in."""
    return dict(sorted(pending.items(), key=lambda item: int(item[0])))
