"""The end of a round: the step is made, the model made durable, and all of it recorded in one commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from thinwire.core.events import Capped, Evaluated, Event, RoundClosed, RoundOpened
from thinwire.core.types import ReplyHead, UpdateId
from thinwire.server.aggregator import Frames, RoundAggregator
from thinwire.server.evaluation import evaluation, names_in, pooled, settled
from thinwire.server.policy.device_profiles import at_own_pace, durations, epochs_of, work_of
from thinwire.server.policy.local_work import caps_of
from thinwire.server.round import Round
from thinwire.server.round_events import Closed
from thinwire.server.round_runner import OneRound
from thinwire.server.state.model_history import MEASURED, TRAINED
from thinwire.store import MeasureRow


def finish(one: OneRound) -> None:
    """Make the step, make the model durable, and record the round's end in one commit."""
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


def _names(one: OneRound) -> dict[str, Any]:
    """Which metrics of the round's updates are recorded, and how many others were in them."""
    accepted = one.running.past.line.now.accepted
    said = [event.head.get("metrics", {}) for event in accepted]
    names = [*names_in(said, MEASURED), *names_in(said, TRAINED)]
    others = sum(name not in names for metrics in said for name in metrics)
    return {"names": names, "ignored": others + sum(event.ignored for event in accepted)}


def _measured(one: OneRound, now: float) -> list[MeasureRow]:
    """What is learned of devices from this round's answers, in the journal's order: a resume learns the same."""
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


def _stepped(one: OneRound, closed: Closed, events: list[Event]) -> tuple[Closed, dict[str, Capped]]:
    """Move the model, with what of the round counts less. Where the sum is too large for a model, it is made without
    those who did it, if enough are left: they are dropped.
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
        one.fold = new()  # the memory of the sum that is of no use any more
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
        return Closed("too-few", (), (*closed.dropped, *closed.folded), closed.outstanding), {}
    one.fold.step(one.running.model)
    counted = {str(u): capped[str(u)] for u in left if str(u) in capped}
    return Closed(closed.reason, left, (*closed.dropped, *spoiled), closed.outstanding), counted


def _evaluated(one: OneRound, now: float) -> list[Evaluated]:
    """The base model as the devices measured it before they trained; of a buffer those that are measured by now."""
    if not isinstance(one.machine, Round):
        return settled(one.running, now)
    base = one.opened.base_version
    if base in one.running.past.scores.evaluated:
        return []
    heads = [h for u, h in one.heads.items() if u in one.machine.in_time and h.base_version == base]
    found = evaluation(one.running, base, heads, now)
    return [found] if found else []


# A round is folded again where its end shows that an update counts otherwise than it was folded.
#
# One counts less where its client's weight is over the cap, which the medians of the whole round say. One counts not at
# all where the sum is too large for a model: one device ends no run.


TOO_LARGE = "bad-payload: numbers too large to be added"
Folded = tuple[ReplyHead, Frames, float]  # a head, its frames, its discount


def folded_without(
    new: Callable[[], RoundAggregator], folded: Sequence[Folded]
) -> tuple[RoundAggregator, list[ReplyHead]]:
    """A tally of the updates whose sum fits, in their order, and those that are left out.

    One is left out where the sum of those before it fits and with it does not: that depends on their order alone, so
    that a restart leaves out the same.
    """
    fold, spoilers = new(), list[ReplyHead]()
    for head, frames, discount in folded:
        before = fold.copy()
        fold.add(head, frames, discount)
        if not fold.fits():
            fold = before
            spoilers.append(head)
    return fold, spoilers


def refolded(new: Callable[[], RoundAggregator], folded: Sequence[Folded]) -> RoundAggregator:
    """A tally of these updates, in their order."""
    fold = new()
    for head, frames, discount in folded:
        fold.add(head, frames, discount)
    return fold


# Where a round's time went: along its slowest client, then the aggregator's own part.


def where_time_went(
    opened: RoundOpened, heads: Sequence[ReplyHead], fold_s: float, step_s: float, store_s: float
) -> tuple[str, dict[str, float]]:
    """(the device that answered last, seconds by stage). Stages on the device are by its own clock."""
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


def last_of(heads: Sequence[ReplyHead]) -> str:
    """The device that filled a buffer: it answered last, whenever it was asked. "" where nothing says when."""
    arrived = [head for head in heads if head.transfer]
    return max(arrived, key=_arrived_at).update_id.device if arrived else ""


def _arrived_at(head: ReplyHead) -> float:
    return head.transfer.arrived_at if head.transfer else 0.0
