"""Limits that follow from a run's plan and layout: of the size of a reply, and of the memory that a run needs.

The size limit of a reply is known before a byte of it is parsed.

A run begins only if its models fit into memory beside those of the runs that go on (`Admission`). The need of a run is
an estimate: four bytes for each trained parameter, times the number of vectors of the model's size that the aggregator
holds at once. A run that does not fit stays in the queue, with the reason in its status, and runs behind it wait too:
otherwise small runs would keep a large one out for ever. A run that is alone always begins, with a note if the estimate
is above the limit, because nothing would ever make room for it. (submit refuses a model that no machine takes:
`LARGEST`.)
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.mean import counters, float_buffers
from thinwire.core.errors import NotFound
from thinwire.core.events import Event, RunNoted, RunStatusChanged
from thinwire.core.formatting import Reason, size
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.plan import RunPlan
from thinwire.core.serialization import FREE_HEADER_BYTES, MAX_HEADER_BYTES, ReplyLimit
from thinwire.core.statedir import MB
from thinwire.privacy.messages import max_bytes
from thinwire.store import RunRow, Store
from thinwire.store.read_models import MEMORY_TEXT

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


SHARE: Final = 0.8  # of the memory that is available at the start
SELF: Final = 4  # vectors of each run: the model, the sum, one decoded update, and a copy that is being written
OPTIMIZERS: Final[Mapping[str, int]] = {"fedavg": 0, "fedavgm": 1, "fedadagrad": 1, "fedadam": 2, "fedyogi": 2}
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def vectors_of(plan: RunPlan) -> int:
    """Return how many vectors of the model's size a run holds in memory at once, as an estimate.

    An optimizer of another package counts as two.
    """
    found = SELF + OPTIMIZERS.get(plan.server.optimizer, 2)
    found += 2 if plan.downlink.compressed else 0  # the replica, and the change that is encoded
    found += 1 if plan.remembered else 0  # the sum of what all devices have sent
    found += 3 if plan.secure.enabled else 0  # integers of 64 bits, and one masked vector
    return found + (1 if plan.privacy.mode == "central" else 0)  # the noise


def memory_of(row: RunRow) -> int:
    """Return the bytes of memory that a run needs, as an estimate."""
    plan = RunPlan.from_json(row.plan)
    return FLOAT_BYTES * carried(algorithm_of(plan), Layout.from_json(row.layout)).size * vectors_of(plan)


def memory_limit(memory_mb: int | None) -> int:
    """Return the bytes that all runs may take: those of aggregator.toml, else a share of what is available now."""
    return memory_mb * MB if memory_mb is not None else int(SHARE * available())


def available(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that this machine, or this process's control group, has available."""
    found = 2**62
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        line = next(one for one in meminfo.read_text().splitlines() if one.startswith("MemAvailable:"))
        found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # version 2; "max" without a limit
        limit = int((cgroup / "memory.max").read_text())
        found = min(found, max(0, limit - int((cgroup / "memory.current").read_text())))
    with contextlib.suppress(OSError, ValueError):  # version 1; nearly 2^63 without a limit
        limit = int((cgroup / "memory" / "memory.limit_in_bytes").read_text())
        found = min(found, max(0, limit - int((cgroup / "memory" / "memory.usage_in_bytes").read_text())))
    return found


@dataclass(frozen=True)
class Admission:
    """Decides whether a run may begin beside those that go on, by memory; without `limit` every run may."""

    limit: int | None = None

    def refusal(self, row: RunRow, going: Iterable[RunRow]) -> str:
        """Return why a run stays in the queue, as its status; "" if it may begin."""
        needs = {one.run_id: memory_of(one) for one in going} if self.limit is not None else {}
        if self.limit is None or not needs or (own := memory_of(row)) + sum(needs.values()) <= self.limit:
            return ""
        others = ", ".join(f"{run_id} {size(need)}" for run_id, need in needs.items())
        return f"{MEMORY_TEXT}: it needs about {size(own)}, and of {size(self.limit)} others have {others}"

    def note(self, row: RunRow) -> Event | None:
        """Return a note about a run that begins alone though it is above the limit; None if it is not, or has one."""
        if self.limit is None or (need := memory_of(row)) <= self.limit or any(n[0][0] == "memory" for n in row.notes):
            return None
        return RunNoted(row.created_at, [Reason("memory", {"needs": size(need), "limit": size(self.limit)})])


def queued(row: RunRow, at: float, text: str) -> list[Event]:
    """Return the event that a run stays in the queue for this reason; none if its status says so already."""
    return [] if (row.status, row.status_text) == ("queued", text) else [RunStatusChanged(at, "queued", text)]
