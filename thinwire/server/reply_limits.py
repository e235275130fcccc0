"""The size limit of a reply, which follows from its run's model: it is known before a byte of the reply is parsed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.mean import counters, float_buffers
from thinwire.core.errors import NotFound
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import FREE_HEADER_BYTES, MAX_HEADER_BYTES, ReplyLimit
from thinwire.privacy.messages import max_bytes
from thinwire.store import Store

BASE_BYTES = 64 * 2**20  # for a reply to an unknown assignment
BYTES_A_PARAMETER = 8  # no codec sends more: an index of four bytes and a float32
BYTES_A_PART = 160  # of a header: its name, its length, 64 hex digits
BYTES_A_COUNTER = 32  # without its name: 20 digits and the JSON around them
MANY = 100  # clients whose shares a header may hold in every secure run
UNKNOWN = ReplyLimit(BASE_BYTES, identity=None)  # for assignments of unknown runs


def limit_of(plan: RunPlan, layout: Layout, enrolled: int = 0) -> ReplyLimit:
    """Return the size limit of a reply: a part for each segment, one for buffers, and every counter.

    In a secure run a header may hold a client's shares for every other client: so many as the plan selects, or twice
    as many as are `enrolled`, because devices may join.
    """
    travels = carried(algorithm_of(plan), layout)
    parts, counted = len(travels.segments) + 1, counters(layout)
    header = FREE_HEADER_BYTES + BYTES_A_PART * parts
    header += sum(BYTES_A_COUNTER + len(json.dumps(tensor.name)) for tensor in counted)
    if (secure := plan.secure).enabled:
        clients = plan.cohort.clients
        selected = math.ceil(clients * (1 + plan.cohort.over_select)) if isinstance(clients, int) else 2 * enrolled
        header += 4 * max_bytes("share", max(selected, MANY), secure.post_quantum) // 3
    payload = BASE_BYTES + BYTES_A_PARAMETER * layout.size
    payload += FLOAT_BYTES * sum(tensor.size for tensor in float_buffers(layout))
    return ReplyLimit(payload, parts, len(counted), min(header, MAX_HEADER_BYTES))


class RunLimits:
    """Size limits of replies to the runs in a store (`core.fleet.ReplyLimits`); any thread may call it.

    An `assignment_id` begins with its run: RUN.ROUND.DEVICE.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, ReplyLimit] = {}
        for row in store.line():  # their devices may reply to assignments from before this start
            self.of(row.run_id + ".")

    def of(self, assignment_id: str) -> ReplyLimit:
        """Return the limit for a reply to this assignment."""
        run_id = assignment_id.partition(".")[0]
        if run_id not in self._of:
            try:
                row = self._store.run(run_id) if run_id else None
            except NotFound:
                row = None
            if row is None or row.run_id != run_id:
                return UNKNOWN
            enrolled = len(self._store.roster.rows())
            limit = limit_of(RunPlan.from_json(row.plan), Layout.from_json(row.layout), enrolled)
            self._of[run_id] = replace(limit, identity=row.identity or None)  # a simulation has no identity
        return self._of[run_id]

    def max_header_bytes(self) -> int:
        """Return the largest header limit of all runs that are active, or were looked up since the start."""
        return max((limit.header_bytes for limit in list(self._of.values())), default=FREE_HEADER_BYTES)
