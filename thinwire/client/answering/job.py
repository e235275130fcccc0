"""One ask with what stands around it: its keys, its schedule, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.aggregation.downlink import Shadow
from thinwire.client.answering import exchange
from thinwire.client.answering.afterwards import Afterwards
from thinwire.client.compute import keys
from thinwire.client.compute.clock import REAL, Clock
from thinwire.client.compute.errors import Cancelled
from thinwire.client.compute.schedule import Schedule
from thinwire.client.failures import CannotAnswer
from thinwire.core.keys import Key, derive
from thinwire.core.types import Ask, Vector

if TYPE_CHECKING:
    from pathlib import Path

    from thinwire.client.bench import Bench
    from thinwire.client.compute.order import Done, Order
    from thinwire.client.compute.site import Site
    from thinwire.client.owner.limit import Limit
    from thinwire.core.fleet import Delivery
    from thinwire.core.plan import RunPlan

Say = Callable[[str], None]
TakeBase = Callable[[Ask, "Path | None", Shadow], "Vector | None"]
SAY_EVERY_S = (1.0, 60.0)  # at first, and at most after long
SAY_SHARE = 0.1  # of the time since training began, until the next line: a log of hours is a screen
MARGIN = 0.1  # of the deadline, that partial work leaves for what cannot be foreseen
LATER = 0.5  # of the rounds that an answer may be late by: as long as an answer that is late anyway takes its time


@dataclass
class Job:
    """One ask with what stands around it. `device` is this device's name: what is drawn depends on it."""

    delivery: Delivery
    plan: RunPlan
    device: str
    cancelled: Callable[[], bool]
    say: Say
    queue_s: float = 0.0
    slow_step_s: float = 0.0
    may_measure: bool = True
    take_base: TakeBase = exchange.take_base
    may_stop: bool = True  # whether the deadline may end its training, where the plan allows it
    afterwards: Afterwards = field(default_factory=Afterwards)
    clock: Clock = REAL
    limit: Limit | None = None  # the owner's

    def __post_init__(self) -> None:
        waited_s = 0.0 if self.plan.local.overlap else self.queue_s + self.delivery.download_s  # it was sent ahead
        self.until = self.clock.now() - waited_s + self.ask.deadline_s
        self._said_at = -math.inf
        self._began_at: float | None = None  # training, as far as was told

    @property
    def ask(self) -> Ask:
        return self.delivery.ask

    def key(self, purpose: str) -> Key:
        """The key of this assignment's draws for one purpose: the seed, the device's name and the round decide it.

        Nothing else may: neither the run's name nor a path, a time or a process. The same plan gives the same bits
        under every name.
        """
        key = derive(Key(self.plan.run.seed), purpose, self.device, self.ask.round)
        return derive(key, "further") if self.ask.further else key

    @property
    def train_key(self) -> keys.Key:
        key = self.key("train")
        return keys.Key(key.a, key.b)

    def schedule_after(self, pending: int) -> Schedule:
        """The learning rate's, over the part of the run that comes so many changes after this ask's version."""
        local, made, rounds = self.plan.local, self.ask.base_version + pending, self.plan.run.rounds
        return Schedule(local.schedule, local.lr_warmup, local.lr_end, made / rounds, (made + 1) / rounds)

    @property
    def left_s(self) -> float | None:
        """To the deadline, where there is one."""
        return self.until - self.clock.now() if self.ask.deadline_s else None

    def train_within_s(self, dense_bytes: int) -> float | None:
        """How long training and what comes before it may take, where partial work sees to it; None where nothing does.

        Who would come late without any training, by the least that encoding and sending ever took, need not hurry: it
        trains for as long as its answer will still count, by half of the versions that it may be behind, since rounds
        may close before their deadline. The owner's limit ends it before, whatever the deadline.
        """
        cohort, deadline_s = self.plan.cohort, self.ask.deadline_s
        if not (self.plan.local.partial and self.may_stop):
            return None
        limit_s = math.inf if self.limit is None else (1 - MARGIN) * self.limit.left_s
        if (left_s := self.left_s) is None:
            return limit_s if math.isfinite(limit_s) else None
        if cohort.late == "fold" and left_s < self.afterwards.least_s(self.ask.codec):
            left_s += LATER * cohort.max_staleness * deadline_s
        asked = sum(part.length for part in self.ask.parts)
        after_s = self.afterwards.lasts_s(self.ask.codec, dense_bytes, asked, self.delivery.download_s)
        return min(limit_s, left_s - MARGIN * deadline_s - after_s)

    def do(self, bench: Bench, order: Order, site: Site, params: Vector, buffers: Vector | None) -> Done:
        """Have the bench do an order; `CannotAnswer` ("declined") where this device's owner ends it."""
        try:
            return bench.do(order, site, params, buffers, self.tell, self._is_over, self.left_s)
        except Cancelled:
            if self.limit is None or self.cancelled() or (ended := self.limit.over()) is None:
                raise
            raise CannotAnswer("declined", ended.text) from None

    def _is_over(self) -> bool:
        return self.cancelled() or (self.limit is not None and self.limit.over() is not None)

    def tell(self, what: str, done: int, total: int) -> None:
        """A line a second at first, then fewer: one a minute after ten."""
        if what == "measure":
            self.say(f"round {self.ask.round}: measure" if self.ask.kind == "train" else "measure the last model")
            return
        if self.limit is not None:
            self.limit.progressed(done, self.plan.local.min_steps if self.plan.local.partial else total)
        now = self.clock.now()
        self._began_at = now if self._began_at is None else self._began_at
        least_s, most_s = SAY_EVERY_S
        if now - self._said_at < min(most_s, max(least_s, SAY_SHARE * (now - self._began_at))) and done != total:
            return
        self._said_at = now
        left = self.until - now
        deadline = f", deadline in {left:.0f} s" if left >= 0 else f", {-left:.0f} s over the deadline"
        of = f"{done}/{total}" if total else str(done)
        self.say(f"round {self.ask.round}: train {of} steps" + (deadline if self.ask.deadline_s else ""))
