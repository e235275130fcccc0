"""Hold one assignment with everything its work needs: keys, schedule, deadline, progress and limits.

`AssignmentContext` is the context of one assignment. `UplinkTimeEstimator` estimates the time that encoding and
uploading will take from the times that they took before, so that training ends early enough (`[local] partial`).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.aggregation.downlink import ModelReplica
from thinwire.client import payload
from thinwire.client.errors import CannotAnswer
from thinwire.client.train import layout
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.schedule import REAL, Clock, Schedule
from thinwire.core.formatting import p90
from thinwire.core.prng import Key, derive
from thinwire.core.types import Ask, ReplyHeader, Vector

if TYPE_CHECKING:
    from pathlib import Path

    from thinwire.client.admission import Limit
    from thinwire.client.executor import Executor
    from thinwire.client.train.protocol import Site, TrainRequest, TrainResult
    from thinwire.core.fleet import Delivery
    from thinwire.core.plan import RunPlan


KEPT = 20  # measured times kept of each codec
ENCODES = 50e6  # model bytes encoded per second: a guess until the first encode, far below what a small board does
SLOWER = 4.0  # the uplink is taken to be this much slower than the downlink until an upload was measured


def _kept() -> defaultdict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=KEPT))


@dataclass
class UplinkTimeEstimator:
    """The times that encoding and uploading took in one run on this device.

    They are kept in memory, so a new process begins with a guess.
    """

    encoding: defaultdict[str, deque[float]] = field(default_factory=_kept)  # codec -> seconds
    sending: defaultdict[str, deque[float]] = field(default_factory=_kept)

    def encoded(self, head: ReplyHeader, commit_s: float) -> None:
        """Record one encode and its commit, which took `commit_s` more."""
        self.encoding[head.codec].append(head.timings.encode_s + commit_s)

    def sent(self, head: ReplyHeader, upload_s: float) -> None:
        """Record one upload in seconds."""
        self.sending[head.codec].append(upload_s)

    def least_s(self, codec: str) -> float:
        """Return the least seconds that both took with this codec; 0 if that is not known."""
        if codec not in self.encoding or codec not in self.sending:
            return 0.0
        return min(self.encoding[codec]) + min(self.sending[codec])

    def lasts_s(self, codec: str, dense_bytes: int, asked_bytes: int, download_s: float) -> float:
        """Return the seconds to reserve after training: the p90 of both, or a guess that errs on the long side.

        The guess is for a whole model of `dense_bytes`, on an uplink that is `SLOWER` than the downlink. The downlink's
        speed is that of the assignment: `asked_bytes` in `download_s`. The p90 of another codec is used if it is larger
        than the guess.
        """
        down_s = SLOWER * download_s * dense_bytes / asked_bytes if asked_bytes else 0.0
        return _expected(self.encoding, codec, dense_bytes / ENCODES) + _expected(self.sending, codec, down_s)


def _expected(known: defaultdict[str, deque[float]], codec: str, guess: float) -> float:
    if codec in known:
        return p90(known[codec])
    return max([guess, *(p90(seconds) for seconds in known.values())])


Say = Callable[[str], None]
TakeBase = Callable[[Ask, "Path | None", ModelReplica], "Vector | None"]
SAY_EVERY_S = (1.0, 60.0)  # least and most seconds between two progress lines
SAY_SHARE = 0.1  # of the time since training began, until the next line: a log of hours fits on a screen
MARGIN = 0.1  # of the deadline, which partial work leaves free as a reserve
LATER = 0.5  # of the allowed staleness, which a client that misses the deadline anyway may train for


@dataclass
class AssignmentContext:
    """The context of one assignment.

    `device` is this device's name, on which the random draws depend. `queue_s` is the time that the assignment waited
    here. `may_measure` allows evaluation.
    """

    delivery: Delivery
    plan: RunPlan
    device: str
    cancelled: Callable[[], bool]
    say: Say
    queue_s: float = 0.0
    slow_step_s: float = 0.0
    may_measure: bool = True
    take_base: TakeBase = payload.take_base
    may_stop: bool = True  # the deadline may end training if the plan allows it
    afterwards: UplinkTimeEstimator = field(default_factory=UplinkTimeEstimator)
    clock: Clock = REAL
    limit: Limit | None = None  # the owner's

    def __post_init__(self) -> None:
        # With overlap the assignment was sent ahead, so its deadline starts when the work does.
        waited_s = 0.0 if self.plan.local.overlap else self.queue_s + self.delivery.download_s
        self.until = self.clock.now() - waited_s + self.ask.deadline_s
        self._said_at = -math.inf
        self._began_at: float | None = None  # time of the first progress report of training

    @property
    def ask(self) -> Ask:
        """Return the assignment."""
        return self.delivery.ask

    def key(self, purpose: str) -> Key:
        """Return the key of this assignment's draws for one purpose, from the seed, the device's name and the round.

        Nothing else may decide it: neither the run's name nor a path, a time or a process. Invariant: the same plan
        gives the same bits under every name.
        """
        key = derive(Key(self.plan.run.seed), purpose, self.device, self.ask.round)
        return derive(key, "further") if self.ask.further else key

    @property
    def train_key(self) -> layout.Key:
        """Return the key of training in the worker's own type."""
        key = self.key("train")
        return layout.Key(key.a, key.b)

    def schedule_after(self, pending: int) -> Schedule:
        """Return the learning rate's schedule for the part of the run that follows `pending` updates after this
        version.
        """
        local, made, rounds = self.plan.local, self.ask.base_version + pending, self.plan.run.rounds
        return Schedule(local.schedule, local.lr_warmup, local.lr_end, made / rounds, (made + 1) / rounds)

    @property
    def left_s(self) -> float | None:
        """Return the seconds to the deadline, None if there is none."""
        return self.until - self.clock.now() if self.ask.deadline_s else None

    def train_within_s(self, dense_bytes: int) -> float | None:
        """Return the seconds that training and the work before it may take, None if no limit applies.

        A deadline limits training only with partial work. A client that would miss it without any training, by the
        least time that encoding and uploading ever took, need not hurry. It trains for as long as its update will still
        count: half of the allowed staleness, since rounds may close before their deadline. The owner's limit ends
        training before that, whatever the deadline.
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

    def do(
        self, bench: Executor, order: TrainRequest, site: Site, params: Vector, buffers: Vector | None
    ) -> TrainResult:
        """Execute an order on the bench; `CannotAnswer` ("declined") if the owner's limit ends it."""
        try:
            return bench.do(order, site, params, buffers, self.tell, self._is_over, self.left_s)
        except Cancelled:
            if self.limit is None or self.cancelled() or (ended := self.limit.over()) is None:
                raise
            raise CannotAnswer("declined", ended.text) from None

    def _is_over(self) -> bool:
        return self.cancelled() or (self.limit is not None and self.limit.over() is not None)

    def tell(self, what: str, done: int, total: int) -> None:
        """Print the progress of evaluation or training, once a second at first and once a minute after ten minutes."""
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
