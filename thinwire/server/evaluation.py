"""The clients' measurements of one model version as one event."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from thinwire.core.events import Evaluated
from thinwire.core.serialization import MAX_METRICS
from thinwire.core.types import Metrics, ReplyHead
from thinwire.server.context import Running
from thinwire.server.state.model_history import FEWEST, MEASURED, Measured, may_be_recorded


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


# Metrics of many clients as one: sums and counts are pooled, so that every example weighs the same.
#
# `best` and `target` go by a robust mean, from three clients on. Each client's value is clipped to m - w .. m + w:
#
#     m   median of the clients' values, weighted by their counts; none weighs more than the median count, so that a
#         client which invents a count does not move m
#     d   distance from m that all clients keep but the farthest one; from six clients on, but the two farthest
#     w   the larger of 5 d and |m| / 20, and no less than for any version before: clients differ as much again
#
# Where all but those clients say 0 or more, no value counts as less than 0. A client weighs at most `[cohort]
# max_weight` times the median count (10 unless the plan says otherwise), and no more than its examples allow. So one
# client (of six and more: two) moves the mean no farther than five times what honest clients differ by.
#
# Five median absolute deviations instead clipped honest clients in 20 to 83 percent of the rounds of runs like our
# benchmarks', the more the more their data differ; docs/explain/what-is-protected.md says how often this does.


TWO_FROM = 6  # clients: so many make it safe to leave out the two farthest ones
WIDTH = 5.0  # times d
LEAST_WIDTH = 0.05  # of the median: where all but a few clients agree, d is 0
MAX_WEIGHT = 10.0  # times the median count, as the plan's max_weight says unless it is set
MAX_UNITS = 2.0**20  # of one example while fewer than FEWEST clients showed any: a large image's pixels
MAX_COUNT = 2.0**53  # no client's count is more: whole numbers are exact so far
# How many times the usual counts of an example are believed: honest documents and test splits differ by tens. A liar
# who says as much gains little, since no client weighs more than max_weight medians anyway.
UNITS_SLACK = 64.0


def names_in(all_metrics: Iterable[Metrics], prefix: str) -> list[str]:
    """List the names (with `prefix`) that at least half of those carry who carry any with this prefix.

    At most MAX_METRICS of at most MAX_METRIC_LETTERS letters: what one device invents is not recorded.

    >>> names_in([{"eval/loss": (3.0, 2.0)}, {"eval/loss": (1.0, 2.0)}, {"eval/x": (1.0, 2.0)}], "eval/")
    ['eval/loss']
    """
    carrying = [found for found in ([n for n in metrics if n.startswith(prefix)] for metrics in all_metrics) if found]
    times = Counter(name for found in carrying for name in found if may_be_recorded(name, prefix))
    most = sorted((name for name in times if 2 * times[name] >= len(carrying)), key=lambda name: (-times[name], name))
    return sorted(most[:MAX_METRICS])


def pooled(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, float]:
    """Sum over sums divided by sum over counts, of the names of `names_in`, whose `prefix` is cut off.

    >>> pooled([{"eval/loss": (3.0, 2.0)}, {"eval/loss": (1.0, 2.0)}], "eval/")
    {'loss': 1.0}
    """
    found = list(all_metrics)
    sums = {name: [0.0, 0.0] for name in names_in(found, prefix)}
    for metrics in found:
        for name, (total, count) in metrics.items():
            if name in sums:
                sums[name][0] += total
                sums[name][1] += count
    return {name.removeprefix(prefix): total / count for name, (total, count) in sums.items() if count > 0}


def spread(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, list[float]]:
    """For each metric the least and the greatest value that one client had."""
    found = list(all_metrics)
    seen = {name: [total / count for total, count in _of(found, name)] for name in names_in(found, prefix)}
    return {name.removeprefix(prefix): [min(values), max(values)] for name, values in seen.items() if values}


def units_of(replies: Sequence[Measured], trained: Mapping[str, int]) -> dict[str, float]:
    """What one example of training counts in each metric, as the median client says: of a language model its tokens.

    Nothing is learned from fewer than FEWEST clients.
    """
    found: dict[str, list[float]] = {}
    for reply in replies:
        if examples := _examples(reply, trained):
            for name, (_, count) in reply.metrics.items():
                if name.startswith(MEASURED) and count > 0:
                    found.setdefault(name, []).append(count / examples)
    return {name: median_low(values) for name, values in sorted(found.items()) if len(values) >= FEWEST}


def bounded(
    replies: Sequence[Measured],
    units: Mapping[str, float],
    trained: Mapping[str, int],
    max_weight: float = MAX_WEIGHT,
) -> list[Measured]:
    """The replies as `robust` weighs them: no count is more than its client's examples allow, and its value stays.

    `trained`: the examples that each device trained on; a device that never did counts as the median one. Examples
    count up to `max_weight` times the median, from FEWEST clients on.
    """
    examples = [_examples(reply, trained) for reply in replies]
    most = max_weight * median_low(examples) if len(examples) >= FEWEST and max_weight < math.inf else math.inf
    limits = [UNITS_SLACK * min(found, most) for found in examples]
    return [
        reply._replace(
            metrics={n: _within(value, units.get(n, MAX_UNITS) * limit) for n, value in reply.metrics.items()}
        )
        for reply, limit in zip(replies, limits, strict=True)
    ]


def _examples(reply: Measured, trained: Mapping[str, int]) -> int:
    found = max(reply.examples, trained.get(reply.device, 0))
    return found or (median_low(trained.values()) if trained else 0)


def _within(value: tuple[float, float], limit: float) -> tuple[float, float]:
    total, count = value
    limit = min(limit, MAX_COUNT) if limit > 0 else MAX_COUNT
    return (total * (limit / count), limit) if limit < count else value


def too_few(clients: int, replies: int) -> bool:
    """Whether so few of those who replied measured that a single client could decide alone."""
    return clients < FEWEST and 2 * clients < replies


@dataclass(frozen=True)
class Robust:
    """What `best` and `target` go by. `means`: those that differ from the pooled ones; `clipped`: by update_id the
    metrics whose value or weight was clipped; `widths`: by metric w, where it was never so large before.
    """

    means: dict[str, float]
    clipped: dict[str, list[str]]
    widths: dict[str, float]


def robust(
    replies: Sequence[Measured],
    widths: Mapping[str, float],
    weighed: Sequence[Measured] | None = None,
    max_weight: float = MAX_WEIGHT,
) -> Robust:
    """Clip what each client says; `widths` are the largest of the versions before.

    `weighed` are the same replies with the counts that they weigh (`bounded`); who weighs less is named as clipped.
    """
    both = list(zip(replies, weighed or replies, strict=True))
    found = Robust({}, {}, {})
    for name in names_in([reply.metrics for reply in replies], MEASURED):
        said = [(one.update_id, *one.metrics[name], held.metrics[name][1]) for one, held in both if name in one.metrics]
        counted = [(update_id, total / count, weight) for update_id, total, count, weight in said if count > 0]
        lighter = {update_id for update_id, _, count, weight in said if weight < count}
        if len(counted) < FEWEST:
            continue
        short = name.removeprefix(MEASURED)
        middle, width, usual = _middle([(value, count) for _, value, count in counted])
        if width > widths.get(short, 0.0):
            found.widths[short] = width
        width, most = max(width, widths.get(short, 0.0)), max_weight * usual
        low, high = middle - width, middle + width
        if sorted(value for _, value, _ in counted)[_left_out(counted)] >= 0:
            low = max(low, 0.0)
        kept_whole = [low <= value <= high and weight <= most for _, value, weight in counted]
        cut = [n for (n, *_), whole in zip(counted, kept_whole, strict=True) if n in lighter or not whole]
        for update_id in cut:
            found.clipped.setdefault(update_id, []).append(short)
        if cut:
            weights = [min(count, most) for _, _, count in counted]
            kept = [min(max(value, low), high) for _, value, _ in counted]
            found.means[short] = math.fsum(w * v for w, v in zip(weights, kept, strict=True)) / math.fsum(weights)
    return found


def _middle(values: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(m, w of this version alone, the median weight) of (value, weight)."""
    usual = median_low(weight for _, weight in values)
    middle, left = 0.0, sum(min(weight, usual) for _, weight in values) / 2
    for value, weight in sorted(values):
        middle, left = value, left - min(weight, usual)
        if left <= 0:
            break
    distances = sorted((abs(value - middle) for value, _ in values), reverse=True)
    return middle, max(WIDTH * distances[_left_out(values)], LEAST_WIDTH * abs(middle)), usual


def _left_out(values: Sequence[object]) -> int:
    return 2 if len(values) >= TWO_FROM else 1


def _of(all_metrics: Iterable[Metrics], name: str) -> list[tuple[float, float]]:
    return [metrics[name] for metrics in all_metrics if name in metrics and metrics[name][1] > 0]


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether a value beats the best so far: loss is minimised, everything else maximised; NaN never wins."""
    if math.isnan(new):
        return False
    if old is None:
        return True
    return new < old if metric == "loss" else new > old


def reached(metrics: Mapping[str, float], metric: str, value: float) -> bool:
    """Whether a target is met: loss at most `value`, everything else at least."""
    if metric not in metrics:
        return False
    return metrics[metric] <= value if metric == "loss" else metrics[metric] >= value
