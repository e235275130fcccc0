"""Closing of a round: the step is made, the model version is made durable, and all of it is recorded in one commit.

The updates are aggregated again if the closed round shows that one of them counts otherwise. There are two reasons. An
update counts less if its client's weight is over the cap, which follows from the medians of the whole round. It does
not count at all if the sum becomes too large for a model, so that one device cannot end a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.core.events import Capped, Evaluated, Event, RoundClosed, RoundOpened
from thinwire.core.types import ReplyHeader, UpdateId
from thinwire.server.aggregator import Frames, RoundAggregator
from thinwire.server.evaluation import evaluation, names_in, pooled, settled
from thinwire.server.policy.device_profiles import at_own_pace, durations, epochs_of, work_of
from thinwire.server.policy.local_work import caps_of
from thinwire.server.round import Round
from thinwire.server.round_events import RoundResult
from thinwire.server.round_runner import RoundRunner
from thinwire.server.state.model_history import MEASURED, TRAINED
from thinwire.store import MeasureRow


def finish(one: RoundRunner) -> None:
    """Make the step and record the round's end.

    A round that closes as `too-few` or `stopped` makes no step.

    Invariant: the new version is on disk before the commit that names it. All replies are acknowledged only after this
    commit.
    """
    running, closed = one.running, one.machine.closed
    assert closed is not None
    start = time.perf_counter()
    version, events = running.past.version, list[Event]()
    now, capped = running.clock.wall(), dict[str, Capped]()
    if closed.reason not in ("too-few", "stopped"):
        closed, capped = _stepped(one, closed, events)
    if closed.reason not in ("too-few", "stopped"):
        version += 1
        stepped = time.perf_counter()
        model = running.model
        events.append(running.versions.write(version, model.params, model.buffers, model.counters, now, model.state))
        events += running.sending.publish(version, now)
        step_s, store_s = stepped - start, time.perf_counter() - stepped
    else:
        step_s = store_s = 0.0
    events += _evaluated(one, now)
    counted = [one.heads[update_id] for update_id in closed.folded]
    opened = replace(one.opened, asks=dict(one.machine.asks))
    slowest, spent = where_time_went(opened, counted, one.fold_s, step_s, store_s)
    if closed.reason == "buffer":
        slowest = last_of(counted)
    events.append(
        RoundClosed(
            at=now,
            round=one.opened.round,
            reason=closed.reason,
            version=version,
            folded=[str(u) for u in closed.folded],
            dropped=[str(u) for u in closed.dropped],
            outstanding=list(closed.outstanding),
            elapsed_s=running.elapsed,
            seconds=running.elapsed - one.machine.terms.opened_s + running.past.line.now.missed_s,
            metrics=pooled((head.metrics for head in counted), TRAINED),
            spent=spent,
            slowest=slowest,
            capped=capped,
            **_names(one),
        )
    )
    one.record(*events, measured=_measured(one, now))
    lost = [one.machine.asks[device] for device, kind in one.machine.lost.items() if kind == "left"]
    running.fleet.ack(list(one.heads))
    running.fleet.cancel(lost if closed.reason != "stopped" else list(one.machine.asks.values()))


def _names(one: RoundRunner) -> dict[str, Any]:
    """Return the fields of `RoundClosed` for the recorded metrics of the round's updates, and the number of
    other metrics.
    """
    accepted = one.running.past.line.now.accepted
    said = [event.head.get("metrics", {}) for event in accepted]
    names = [*names_in(said, MEASURED), *names_in(said, TRAINED)]
    others = sum(name not in names for metrics in said for name in metrics)
    return {"names": names, "ignored": others + sum(event.ignored for event in accepted)}


def _measured(one: RoundRunner, now: float) -> list[MeasureRow]:
    """Return the rows of what this round's replies show about devices' speed.

    Replies are read in the order of the journal, so a resumed round learns the same.
    """
    running = one.running
    work = work_of(running.plan, running.layout)
    for event in running.past.line.now.accepted:
        head = one.heads[UpdateId.parse(event.update_id)]
        hello = running.presence.hellos.get(event.device)
        if hello is not None:
            running.known.greeted(event.device, hello.link.get("rtt_s", 0.0))
        sent = running.past.sent.get(head.ask_id, 0)
        found = durations(head, sent, epochs_of(running.plan))
        if running.plan.local.steps == "auto":
            asked = running.past.paces.work(event.device, head.ask_id)
            found = at_own_pace(found, head, running.plan.local, asked)
        running.known.learn(event.device, work, found)
    return [] if running.simulated else running.known.news(now)


def _stepped(one: RoundRunner, closed: RoundResult, events: list[Event]) -> tuple[RoundResult, dict[str, Capped]]:
    """Move the model by the round's updates; return the final result, and the updates that count less.

    If the sum is too large for a model, the step is made without the updates that caused this. They are dropped. If too
    few updates are left, no step is made.
    """
    heads = [one.heads[update_id] for update_id in closed.folded]
    caps = caps_of(one.plan, heads)
    capped = one.fold.capped(caps, heads)
    if not capped and one.fold.fits():
        one.fold.step(one.running.model)
        return closed, {}
    new = partial(one.new_fold, caps if capped else None)
    discounts = {event.update_id: event.discount for event in one.running.past.line.now.accepted}
    folded = [(head, one.frames(head.update_id), discounts[str(head.update_id)]) for head in heads]
    if capped:
        one.fold = new()  # frees the memory of the old sum
        one.fold = refolded(new, folded)
        if one.fold.fits():
            one.fold.step(one.running.model)
            return closed, capped
    one.fold = new()
    one.fold, spoilers = folded_without(new, folded)
    spoiled = [head.update_id for head in spoilers]
    for update_id in spoiled:
        events += one.dropped(update_id, TOO_LARGE)
    left = tuple(u for u in closed.folded if u not in spoiled)
    if len(left) < one.opened.floor:
        return RoundResult("too-few", (), (*closed.dropped, *closed.folded), closed.outstanding), {}
    one.fold.step(one.running.model)
    counted = {str(u): capped[str(u)] for u in left if str(u) in capped}
    return RoundResult(closed.reason, left, (*closed.dropped, *spoiled), closed.outstanding), counted


def _evaluated(one: RoundRunner, now: float) -> list[Evaluated]:
    """Return the base model's evaluation by the devices that measured it before they trained.

    After a buffered round, return the evaluations that are final by now.
    """
    if not isinstance(one.machine, Round):
        return settled(one.running, now)
    base = one.opened.base_version
    if base in one.running.past.scores.evaluated:
        return []
    heads = [h for u, h in one.heads.items() if u in one.machine.in_time and h.base_version == base]
    found = evaluation(one.running, base, heads, now)
    return [found] if found else []


TOO_LARGE = "bad-payload: numbers too large to be added"
FoldDone = tuple[ReplyHeader, Frames, float]  # an update's reply header, frames and discount


def folded_without(
    new: Callable[[], RoundAggregator], folded: Sequence[FoldDone]
) -> tuple[RoundAggregator, list[ReplyHeader]]:
    """Return an aggregator of the updates whose sum fits, in their order, and the updates that are left out.

    An update is left out if the sum fits before it and does not fit with it. This depends on the order alone, so a
    restart leaves out the same updates.
    """
    fold, spoilers = new(), list[ReplyHeader]()
    for head, frames, discount in folded:
        before = fold.copy()
        fold.add(head, frames, discount)
        if not fold.fits():
            fold = before
            spoilers.append(head)
    return fold, spoilers


def refolded(new: Callable[[], RoundAggregator], folded: Sequence[FoldDone]) -> RoundAggregator:
    """Return an aggregator of these updates, added in their order."""
    fold = new()
    for head, frames, discount in folded:
        fold.add(head, frames, discount)
    return fold


def where_time_went(
    opened: RoundOpened, heads: Sequence[ReplyHeader], fold_s: float, step_s: float, store_s: float
) -> tuple[str, dict[str, float]]:
    """Return the device that replied last, and the seconds by stage.

    The stages follow the slowest device, then the aggregator's own work. Stages on the device are measured by its own
    clock.
    """
    server = {"fold_s": fold_s, "step_s": step_s, "store_s": store_s}
    arrived = [head for head in heads if head.transfer and head.ask_id in opened.asks.values()]
    if not arrived:
        return "", server
    last = max(arrived, key=_arrived_at)
    assert last.transfer is not None
    t = last.timings
    stages = {
        "wait_s": max(0.0, last.transfer.pulled_at - opened.at),
        "download_s": t.download_s,
        "queue_s": t.queue_s,
        "evaluate_s": t.evaluate_s,
        "train_s": t.train_s,
        "encode_s": t.encode_s,
        "upload_s": max(0.0, last.transfer.arrived_at - last.transfer.began_at),
    }
    return last.update_id.device, stages | server


def last_of(heads: Sequence[ReplyHeader]) -> str:
    """Return the device whose reply filled a buffer, which is the last to arrive; "" if no reply has a time."""
    arrived = [head for head in heads if head.transfer]
    return max(arrived, key=_arrived_at).update_id.device if arrived else ""


def _arrived_at(head: ReplyHeader) -> float:
    return head.transfer.arrived_at if head.transfer else 0.0
