"""The clients' measurements of one model version as one event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thinwire.core.events import Evaluated
from thinwire.core.types import ReplyHead
from thinwire.server.driving.running import Running
from thinwire.server.model.measured import MAX_COUNT, better, bounded, pooled, robust, spread, too_few, units_of
from thinwire.server.recorded.scores import FEWEST, MEASURED, Measured


def evaluation(running: Running, version: int, heads: list[ReplyHead], now: float, asked: int = 0) -> Evaluated | None:
    """Pool what devices measured of one version; None when nobody measured anything.

    Where too few of those who replied, or of those `asked`, measured it, it is no best and meets no target.
    """
    replies = [_reply(head) for head in heads]
    event = _pooled(running, version, replies, now, running.past.scores.best)
    if event and too_few(event.clients, max(asked, len({reply.device for reply in replies}))):
        event = replace(event, best=False, few=True)
    return replace(event, **_bytes(running, heads)) if event else None


def settled(running: Running, now: float, over: bool = False) -> list[Evaluated]:
    """The versions that nobody measures any more, in their order: where answers come whenever they come, those of one
    version are in several buffers. A version waits for those before it, and for nobody whose time is up; when the run
    is `over`, for nobody at all.

    One that fewer measured than half of those who make a buffer, since hardly anybody was asked from it, is no best.
    Neither is one that too few measured of those who make a buffer, whether these ever measure or not.
    """
    past, best, most = running.past, running.past.scores.best, running.past.scores.most
    owing = [(ask_id, asked) for d, (ask_id, asked) in past.owed.busy.items() if running.elapsed < past.owed.due[d]]
    due = [past.bases.asked_from[asked] for ask_id, asked in owing if not past.goes_on(ask_id)]  # those measure nothing
    found = list[Evaluated]()
    for version in sorted(past.scores.measured):
        if not over and version >= min(due, default=version + 1):
            break
        if event := _pooled(running, version, past.scores.measured[version], now, best):
            most = max(most, event.clients)
            buffer = running.plan.cohort.buffer
            if 2 * event.clients < min(buffer, most) or too_few(event.clients, min(buffer, len(past.scores.examples))):
                event = replace(event, best=False, few=True)
            best = event if event.best else best
            found.append(event)
    return found


def require_metrics(running: Running, over: bool = False) -> None:
    """`PlanError` where the plan goes by a metric that no version was measured by: nobody would ever report it.

    It is decided once FEWEST devices have measured, or all that are there, so that no device says alone which metrics
    there are; at the latest when the run is `over`.
    """
    scores = running.past.scores
    known = [name.removeprefix(MEASURED) for name in scores.names if name.startswith(MEASURED)]
    enough = len(scores.measurers) >= FEWEST or running.past.there <= scores.measurers
    if known and (over or enough):
        running.plan.require_metrics(known)


def _reply(head: ReplyHead) -> Measured:
    """One that only measured says as its examples what it measured on."""
    return Measured(str(head.update_id), head.update_id.device, head.examples if head.parts else 0, head.metrics)


def _pooled(
    running: Running, version: int, replies: Sequence[Measured], now: float, best_yet: Evaluated | None
) -> Evaluated | None:
    measuring = [reply for reply in replies if any(name.startswith(MEASURED) for name in reply.metrics)]
    measured = list({reply.device: reply for reply in reversed(measuring)}.values())[::-1]  # each device's first
    scores = running.past.scores
    units = {n: unit for n, unit in units_of(measured, scores.examples).items() if n not in scores.units}
    said = [reply.metrics for reply in measured]
    metrics = pooled(said, MEASURED)
    if not metrics:
        return None
    most, metric = running.plan.cohort.max_weight, running.plan.run.metric
    most = math.inf if most == "none" else most
    weighed = bounded(measured, {**scores.units, **units}, scores.examples, most)
    clipped = robust(measured, scores.widths, weighed, most)
    decisive, best = {**metrics, **clipped.means}, best_yet.decisive.get(metric) if best_yet else None
    most_said = max(n for found in said for name, (_, n) in found.items() if name.startswith(MEASURED))
    losses = [min(found.get("eval/loss", (0.0, 0.0))[1], MAX_COUNT) for found in said]
    total = sum(map(int, losses)) or int(min(most_said, MAX_COUNT))
    made_by = running.past.bases.made_by.get(version, 0)
    return Evaluated(
        now, made_by, version, metrics, spread(said, MEASURED), total, len(measured),
        best=metric in decisive and better(metric, decisive[metric], best),
        robust=clipped.means, clipped=clipped.clipped, widths=clipped.widths,
        units={name: unit for name, unit in units.items() if name.removeprefix(MEASURED) in metrics},
    )  # fmt: skip


def _bytes(running: Running, heads: list[ReplyHead]) -> dict[str, Any]:
    """What answers that only measure took; those that also train are counted as updates."""
    alone = [head for head in heads if not head.parts]
    wires = [head.transfer for head in alone if head.transfer and head.transfer.sent_bytes is not None]
    sent = [running.measuring.get(head.ask_id, 0) for head in alone]
    found: dict[str, Any] = {"payload_bytes": sum(sent), "models_sent": sum(map(bool, sent))}
    if wires:
        found["sent_bytes"] = sum(wire.sent_bytes or 0 for wire in wires)
        found["received_bytes"] = sum(wire.received_bytes or 0 for wire in wires)
    return found
