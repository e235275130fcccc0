"""The aggregation of a round by a reduction: updates are kept until the round closes, and then made into one change.

It takes the place of the running sum where `[server] reduce` is not "mean". An update is checked and decoded as it
arrives; the replies stay in the spool until the step is journalled, so a restart decodes them again.

Each update that the reduction has looked at is aggregated, also one that it did not choose. Its client keeps no
residual of it: otherwise the next updates of clients that are never chosen would grow from round to round.

The change is multiplied by the median normaliser of the round, since a client reports its own. Averaged buffers are the
coordinate-wise median of the clients' buffers, whatever the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from thinwire.aggregation.mean import Frames
from thinwire.aggregation.reduction_base import BufferMedian, UpdateRows
from thinwire.aggregation.reductions import CONTRACT, reduction_of
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.formatting import Capped
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHeader, State, UpdateId, Vector
from thinwire.server.aggregator import MAX_MEAN, Model, RoundAggregator, SumConfig, WeightCaps, max_magnitude


class ReducingAggregator(RoundAggregator):
    """Keeps the updates of one round as rows of a file in `folder`."""

    steps_in_thread = True

    def __init__(self, folder: Path, plan: RunPlan, layout: Layout, codec: str, config: SumConfig) -> None:
        super().__init__(plan, layout, codec, config)
        self.reduction = reduction_of(plan.server.reduce)
        self.rows = UpdateRows(folder, layout.size)
        self.buffers = BufferMedian(layout)
        self.normalisers = list[float]()
        self.update_ids = dict[str, UpdateId]()  # by assignment id

    def _add_frames(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        """Decode an update and keep it; raise `BadPayload` if a value is larger than a mean may have."""
        codec = self._codec(header)

        def parts() -> Iterator[Vector]:
            for segment, payload in zip(self.layout.segments, frames(), strict=False):
                values = codec.decode(payload, segment.index)
                if not (found := max_magnitude(values)) <= MAX_MEAN:
                    raise BadPayload(f"an update with a value of {found:g}", why=f"at most {MAX_MEAN:g} may be reduced")
                if discount != 1:
                    values *= np.float32(discount)
                yield values

        self.rows.add(header.assignment_id, parts())
        self.normalisers.append(header.a)
        self.update_ids[header.assignment_id] = header.update_id

    def capped(self, caps: WeightCaps, _: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return the updates whose norm is bounded; no update counts by its examples or its normaliser."""
        return self.bounded(caps)

    def reserve(self, updates: int) -> None:
        """Reserve the disk space of so many updates; raise `TooLittleSpace` if the disk has too little."""
        self.rows.allocate(updates)

    def replaced(self, new: Callable[[], RoundAggregator]) -> RoundAggregator:
        """Return a new, empty aggregator, which has the disk space of this one: another run could take it meanwhile."""
        made = new()
        assert isinstance(made, ReducingAggregator), "the plan names the reduction"
        self.rows.empty()
        made.rows = self.rows
        return made

    def close(self) -> None:
        """Free the disk space of the updates."""
        self.rows.close()

    def fits(self) -> bool:
        """Return True: each update was checked when it came."""
        return True

    @property
    def chosen(self) -> list[str]:
        """Return the ids of the updates that a reduction which chooses has chosen."""
        order = sorted(self.rows.ids)
        return [str(self.update_ids[order[index]]) for index in self.reduction.chosen]

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        """Return the reduction's change; raise `CodecError` if it is none that a model can take."""
        change: Any = self.reduction.reduce(self.rows)
        name, size = self.plan.server.reduce, self.layout.size
        if not (isinstance(change, np.ndarray) and change.dtype == np.float32 and change.shape == (size,)):
            why = f"it gave no float32 vector of {size}"
            raise CodecError(f"the change of the reduction {name!r}", why=why, hint=CONTRACT)
        if not (found := max_magnitude(change)) <= MAX_MEAN:
            why = f"it holds {found:g}, and the updates hold at most {MAX_MEAN:g}"
            raise CodecError(f"the change of the reduction {name!r}", why=why, hint=CONTRACT)
        change *= np.float32(median(self.normalisers))
        return change, {}
