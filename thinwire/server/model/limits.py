"""How large a reply may be: known from the run's model before a byte of it is taken or parsed."""

from __future__ import annotations

import json
from dataclasses import replace

from thinwire.aggregation.algorithms import algorithm_of, carried
from thinwire.aggregation.buffers import counters, float_buffers
from thinwire.core.errors import NotFound
from thinwire.core.layout import Layout
from thinwire.core.messages import FREE_HEADER_BYTES, MAX_HEAD_BYTES, ReplyLimit
from thinwire.core.plan import RunPlan
from thinwire.store import Store

BASE_BYTES = 64 * 2**20  # an answer to an ask that nobody knows
BYTES_A_PARAMETER = 8  # no codec sends more: an index of four bytes and a float32
BYTES_A_BUFFER = 4  # of a value of the averaged buffers, which are float32
BYTES_A_PART = 160  # of a header: its name, its length, 64 hex digits
BYTES_A_COUNTER = 32  # beside its name: 20 digits and what JSON puts around it
UNKNOWN = ReplyLimit(BASE_BYTES, identity=None)  # of asks of no run of ours


def limit_of(plan: RunPlan, layout: Layout) -> ReplyLimit:
    """Return what the largest honest reply of a run needs: a part a segment, one of buffers, and each counter."""
    travels = carried(algorithm_of(plan), layout)
    parts, counted = len(travels.segments) + 1, counters(layout)
    header = FREE_HEADER_BYTES + BYTES_A_PART * parts
    header += sum(BYTES_A_COUNTER + len(json.dumps(tensor.name)) for tensor in counted)
    payload = BASE_BYTES + BYTES_A_PARAMETER * layout.size
    payload += BYTES_A_BUFFER * sum(tensor.size for tensor in float_buffers(layout))
    return ReplyLimit(payload, parts, len(counted), min(header, MAX_HEAD_BYTES))


class RunLimits:
    """core.fleet.ReplyLimits of the runs in a store; an ask's id is RUN.ROUND.DEVICE. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, ReplyLimit] = {}
        for row in store.line():  # whose devices may answer what was asked before this start
            self.of(row.run_id + ".")

    def of(self, ask_id: str) -> ReplyLimit:
        run_id = ask_id.partition(".")[0]
        if run_id not in self._of:
            try:
                row = self._store.run(run_id) if run_id else None
            except NotFound:
                row = None
            if row is None or row.run_id != run_id:
                return UNKNOWN
            limit = limit_of(RunPlan.from_json(row.plan), Layout.from_json(row.layout))
            self._of[run_id] = replace(limit, identity=row.identity or None)  # a simulation asks no device
        return self._of[run_id]

    def max_header_bytes(self) -> int:
        """Of all runs that are going on, or were asked for since the start."""
        return max((limit.header_bytes for limit in list(self._of.values())), default=FREE_HEADER_BYTES)
