"""The sum of a round and its close: updates are added one at a time (`AggregationQueue`), then `finish` makes the step
and the model version durable, and records all of it in one commit.

The updates are aggregated again if the closed round shows that one of them counts otherwise. There are two reasons. An
update counts less if its client's weight is over the cap, which follows from the medians of the whole round. It does
not count at all if the sum becomes too large for a model, so that one device cannot end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from thinwire.core.errors import BadPayload
from thinwire.core.events import NO_STEP, Event, RoundClosed
from thinwire.core.formatting import Capped
from thinwire.core.score_histogram import MEASURED, TRAINED
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server.aggregator import Frames, RoundAggregator, caps_of, largest_norm
from thinwire.server.device_terms import assigned_steps
from thinwire.server.evaluation import names_in, pooled
from thinwire.server.round_events import RoundResult
from thinwire.store import MeasureRow
from thinwire.store.device_profiles import at_own_pace, durations, epochs_of, most_steps, work_key

if TYPE_CHECKING:
    from thinwire.server.round_runner import RoundRunner

AGGREGATION_WAIT_S = 0.01  # small updates are aggregated within this; longer ones must not block the poll
CLAIM_S = 1.0  # a step that takes longer than a short round would let devices wait for nothing
Stepped = tuple[RoundResult, dict[str, Capped]]  # the final result, and the updates that count less


def finish(one: RoundRunner) -> None:
    """Make the step and record the round's end.

    A round that closes as `too-few` or `stopped` makes no step, nor does one whose result may not be released.

    Invariant: the new version is on disk before the commit that names it. All replies are acknowledged only after this
    commit.
    """
    running, closed = one.running, one.machine.closed
    assert closed is not None
    start = time.perf_counter()
    version, events = running.past.version, list[Event]()
    now, capped = running.clock.wall(), dict[str, Capped]()
    if closed.reason not in NO_STEP and (why := running.mode.withheld(running, one.opened.round)):
        closed = RoundResult("aborted", (), (*closed.dropped, *closed.aggregated), closed.outstanding, why)
    if closed.reason not in NO_STEP:
        step = partial(_stepped, one, closed, events)
        closed, capped = _apart(one, step) if one.fold.steps_apart and not running.simulated else step()
    if closed.reason not in NO_STEP:
        version += 1
        stepped = time.perf_counter()
        model = running.model
        events.append(running.versions.write(version, model.params, model.buffers, model.counters, now, model.state))
        events += running.sending.publish(version, now)
        events += running.mode.released(running, one.opened.round, events[-1], one.fold)
        step_s, store_s = stepped - start, time.perf_counter() - stepped
    else:
        step_s = store_s = 0.0
    events += [*one.summed(), *one.evaluated(now)]
    counted = [one.headers[update_id] for update_id in closed.aggregated]
    slowest, spent = where_time_went(one, closed, counted)
    spent |= {"step_s": step_s, "store_s": store_s}
    events.append(
        RoundClosed(
            at=now,
            round=one.opened.round,
            reason=closed.reason,
            version=version,
            aggregated=[str(u) for u in closed.aggregated],
            dropped=[str(u) for u in closed.dropped],
            outstanding=list(closed.outstanding),
            elapsed_s=running.elapsed,
            seconds=running.elapsed - one.machine.terms.opened_s + running.past.line.now.missed_s,
            metrics=pooled([one.fold.metrics] if one.fold.metrics else (header.metrics for header in counted), TRAINED),
            spent=spent,
            slowest=slowest,
            capped=capped,
            detail=closed.detail,
            chosen=one.fold.chosen,
            norms=_window(one, closed),
            **_names(one),
        )
    )
    one.record(*events, measured=_measured(one, now))
    running.mode.reveal(running)
    lost = [one.machine.assignments[device] for device, kind in one.machine.lost.items() if kind == "offline"]
    running.fleet.ack(list(one.headers))
    if running.plan.is_protected:  # what is here of a late update is in the clear, and will never be used
        running.fleet.drop_uploads(running.run_id)
    running.fleet.cancel(lost if closed.reason != "stopped" else list(one.machine.assignments.values()))
    one.over()


def _apart(one: RoundRunner, step: Callable[[], Stepped]) -> Stepped:
    """Return what a step returns that is made by a thread of its own, and let other runs work meanwhile.

    What arrives for this run is handled after the step, as if the step had taken no time. While the step is short, the
    run wants its devices for the next round, as while it sums; then other runs may have them.
    """
    running, claims_until = one.running, time.monotonic() + CLAIM_S
    with ThreadPoolExecutor(1, thread_name_prefix="step") as worker:
        made = worker.submit(step)
        while wait([made], timeout=AGGREGATION_WAIT_S).not_done:
            claims = not running.past.ledger.busy and time.monotonic() < claims_until
            running.leases.want(running.run_id, one.machine.assignments if claims else ())
            running.unread += running.fleet.poll(0.0)
        return made.result()


def _window(one: RoundRunner, closed: RoundResult) -> list[float]:
    """Return the norms of the round's updates, if the plan bounds those of later rounds by a quantile of them."""
    if not isinstance(one.plan.server.max_norm, str) or closed.reason in NO_STEP:
        return []
    return [one.fold.norms[str(update_id)] for update_id in closed.aggregated]


def _names(one: RoundRunner) -> dict[str, Any]:
    """Return the fields of `RoundClosed` for the recorded metrics of the round's updates, and the number of
    other metrics.
    """
    accepted = one.running.past.line.now.accepted
    said = [event.header.get("metrics", {}) for event in accepted]
    names = [*names_in(said, MEASURED), *names_in(said, TRAINED)]
    others = sum(name not in names for metrics in said for name in metrics)
    return {"names": names, "ignored": others + sum(event.ignored for event in accepted)}


def _measured(one: RoundRunner, now: float) -> list[MeasureRow]:
    """Return the rows of what this round's replies show about devices' speed.

    Replies are read in the order of the journal, so a resumed round learns the same.
    """
    running = one.running
    if running.plan.is_protected:
        return []  # such an update tells no times
    work = work_key(running.plan, running.layout)
    for event in running.past.line.now.accepted:
        header = one.headers[UpdateId.parse(event.update_id)]
        hello = running.presence.hellos.get(event.device)
        if hello is not None:
            running.known.greeted(event.device, hello.link.get("rtt_s", 0.0))
        assigned = running.past.ledger.find(header.assignment_id)
        most = most_steps(running.plan, header, assigned_steps(running, header))
        found = durations(header, assigned.sent_bytes if assigned else 0, epochs_of(running.plan), most)
        if running.plan.local.steps == "auto":
            found = at_own_pace(found, header, running.plan.local, assigned.work if assigned else None)
        running.known.learn(event.device, work, found)
    return [] if running.simulated else running.known.news(now)


def _stepped(one: RoundRunner, closed: RoundResult, events: list[Event]) -> Stepped:
    """Move the model by the round's updates; return the final result, and the updates that count less.

    If the sum is too large for a model, the step is made without the updates that caused this. They are dropped. If too
    few updates are left, no step is made.
    """
    headers = [one.headers[update_id] for update_id in closed.aggregated]
    caps, bounds = caps_of(one.plan, headers), one.plan.server.max_norm is not None
    if bounds:
        own = [one.fold.norms[str(header.update_id)] for header in headers]
        caps = replace(caps, norm=largest_norm(one.plan, one.running.past.norms or own))
    capped = one.fold.capped(caps, headers)
    again = any(key in found for found in capped.values() for key in ("counted", "a_counted"))
    again = again or (bounds and caps.norm != one.fold.caps.norm)
    if not again and one.fold.fits():
        one.fold.step(one.running.model, one.running.past.steps_made)
        return closed, capped
    new = partial(one.running.mode.aggregator, one.running, one.opened, caps if again else None)
    discounts = {event.update_id: event.discount for event in one.running.past.line.now.accepted}
    aggregated = [(header, one.frames(header.update_id), discounts[str(header.update_id)]) for header in headers]
    if again:
        one.fold = one.fold.replaced(new)  # frees the memory of the old sum
        refold(one.fold, aggregated)
        if one.fold.fits():
            one.fold.step(one.running.model, one.running.past.steps_made)
            return closed, capped
    one.fold = new()
    one.fold, spoilers = aggregated_without(new, aggregated)
    spoiled = [header.update_id for header in spoilers]
    for update_id in spoiled:
        events += one.drop_events(update_id, TOO_LARGE)
    left = tuple(u for u in closed.aggregated if u not in spoiled)
    if len(left) < one.opened.min_updates:
        return RoundResult("too-few", (), (*closed.dropped, *closed.aggregated), closed.outstanding), {}
    one.fold.step(one.running.model, one.running.past.steps_made)
    counted = {str(u): capped[str(u)] for u in left if str(u) in capped}
    return RoundResult(closed.reason, left, (*closed.dropped, *spoiled), closed.outstanding), counted


TOO_LARGE = "bad-payload: numbers too large to be added"
AggregatedUpdate = tuple[ReplyHeader, Frames, float]  # an update's reply header, frames and discount


def aggregated_without(
    new: Callable[[], RoundAggregator], aggregated: Sequence[AggregatedUpdate]
) -> tuple[RoundAggregator, list[ReplyHeader]]:
    """Return an aggregator of the updates whose sum fits, in their order, and the updates that are left out.

    An update is left out if the sum fits before it and does not fit with it. This depends on the order alone, so a
    restart leaves out the same updates.
    """
    fold, spoilers = new(), list[ReplyHeader]()
    for header, frames, discount in aggregated:
        before = fold.copy()
        fold.add(header, frames, discount)
        if not fold.fits():
            fold = before
            spoilers.append(header)
    return fold, spoilers


def refold(fold: RoundAggregator, aggregated: Sequence[AggregatedUpdate]) -> None:
    """Add updates that were aggregated before to an empty aggregator, in their order."""
    for header, frames, discount in aggregated:
        fold.add(header, frames, discount)


def where_time_went(
    one: RoundRunner, closed: RoundResult, counted: Sequence[ReplyHeader]
) -> tuple[str, dict[str, float]]:
    """Return the device whose reply came last, and the seconds by stage until its update was in the sum.

    In a buffered round an assignment of an earlier round may have filled the buffer. A simulation's clock does not
    count the aggregator's work, so there `aggregate_s` is that of all updates.
    """
    assigned = set(one.machine.assignments.values())
    arrived = [
        (header.transfer.arrived_at, header)
        for header in counted
        if header.transfer and (closed.reason == "buffer" or header.assignment_id in assigned)
    ]
    if not arrived:
        return "", {"aggregate_s": one.folding_s} if one.running.simulated else {}
    _, last = max(arrived, key=lambda pair: pair[0])
    assert last.transfer is not None
    pulled_at = last.transfer.pulled_at  # 0 for a masked update: an advertisement has answered its assignment before
    return last.update_id.device, {
        **({"wait_s": max(0.0, pulled_at - one.opened.at)} if pulled_at else {}),
        **({} if one.plan.is_protected else asdict(last.timings)),  # such an update tells no times
        "upload_s": max(0.0, last.transfer.arrived_at - last.transfer.began_at),
        "receive_s": one.receive_s.get(last.update_id, 0.0),
        "aggregate_s": one.folding_s if one.running.simulated else one.aggregate_s.get(last.update_id, 0.0),
    }


@dataclass(frozen=True)
class AggregationResult:
    """The result of one addition: done in `seconds`, or the update is `rejected` for a reason."""

    update_id: UpdateId
    seconds: float
    rejected: str = ""


class AggregationQueue:
    """Additions that were started and are not reported yet, on one worker thread, first in, first out.

    One worker keeps the order of the journal. With `at_once` additions run in the calling thread, since a thread costs
    more than a small addition if nothing else waits. `BadPayload` rejects the update; any other exception is a defect
    of Thinwire and is raised by `finished`, or with `at_once` by `begin`.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._worker = None if at_once else ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._done: list[AggregationResult] = []
        self._begun: dict[UpdateId, Future[AggregationResult]] = {}  # in their order

    def begin(self, update_id: UpdateId, fold: Callable[[], None]) -> None:
        """Start an addition, and time it."""

        def timed() -> AggregationResult:
            start = time.perf_counter()
            try:
                fold()
            except BadPayload as error:
                return AggregationResult(update_id, time.perf_counter() - start, rejected=f"bad-payload: {error}")
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
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
