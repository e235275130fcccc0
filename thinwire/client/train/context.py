"""The third argument of a task's own `train(model, data, context)`: what plan, round and device require of a training.

Thinwire cannot look into such a loop. So a key of [local] that the loop must carry out is allowed, and `require_used`
fails the assignment if the loop never called it: `lr()` for a schedule, `should_stop()` for partial work and
overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import BadTask, describe
from .evaluate import MAX_METRIC_LETTERS, ROUNDING, as_number, never
from .protocol import Local
from .schedule import CONSTANT, REAL, Clock, Schedule, TimeBudget

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .protocol import Sums

MAX_REPORTED = 16  # metrics of a training; an aggregator's limit counts them (core/serialization.py)
MAX_METRIC, MIN_COUNT = 1e100, 1e-100  # an aggregator's limits for a sum and a count
MAX_STEPS = 1 << 40  # an aggregator's limit for the steps of a reply
KEYS = frozenset(each.name for each in dataclasses.fields(Local))


def nothing(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class TrainingControl:
    """Connects a training with its assignment: schedule, time budget, clock, cancellation, progress and its steps.

    `steps` are those that the plan assigns, 0 if it leaves their number to the device.
    """

    schedule: Schedule = CONSTANT
    budget: TimeBudget | None = None
    clock: Clock = REAL
    cancelled: Callable[[], bool] = never
    progress: Callable[[int, int], None] = nothing
    steps: int = 0


@dataclass
class Context:
    """The context of one training: an assignment as the task's own `train(model, data, context)` sees it.

    `local` is the plan's section [local]. `round` counts from 1, `version` is that of the model that is trained, and
    `site` is the client's name as `data(client)` gets it. `state` is a dict of named arrays of numbers: what this
    client's last training in this run left there, and empty in its first one. It never leaves the client. `may_report`
    is False in runs with privacy, and in those with secure aggregation that sum no metric of training.

    >>> context = Context(Local(lr=0.1, steps=2))
    >>> for step in range(context.local.steps):
    ...     if context.should_stop():
    ...         break
    ...     context.report("loss", 0.5, count=8)
    ...     context.progress(step + 1, context.local.steps)
    >>> context.metrics, context.lr(0.5)
    ({'loss': (8.0, 16.0)}, 0.1)
    """

    local: Local
    round: int = 1
    version: int = 0
    site: str = "here"
    state: dict[str, NDArray[Any]] = field(default_factory=dict, repr=False)
    may_report: bool = True
    control: TrainingControl = field(default_factory=TrainingControl, repr=False)
    done: int = field(init=False, default=0)  # steps, as `progress` reported them
    total: int = field(init=False, default=0)  # all steps; 0: unknown
    is_cancelled: bool = field(init=False, default=False)
    is_out_of_time: bool = field(init=False, default=False)
    _sums: dict[str, tuple[float, float]] = field(init=False, default_factory=dict, repr=False)
    _used: set[str] = field(init=False, default_factory=set, repr=False)
    _called_at: float | None = field(init=False, default=None, repr=False)

    def lr(self, progress: float) -> float:
        """Return the learning rate by the plan's schedule at a position in this training, from 0 to 1.

        A position outside counts as the nearer end. The middle of step k of n, from 0, is (k + 0.5) / n: at 0, its
        beginning, the rate of a warm-up is 0.
        """
        self._used.add("lr")
        return self.local.lr * self.control.schedule.at(min(1.0, max(0.0, float(progress))))

    @property
    def deadline_s(self) -> float | None:
        """Return the seconds that are left for training, 0 or more; None if no deadline ends it.

        A deadline ends training with `[local] partial = true` only.
        """
        budget = self.control.budget
        return None if budget is None else max(0.0, budget.until - self.control.clock.now())

    def should_stop(self) -> bool:
        """Return True if training must end now: its assignment was withdrawn, or there is no time for another step.

        Call it once a step. The time between two calls is the estimate of the next step. The deadline never prevents
        the first step.
        """
        self._used.add("should_stop")
        self.is_cancelled = self.is_cancelled or self.control.cancelled()
        now, before = self.control.clock.now(), self._called_at
        self._called_at = now
        if self.control.budget is not None and (self.done or before is not None):
            step_s = 0.0 if before is None else now - before
            budget = self.control.budget
            self.is_out_of_time = self.is_out_of_time or budget.over(budget.least, step_s)
        return self.is_cancelled or self.is_out_of_time

    def progress(self, done: int, total: int = 0) -> None:
        """Record that `done` of `total` steps are made (0: unknown); raise `BadTask` for numbers that no training has.

        The client shows it, and it is a sign of life. The reply has both numbers: a training that ended early is known
        by them. `BadTask` is also raised for more steps than `[local] steps` assigns, because an aggregator rejects
        such an update.
        """
        done, total = int(done), int(total)
        if not (0 <= done <= MAX_STEPS and 0 <= total <= MAX_STEPS):
            raise BadTask(
                f"context.progress({done}, {total}) is not valid",
                why="it takes the number of steps made and the number of all steps, 0 if unknown",
                hint="context.progress(step + 1, steps)",
            )
        if self.control.steps and done > self.control.steps:
            raise BadTask(
                f"context.progress() counted {done} steps, and [local] steps assigns {self.control.steps}",
                why="an aggregator rejects an update of more steps than it assigned",
                hint="end the loop after context.local.steps; or leave steps out of the plan: then a loop decides",
            )
        self.done, self.total = done, max(done, total) if total else 0
        self.control.progress(self.done, self.total)

    def report(self, name: str, value: Any, count: Any = 1) -> None:
        """Add to a metric of this training: `value` is a mean over `count` examples.

        Calls with the same name are averaged by their counts, and so are the clients of a round. It appears as
        `train/NAME` among the run's metrics. A metric that is NaN, infinite or over 1e100 is left out of the reply.
        In a run with secure aggregation only the metrics of `[secure] metrics` leave the client, as part of the sum.
        Raises `BadTask` in a run that takes no metric of training (`may_report`), and for a name, a value or a count
        that no metric has.
        """
        if not self.may_report:
            raise BadTask(
                "context.report() in a run with privacy, or with secure aggregation that sums no metric of training",
                why="the metrics of one client would tell what the sum or the noise of its update hides",
                hint="if context.may_report: context.report(...)",
            )
        mean, weight = (as_number(each.detach() if hasattr(each, "detach") else each) for each in (value, count))
        if mean is None or weight is None:
            _refuse(f"a value that is {describe(value)} and a count that is {describe(count)}", "both are numbers")
        if not weight >= 0:
            _refuse("a negative count or NaN as count", "it is the number of examples behind the value")
        if not _is_name(name):
            _refuse("a name that is not valid", f"an aggregator takes 1 to {MAX_METRIC_LETTERS} printable letters")
        if name not in self._sums and len(self._sums) == MAX_REPORTED:
            _refuse(f"more than {MAX_REPORTED} names", f"an aggregator takes {MAX_REPORTED} metrics of a training")
        if name.rpartition("/")[2] == "accuracy" and (mean < 0 or mean > 1 + ROUNDING):
            _refuse("an accuracy outside 0 to 1", "it is the share of the examples that were right")
        total, counted = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + mean * weight, counted + weight)

    @property
    def metrics(self) -> Sums:
        """Return {name: (sum, count)} of all reports whose sum can be sent."""
        return {
            name: (total, count)
            for name, (total, count) in self._sums.items()
            if abs(total) <= MAX_METRIC and MIN_COUNT < count < MAX_METRIC
        }

    def require_used(self) -> None:
        """Raise `BadTask` if the plan needs what only train() can do, and train() never called it."""
        local = self.local
        moves = local.schedule != Local.schedule or local.lr_warmup > 0
        needed = (
            ("lr", moves, "a [local] schedule", "context.lr((step + 0.5) / steps) is the learning rate of a step"),
            ("should_stop", local.partial, "[local] partial = true", STOPS),
            ("should_stop", local.overlap is not None, "[local] overlap", STOPS),
        )
        for name, wanted, key, hint in needed:
            if wanted and name not in self._used:
                raise BadTask(
                    f"{key} with a train() that never called context.{name}()",
                    why="the whole loop is the task's, so nothing else can carry it out",
                    hint=f"{hint}; or leave the key out of the plan",
                )

    def __getattr__(self, name: str) -> Any:
        """Refuse a name that a Context does not have; a key of [local] is in `local`."""
        said = f"; the plan's [local] {name} is context.local.{name}" if name in KEYS else ""
        raise AttributeError(f"a Context has no {name}{said}")


STOPS = "if context.should_stop(): break, once a step"


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_METRIC_LETTERS and name.isprintable()


def _refuse(what: str, why: str) -> NoReturn:
    raise BadTask(f"context.report() got {what}", why=why, hint='context.report("loss", float(loss), len(batch))')
