"""The context of one assignment: its keys, schedule, deadline, progress and limits, for the work in client/execute.py.

`AssignmentContext` also lets the executor carry out a request, and ends it at the owner's limit. `HandlerEnvironment`
is what all assignments of a handler share: the files, the models and the clock of its machine. `UplinkTimeEstimator`
estimates how long encoding and uploading will take, so that partial work ends early enough (`[local] partial`).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.client import payload
from thinwire.client.calls import Say
from thinwire.client.errors import CannotReply
from thinwire.client.run_state import RunFolder, Write
from thinwire.client.train import layout as keys
from thinwire.client.train.errors import Cancelled
from thinwire.client.train.protocol import TrainRequest, TrainResult
from thinwire.client.train.schedule import REAL, Clock, Schedule
from thinwire.core.formatting import p90
from thinwire.core.prng import Key, derive
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Assignment, ReplyHeader, Vector

if TYPE_CHECKING:
    from thinwire.client.admission import WorkLimit
    from thinwire.client.executor import Executor
    from thinwire.client.train.protocol import ClientInfo
    from thinwire.core.fleet import Delivery
    from thinwire.core.plan import RunPlan

SAY_EVERY_S = (1.0, 60.0)  # least and most seconds between two progress lines
SAY_SHARE = 0.1  # of the time since training began, between two lines: the log of hours fits on a screen
MARGIN = 0.1  # share of the deadline that partial work leaves as a reserve
LATE_SHARE = 0.5  # share of the allowed staleness for which a client trains that misses the deadline anyway
TOO_LONG = "max_assignment_minutes: the work takes longer than is allowed"


@dataclass(frozen=True)
class HandlerEnvironment:
    """The functions by which a handler uses its machine. Simulations and tests replace some of the defaults.

    `write` writes one file durably. `folders` opens the directory of a run; None opens a write-behind one.
    `update_replica` brings a replica to an assignment's model version. `keep_shared` gets the shared models of runs
    with personal layers. With `may_stop`, a deadline ends training if the plan allows it. With `debug`, the errors of
    a task are raised; otherwise they become failures.
    """

    write: Write = write_atomically
    folders: Callable[[Path, str], RunFolder] | None = None
    update_replica: payload.UpdateReplica = payload.update_replica
    keep_shared: payload.KeepShared | None = None
    clock: Clock = REAL
    may_stop: bool = True
    debug: bool = False


MAX_TIMES = 20  # latest times of each codec, from which the next one is estimated
ENCODE_BYTES_A_SECOND = 50e6  # of the model: a guess until the first encode, far below the speed of a small board
UPLINK_SLOWDOWN = 4.0  # how much slower than the downlink the uplink is, as a guess until the first upload


def _recent_times() -> defaultdict[str, deque[float]]:
    return defaultdict(lambda: deque(maxlen=MAX_TIMES))


@dataclass
class UplinkTimeEstimator:
    """Estimates the time of encoding and uploading in one run on this device, from the times that were measured before.

    The times are kept in memory, so a new process begins with a guess.
    """

    encoding: defaultdict[str, deque[float]] = field(default_factory=_recent_times)  # codec -> seconds
    sending: defaultdict[str, deque[float]] = field(default_factory=_recent_times)

    def add_encode(self, header: ReplyHeader, commit_s: float) -> None:
        """Record one encode and its commit, which took `commit_s` more."""
        self.encoding[header.codec].append(header.timings.encode_s + commit_s)

    def add_upload(self, header: ReplyHeader, upload_s: float) -> None:
        """Record one upload in seconds."""
        self.sending[header.codec].append(upload_s)

    def min_s(self, codec: str) -> float:
        """Return the least seconds that both took with this codec; 0 if that is not known."""
        if codec not in self.encoding or codec not in self.sending:
            return 0.0
        return min(self.encoding[codec]) + min(self.sending[codec])

    def estimate_s(self, codec: str, dense_bytes: int, assigned_bytes: int, download_s: float) -> float:
        """Return the seconds to reserve after training: the p90 of both, or a guess that errs on the long side.

        The guess is for a whole model of `dense_bytes`, on an uplink `UPLINK_SLOWDOWN` times slower than the downlink.
        The downlink's speed is that of the assignment: `assigned_bytes` in `download_s`. The p90 of another codec is
        used if it is larger than the guess.
        """
        upload_s = UPLINK_SLOWDOWN * download_s * dense_bytes / assigned_bytes if assigned_bytes else 0.0
        encode_s = _expected(self.encoding, codec, dense_bytes / ENCODE_BYTES_A_SECOND)
        return encode_s + _expected(self.sending, codec, upload_s)


def _expected(known: defaultdict[str, deque[float]], codec: str, guess: float) -> float:
    if codec in known:
        return p90(known[codec])
    return max([guess, *(p90(seconds) for seconds in known.values())])


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
    may_measure: bool = True
    uplink_estimator: UplinkTimeEstimator = field(default_factory=UplinkTimeEstimator)
    limit: WorkLimit | None = None  # the owner's
    began: float = 0.0  # when the work on the assignment began, by `clock`
    max_state_bytes: int = 0  # of `context.state`, the owner's limit
    loaded: Callable[[Vector | None], None] = lambda buffers: None  # called with the float buffers of the loaded model
    folder: Path | None = None  # the client's
    environment: HandlerEnvironment = HandlerEnvironment()

    def __post_init__(self) -> None:
        # With overlap the assignment was sent ahead, so its deadline starts when the work does.
        waited_s = 0.0 if self.plan.local.overlap else self.queue_s + self.delivery.download_s
        self.until = self.clock.now() - waited_s + self.assignment.deadline_s
        self._said_at = -math.inf
        self._began_at: float | None = None  # time of the first progress report of training

    @property
    def clock(self) -> Clock:
        """Return the clock of the handler's machine."""
        return self.environment.clock

    @property
    def assignment(self) -> Assignment:
        """Return the assignment."""
        return self.delivery.assignment

    def key(self, purpose: str) -> Key:
        """Return the key of this assignment's draws for one purpose, from the seed, the device's name and the round.

        Nothing else may decide it: neither the run's name nor a path, a time or a process. Invariant: the same plan
        gives the same bits under every name.

        Under masks the run's identity decides too. A restored aggregator makes a round again under another one, and two
        sums with the same updates and other clients would have one client's update as their difference.
        """
        key = derive(Key(self.plan.run.seed), purpose, self.device, self.assignment.round)
        if self.assignment.secure is not None and self.assignment.identity:
            key = derive(key, self.assignment.identity)
        return derive(key, "further") if self.assignment.is_follow_up else key

    @property
    def train_key(self) -> keys.Key:
        """Return the key of training in the worker's own type."""
        key = self.key("train")
        return keys.Key(key.a, key.b)

    def schedule_after(self, pending: int) -> Schedule:
        """Return the learning rate's schedule for the part of the run that follows `pending` updates after this
        version.
        """
        local, made = self.plan.local, self.assignment.base_version + pending
        rounds = local.schedule_rounds or self.plan.run.rounds
        return Schedule(local.schedule, local.lr_warmup, local.lr_end, made / rounds, (made + 1) / rounds)

    @property
    def left_s(self) -> float | None:
        """Return the seconds to the deadline, None if there is none."""
        return self.until - self.clock.now() if self.assignment.deadline_s else None

    def train_within_s(self, dense_bytes: int) -> float | None:
        """Return the seconds that training and the work before it may take, None if no limit applies.

        A deadline limits training only with partial work. A client misses it even without training if encoding and
        uploading alone take longer, by their least measured time. Such a client trains for half of the allowed
        staleness, so that its late update still counts although rounds may close before their deadline. The owner's
        limit applies in any case.
        """
        cohort, deadline_s, codec = self.plan.cohort, self.assignment.deadline_s, self.assignment.codec
        if not (self.plan.local.partial and self.environment.may_stop):
            return None
        limit_s = math.inf if self.limit is None else (1 - MARGIN) * self.limit.left_s
        if (left_s := self.left_s) is None:
            return limit_s if math.isfinite(limit_s) else None
        if cohort.late == "aggregate" and left_s < self.uplink_estimator.min_s(codec):
            left_s += LATE_SHARE * cohort.max_staleness * deadline_s
        download_bytes = sum(part.length for part in self.assignment.parts)
        after_s = self.uplink_estimator.estimate_s(codec, dense_bytes, download_bytes, self.delivery.download_s)
        return min(limit_s, left_s - MARGIN * deadline_s - after_s)

    def do(
        self, executor: Executor, request: TrainRequest, client: ClientInfo, params: Vector, buffers: Vector | None
    ) -> TrainResult:
        """Let the executor carry out a request; `CannotReply` ("declined") if the owner's limit ends it.

        The text of a protected plan has no times: how long a step takes may tell how many examples the device has.
        """
        try:
            return executor.do(request, client, params, buffers, self.print_progress, self._is_over, self.left_s)
        except Cancelled:
            if self.limit is None or self.cancelled() or (ended := self.limit.exceeded()) is None:
                raise
            text = TOO_LONG if self.plan.is_protected and ended.rule == "max_assignment_minutes" else ended.text
            raise CannotReply("declined", text, owner_text=ended.text) from None

    def _is_over(self) -> bool:
        return self.cancelled() or (self.limit is not None and self.limit.exceeded() is not None)

    def print_progress(self, what: str, done: int, total: int) -> None:
        """Print the progress of evaluation or training, once a second at first and once a minute after ten minutes."""
        trains = self.assignment.kind == "train"
        if what == "load":
            where = f"round {self.assignment.round}: " if trains else ""
            self.say(f"{where}loading the task in a new worker, after idle time or an error")
            return
        if what == "measure":
            self.say(f"round {self.assignment.round}: evaluate" if trains else "evaluate the last model")
            return
        if self.limit is not None:
            self.limit.record_progress(done, self.plan.local.min_steps if self.plan.local.partial else total)
        now = self.clock.now()
        self._began_at = now if self._began_at is None else self._began_at
        least_s, most_s = SAY_EVERY_S
        if now - self._said_at < min(most_s, max(least_s, SAY_SHARE * (now - self._began_at))) and done != total:
            return
        self._said_at = now
        left = self.until - now
        deadline = f", deadline in {left:.0f} s" if left >= 0 else f", {-left:.0f} s over the deadline"
        of = f"{done}/{total}" if total else str(done)
        self.say(f"round {self.assignment.round}: train {of} steps" + (deadline if self.assignment.deadline_s else ""))
