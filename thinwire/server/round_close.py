"""The sum of a round and its close: updates are added one at a time (`AggregationQueue`), then `finish` makes the step
and the model version durable, and records all of it in one commit.

The updates are aggregated again if the closed round shows that one of them counts otherwise. There are two reasons. An
update counts less if its client's weight is over the cap, which follows from the medians of the whole round. It does
not count at all if the sum becomes too large for a model, so that one device cannot end a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from thinwire.aggregation.mean import Frames
from thinwire.core.errors import BadPayload, NotWritten
from thinwire.core.events import NO_STEP, Event, RoundClosed
from thinwire.core.formatting import Capped
from thinwire.core.score_histogram import TRAINED
from thinwire.core.statedir import ON_FULL_DISK
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server.aggregator import RoundAggregator, caps_of, largest_norm
from thinwire.server.evaluation import pooled
from thinwire.server.round_events import RoundResult
from thinwire.server.round_measurements import learn_speeds, recorded_metrics, time_spent

if TYPE_CHECKING:
    from thinwire.server.round_runner import RoundRunner

AGGREGATION_WAIT_S = 0.01  # small updates are aggregated within this; longer ones must not block the poll
RETRY_S = 1.0  # between two tries to open a reply
MAX_CLAIM_S = 1.0  # of the claim to devices during a step; in a longer step they would wait for nothing
StepResult = tuple[RoundResult, dict[str, Capped]]  # the final result, and the updates that count less


def finish(runner: RoundRunner) -> None:
    """Make the step of a closed round, store the new version, record the round's end and acknowledge its replies.

    A round that closes as `too-few` or `stopped` makes no step, nor does one whose result may not be released.

    Invariant: the new version is on disk before the commit that names it. All replies are acknowledged only after this
    commit.
    """
    running, closed = runner.running, runner.machine.closed
    assert closed is not None
    start, now, events = time.perf_counter(), running.clock.wall(), list[Event]()
    closed, capped = _step(runner, closed, events)
    spent, version = {"step_s": 0.0, "store_s": 0.0}, running.run_state.version
    if closed.reason not in NO_STEP:
        stepped, version = time.perf_counter(), version + 1
        events += _store(runner, version, now)
        spent = {"step_s": stepped - start, "store_s": time.perf_counter() - stepped}
    events += [*runner.sum_events(), *runner.evaluation_events(now)]
    events.append(_closing_event(runner, closed, version, capped, spent, now))
    runner.record(*events, measured=learn_speeds(runner, now))
    running.mode.reveal(running)
    _acknowledge(runner, closed)
    runner.clean_up()


def _step(runner: RoundRunner, closed: RoundResult, events: list[Event]) -> StepResult:
    """Make the step of a round, if it makes one and its result may be released."""
    running = runner.running
    if closed.reason not in NO_STEP and (why := running.mode.withheld(running, runner.opened.round)):
        closed = RoundResult("aborted", (), (*closed.dropped, *closed.aggregated), closed.outstanding, why)
    if closed.reason in NO_STEP:
        return closed, {}
    step = partial(_move_model, runner, closed, events)
    return _step_in_thread(runner, step) if runner.aggregator.steps_in_thread and not running.simulated else step()


def _store(runner: RoundRunner, version: int, now: float) -> list[Event]:
    """Write the new model version to the disk, and return the events that name it."""
    running, model = runner.running, runner.running.model
    stored = running.versions.write(version, model.params, model.buffers, model.counters, now, model.state)
    events = [stored, *running.distributor.publish(version, now)]
    return [*events, *running.mode.released(running, runner.opened.round, events[-1], runner.aggregator)]


def _closing_event(
    runner: RoundRunner, closed: RoundResult, version: int, capped: dict[str, Capped], spent: dict[str, float],
    now: float,
) -> RoundClosed:  # fmt: skip
    """Return the event of the round's end; `spent` has the seconds of the step and of storing its version."""
    running, summed = runner.running, runner.aggregator.metrics
    counted = [runner.headers[update_id] for update_id in closed.aggregated]
    slowest, stages = time_spent(runner, closed, counted)
    return RoundClosed(
        at=now,
        round=runner.opened.round,
        reason=closed.reason,
        version=version,
        aggregated=[str(u) for u in closed.aggregated],
        dropped=[str(u) for u in closed.dropped],
        outstanding=list(closed.outstanding),
        elapsed_s=running.elapsed,
        seconds=running.elapsed - runner.machine.config.opened_s + running.run_state.open_rounds.progress.missed_s,
        metrics=pooled([summed] if summed else (header.metrics for header in counted), TRAINED),
        spent=stages | spent,
        slowest=slowest,
        capped=capped,
        detail=closed.detail,
        chosen=runner.aggregator.chosen,
        norms=_norms_of_round(runner, closed),
        **recorded_metrics(runner),
    )


def _acknowledge(runner: RoundRunner, closed: RoundResult) -> None:
    """Acknowledge the replies of a recorded round, and cancel the assignments that get none any more."""
    running, machine = runner.running, runner.machine
    running.fleet.ack(list(runner.headers))
    if running.plan.is_protected:  # what is here of a late update is in the clear, and will never be used
        running.fleet.drop_uploads(running.run_id)
    lost = [machine.assignments[device] for device, kind in machine.lost.items() if kind == "offline"]
    running.fleet.cancel(lost if closed.reason != "stopped" else list(machine.assignments.values()))


def _step_in_thread(runner: RoundRunner, step: Callable[[], StepResult]) -> StepResult:
    """Make a step in a thread of its own, let other runs work meanwhile, and return the step's result.

    The run handles its arrivals after the step, as if the step had taken no time. For MAX_CLAIM_S it claims its devices
    for the next round, as it does while updates are added. After that other runs may select them.
    """
    running, claims_until = runner.running, time.monotonic() + MAX_CLAIM_S
    with ThreadPoolExecutor(1, thread_name_prefix="step") as worker:
        made = worker.submit(step)
        while wait([made], timeout=AGGREGATION_WAIT_S).not_done:
            claims = not running.run_state.ledger.busy and time.monotonic() < claims_until
            running.leases.want(running.run_id, runner.machine.assignments if claims else ())
            running.unread += running.fleet.poll(0.0)
        return made.result()


def _norms_of_round(runner: RoundRunner, closed: RoundResult) -> list[float]:
    """Return the norms of the round's updates, if the plan bounds those of later rounds by a quantile of them."""
    if not isinstance(runner.plan.server.max_norm, str) or closed.reason in NO_STEP:
        return []
    return [runner.aggregator.norms[str(update_id)] for update_id in closed.aggregated]


def _move_model(runner: RoundRunner, closed: RoundResult, events: list[Event]) -> StepResult:
    """Move the model by the round's updates; return the final result, and the updates that count less.

    If the sum is too large for a model, the step is made without the updates that caused this. They are dropped. If too
    few updates are left, no step is made.
    """
    running, headers = runner.running, [runner.headers[update_id] for update_id in closed.aggregated]
    caps, bounds = caps_of(runner.plan, headers), runner.plan.server.max_norm is not None
    if bounds:
        own = [runner.aggregator.norms[str(header.update_id)] for header in headers]
        caps = replace(caps, norm=largest_norm(runner.plan, running.run_state.norms or own))
    capped = runner.aggregator.capped(caps, headers)
    again = any(key in found for found in capped.values() for key in ("counted", "a_counted"))
    again = again or (bounds and caps.norm != runner.aggregator.caps.norm)
    if not again and runner.aggregator.fits():
        runner.aggregator.step(running.model, running.run_state.steps_made)
        return closed, capped
    new = partial(running.mode.aggregator, running, runner.opened, caps if again else None)
    discounts = {event.update_id: event.discount for event in running.run_state.open_rounds.progress.accepted}
    aggregated = [(header, runner.frames(header.update_id), discounts[str(header.update_id)]) for header in headers]
    if again:
        runner.aggregator = runner.aggregator.replaced(new)  # frees the memory of the old sum
        add_again(runner.aggregator, aggregated)
        if runner.aggregator.fits():
            runner.aggregator.step(running.model, running.run_state.steps_made)
            return closed, capped
    runner.aggregator = new()
    runner.aggregator, left_out = aggregated_without(new, aggregated)
    too_large = [header.update_id for header in left_out]
    for update_id in too_large:
        events += runner.drop_events(update_id, "bad-payload", TOO_LARGE)
    left = tuple(u for u in closed.aggregated if u not in too_large)
    if len(left) < runner.opened.min_updates:
        return RoundResult("too-few", (), (*closed.dropped, *closed.aggregated), closed.outstanding), {}
    runner.aggregator.step(running.model, running.run_state.steps_made)
    counted = {str(u): capped[str(u)] for u in left if str(u) in capped}
    return RoundResult(closed.reason, left, (*closed.dropped, *too_large), closed.outstanding), counted


TOO_LARGE = "numbers too large to be added"
AggregatedUpdate = tuple[ReplyHeader, Frames, float]  # an update's reply header, frames and discount


def aggregated_without(
    new: Callable[[], RoundAggregator], aggregated: Sequence[AggregatedUpdate]
) -> tuple[RoundAggregator, list[ReplyHeader]]:
    """Return an aggregator of the updates whose sum fits, in their order, and the updates that are left out.

    An update is left out if the sum fits before it and does not fit with it. This depends on the order alone, so a
    restart leaves out the same updates.
    """
    aggregator, too_large = new(), list[ReplyHeader]()
    for header, frames, discount in aggregated:
        before = aggregator.copy()
        aggregator.add(header, frames, discount)
        if not aggregator.fits():
            aggregator = before
            too_large.append(header)
    return aggregator, too_large


def add_again(aggregator: RoundAggregator, aggregated: Sequence[AggregatedUpdate]) -> None:
    """Add updates that were aggregated before to an empty aggregator, in their order."""
    for header, frames, discount in aggregated:
        aggregator.add(header, frames, discount)


@dataclass(frozen=True)
class AggregationResult:
    """The result of one addition, which took `seconds`; `error` says what is wrong with the payload."""

    update_id: UpdateId
    seconds: float
    error: BadPayload | None = None


class AggregationQueue:
    """Additions that were started and are not reported yet, on one worker thread, first in, first out.

    One worker keeps the order of the journal. With `at_once` additions run in the calling thread, since a thread costs
    more than a small addition if nothing else waits. `BadPayload` rejects the update; any other exception is a defect
    of Thinwire and is raised by `finished`, or with `at_once` by `begin`. The worker waits while the process has
    too many open files to open a reply.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._closing = threading.Event()
        self._worker: ThreadPoolExecutor | None = None
        if not at_once:
            self._worker = ThreadPoolExecutor(1, "aggregation", initializer=ON_FULL_DISK.set, initargs=(self._wait,))
        self._done: list[AggregationResult] = []
        self._begun: dict[UpdateId, Future[AggregationResult]] = {}  # in their order

    def _wait(self, error: NotWritten) -> None:
        """Wait before the worker's next try to open a reply; raise `error` once the queue is closed."""
        if self._closing.wait(RETRY_S):
            raise error

    def begin(self, update_id: UpdateId, add: Callable[[], None]) -> None:
        """Start an addition, and time it."""

        def timed() -> AggregationResult:
            start = time.perf_counter()
            try:
                add()
            except BadPayload as error:
                return AggregationResult(update_id, time.perf_counter() - start, error)
            return AggregationResult(update_id, time.perf_counter() - start)

        if self._worker is None:
            self._done.append(timed())
            return
        self._begun[update_id] = self._worker.submit(timed)

    def withdraw(self, update_id: UpdateId) -> bool:
        """Return True if an addition could be cancelled before it began; it is not reported then."""
        future = self._begun.get(update_id)
        if future is None or not future.cancel():
            return False
        del self._begun[update_id]
        return True

    def finished(self, wait_s: float = 0.0) -> list[AggregationResult]:
        """Return the results of finished additions in their order, after waiting up to `wait_s` for the first."""
        if self._begun and wait_s:
            wait(list(self._begun.values())[:1], timeout=wait_s)
        done, self._done = self._done, []
        for update_id, future in list(self._begun.items()):
            if not future.done():
                break
            del self._begun[update_id]  # its exception would keep the aggregator alive
            done.append(future.result())
        return done

    def settle(self) -> None:
        """Wait until all additions that were started have ended; `finished` reports them."""
        wait(self._begun.values())

    @property
    def running(self) -> bool:
        """Return True if an addition is not reported yet."""
        return bool(self._begun or self._done)

    def close(self) -> None:
        """Cancel the additions that have not begun, and wait for the running one."""
        self._closing.set()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
