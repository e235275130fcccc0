"""Evaluation of one model version: the clients' metrics are pooled into one event, `Evaluated`.

Metrics are pooled by their sums and counts, so that every example weighs the same. From three clients on, `best` and
`target` use a robust mean instead. It clips each client's value to m - w .. m + w:

    m   median of the clients' values, weighted by their counts; no weight is above the median count, so that a false
        count does not move m
    d   largest distance from m without the farthest client; from six clients on, without the two farthest
    w   the larger of 5 d and |m| / 20, and at least the w of every earlier version, since clients differ as much again

If all clients but those farthest report 0 or more, no value counts as less than 0. A client weighs at most `[cohort]
max_weight` times the median count (10 by default), and no more than its examples allow. So one client (of six and more:
two) moves the mean at most by five times the differences between honest clients.

Five median absolute deviations would clip honest clients in 20 to 83 percent of the rounds in runs like our benchmarks.
The share grows with the differences between the clients' data. docs/explain/what-is-protected.md shows how often the
rule above does.

Whole-set metrics such as AUC are no means. They follow from the sum of the clients' histograms
(core/score_histogram.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from thinwire.core.events import Evaluated
from thinwire.core.score_histogram import MEASURED, PooledScores, pooled_scores
from thinwire.core.serialization import MAX_METRICS
from thinwire.core.types import Metrics, ReplyHeader
from thinwire.server.context import RunContext
from thinwire.server.policy.cohort import evaluators_of
from thinwire.server.state.model_history import FEWEST, Measured, may_be_recorded


def evaluation(
    running: RunContext, version: int, headers: list[ReplyHeader], now: float, assigned: int = 0
) -> Evaluated | None:
    """Pool the clients' evaluations of one version into one event; None if no client evaluated it.

    The event is no best and meets no target if too few clients evaluated the version. The comparison is with those of
    the devices that replied which the plan lets evaluate, or with the number `assigned`, if that is larger.
    """
    replies = [_reply(header) for header in headers]
    event = _pooled(running, version, replies, now, running.run_state.scores.best)
    if event and too_few(
        event.clients, max(assigned, evaluators_of(running.plan, len({reply.device for reply in replies})))
    ):
        event = replace(event, best=False, few=True, reached=False)
    return replace(event, **_bytes(running, headers)) if event else None


def metrics_by_client(event: Evaluated, headers: Iterable[ReplyHeader]) -> dict[str, dict[str, float]]:
    """Return client -> its own values of the metrics of an evaluation."""
    names = {MEASURED + name: name for name in event.metrics}
    return {
        header.update_id.device: {
            names[name]: total / count for name, (total, count) in header.metrics.items() if name in names and count > 0
        }
        for header in headers
    }


def summed_evaluation(running: RunContext, version: int, metrics: Metrics, clients: int, now: float) -> Evaluated:
    """Return the evaluation of a version by the sums of a secure round's metrics, of so many clients.

    No single client's value is known, so the event has no spread, and its means are not robust.
    """
    found, target = pooled([metrics], MEASURED), running.plan.run.target
    metric, best_yet = running.plan.run.metric, running.run_state.scores.best
    best = metric in found and better(metric, found[metric], best_yet.decisive.get(metric) if best_yet else None)
    total = int(max(count for _, count in metrics.values()))
    made_by, reached = running.run_state.bases.made_by.get(version, 0), target is not None and target.is_met(found)
    return Evaluated(now, made_by, version, found, {}, total, clients, best=best, reached=reached)


def final_evaluations(running: RunContext, now: float, over: bool = False) -> list[Evaluated]:
    """Return the final evaluations of versions that no device evaluates any more, in the order of versions.

    In a buffered run the evaluations of one version arrive in several buffers. A version therefore waits for earlier
    versions, and for devices whose deadline has not passed. It waits for nothing if the run is `over`.

    A version is no best in two cases. Fewer devices evaluated it than half of those that fill a buffer, since hardly
    any device trained from it. Or too few evaluated it of the devices that fill a buffer, whether these ever evaluate
    or not.
    """
    run_state, best, most = running.run_state, running.run_state.scores.best, running.run_state.scores.most
    waiting = [assigned for assigned in run_state.ledger.oldest() if running.elapsed < assigned.due_s]
    due = [assigned.base_version for assigned in waiting if not run_state.ledger.is_follow_up(assigned.assignment_id)]
    found = list[Evaluated]()
    for version in sorted(run_state.scores.measured):
        if not over and version >= min(due, default=version + 1):
            break
        if event := _pooled(running, version, run_state.scores.measured[version], now, best):
            most = max(most, event.clients)
            buffer = running.plan.cohort.buffer
            evaluating = evaluators_of(running.plan, min(buffer, len(run_state.scores.examples)))
            if 2 * event.clients < min(buffer, most) or too_few(event.clients, evaluating):
                event = replace(event, best=False, few=True, reached=False)
            best = event if event.best else best
            found.append(event)
    return found


def require_metrics(running: RunContext, over: bool = False) -> None:
    """Raise `PlanError` if the plan names a metric that no device reports, since none would ever report it.

    The decision is made when FEWEST devices have evaluated, or all that are connected. Thus no single device decides
    which metrics exist. It is made at the latest when the run is `over`.
    """
    scores = running.run_state.scores
    known = [name.removeprefix(MEASURED) for name in scores.names if name.startswith(MEASURED)]
    enough = len(scores.measurers) >= FEWEST or running.run_state.considered <= scores.measurers
    enough = enough or running.plan.run.evaluate == "holdout"
    if known and (over or enough):
        running.plan.require_metrics(known, summed=False)  # one of [secure] is absent where no client has a number


def _reply(header: ReplyHeader) -> Measured:
    """Return a reply's metrics; `examples` is 0 for a reply without an update, which counts evaluation examples."""
    return Measured(
        str(header.update_id), header.update_id.device, header.examples if header.parts else 0, header.metrics,
        header.histograms,
    )  # fmt: skip


def _pooled(
    running: RunContext, version: int, replies: Sequence[Measured], now: float, best_yet: Evaluated | None
) -> Evaluated | None:
    """Pool replies into one event without bytes; None if no reply has a metric of an evaluation, or none may."""
    if running.plan.run.evaluate == "holdout":
        return None  # a client that sends metrics all the same does not decide about the best version
    measuring = [reply for reply in replies if any(name.startswith(MEASURED) for name in reply.metrics)]
    measured = list({reply.device: reply for reply in reversed(measuring)}.values())[::-1]  # each device's first
    scores, most = running.run_state.scores, running.plan.cohort.max_weight
    most = math.inf if most == "none" else most
    told = {reply.update_id: reply.histograms for reply in measured if reply.histograms}
    whole = pooled_scores(told, most) if told else PooledScores()
    said = [reply.metrics for reply in measured]
    ranges, most_said = spread(said, MEASURED), _largest_count(said)
    measured = [_without(reply, whole.plain) for reply in measured]
    units = {n: unit for n, unit in units_of(measured, scores.examples).items() if n not in scores.units}
    said = [reply.metrics for reply in measured]
    metrics, metric = {**pooled(said, MEASURED), **whole.plain}, running.plan.run.metric
    if not metrics:
        return None
    weighed = bounded(measured, {**scores.units, **units}, scores.examples, most)
    clipped = robust(measured, scores.widths, weighed, most)
    means = {**clipped.means, **whole.bounded}
    cut = {
        update_id: [*clipped.clipped.get(update_id, ()), *whole.clipped.get(update_id, ())]
        for update_id in {**clipped.clipped, **whole.clipped}
    }
    decisive, best = {**metrics, **means}, best_yet.decisive.get(metric) if best_yet else None
    losses = [min(found.get("eval/loss", (0.0, 0.0))[1], MAX_COUNT) for found in said]
    total = sum(map(int, losses)) or int(min(most_said, MAX_COUNT))
    made_by, target = running.run_state.bases.made_by.get(version, 0), running.plan.run.target
    return Evaluated(
        now, made_by, version, metrics, ranges, total, len(measured),
        best=metric in decisive and better(metric, decisive[metric], best),
        reached=target is not None and target.is_met(decisive),
        robust=means, clipped=cut, widths=clipped.widths,
        units={name: unit for name, unit in units.items() if name.removeprefix(MEASURED) in metrics},
    )  # fmt: skip


def _largest_count(all_metrics: Iterable[Metrics]) -> float:
    """Return the largest count of a metric of an evaluation."""
    counts = (n for found in all_metrics for name, (_, n) in found.items() if name.startswith(MEASURED))
    return max(counts, default=0.0)


def _without(reply: Measured, names: Collection[str]) -> Measured:
    """Return the reply without its own values of these metrics, which are computed from a sum of histograms."""
    return reply._replace(
        metrics={name: pair for name, pair in reply.metrics.items() if name.removeprefix(MEASURED) not in names}
    )


def _bytes(running: RunContext, headers: list[ReplyHeader]) -> dict[str, Any]:
    """Return the byte fields of replies that only evaluated; replies that also train count as updates."""
    alone = [header for header in headers if not header.parts]
    wires = [header.transfer for header in alone if header.transfer and header.transfer.sent_bytes is not None]
    sent = [running.evaluation_bytes.get(header.assignment_id, 0) for header in alone]
    found: dict[str, Any] = {"payload_bytes": sum(sent), "models_sent": sum(map(bool, sent))}
    if wires:
        found["sent_bytes"] = sum(wire.sent_bytes or 0 for wire in wires)
        found["received_bytes"] = sum(wire.received_bytes or 0 for wire in wires)
    return found


MIN_CLIENTS_FOR_TWO = 6  # clients from which on the two farthest are left out
CLIP_FACTOR = 5.0  # of d, in w
MIN_CLIP_SHARE = 0.05  # of |m|, in w: d is 0 if all but a few clients agree
MAX_WEIGHT = 10.0  # times the median count, unless the plan sets max_weight
MAX_UNITS = 2.0**20  # of one example, until FEWEST clients showed their counts: the pixels of a large image
MAX_COUNT = 2.0**53  # largest count of a client: float64 is exact for whole numbers up to here
# Largest accepted multiple of an example's usual count: honest documents and test splits differ by tens. A false count
# of that size gains little, since no client weighs more than max_weight medians.
UNITS_SLACK = 64.0


def names_in(all_metrics: Iterable[Metrics], prefix: str) -> list[str]:
    """Return the names with `prefix` that at least half of the clients with any such name report.

    At most MAX_METRICS names of at most MAX_METRIC_LETTERS letters count, so no single device can add names to the
    journal.

    >>> names_in([{"eval/loss": (3.0, 2.0)}, {"eval/loss": (1.0, 2.0)}, {"eval/x": (1.0, 2.0)}], "eval/")
    ['eval/loss']
    """
    carrying = [found for found in ([n for n in metrics if n.startswith(prefix)] for metrics in all_metrics) if found]
    times = Counter(name for found in carrying for name in found if may_be_recorded(name, prefix))
    most = sorted((name for name in times if 2 * times[name] >= len(carrying)), key=lambda name: (-times[name], name))
    return sorted(most[:MAX_METRICS])


def pooled(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, float]:
    """Return the sum of sums divided by the sum of counts, for each name of `names_in`, without its `prefix`.

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


def pooled_metrics(headers: Sequence[ReplyHeader]) -> dict[str, float]:
    """Return the metrics of an evaluation, pooled from the sums and the histograms of these replies."""
    scores = pooled_scores({str(header.update_id): header.histograms for header in headers})
    return {**pooled((header.metrics for header in headers), MEASURED), **scores.plain}


def spread(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, list[float]]:
    """Return for each metric the smallest and the largest value of a client."""
    found = list(all_metrics)
    seen = {name: [total / count for total, count in _of(found, name)] for name in names_in(found, prefix)}
    return {name.removeprefix(prefix): [min(values), max(values)] for name, values in seen.items() if values}


def units_of(replies: Sequence[Measured], trained: Mapping[str, int]) -> dict[str, float]:
    """Return for each metric the count of one training example, as the median client reports it.

    For a language model this is the number of tokens. A metric that fewer than FEWEST clients report is left out.
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
    """Return the replies with the counts that `robust` weighs: no count is above what the client's examples allow.

    The value of each metric stays. `trained` holds the examples that each device trained on; a device that never
    trained counts like the median device. From FEWEST clients on, examples count up to `max_weight` times the median.
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
    """Return the examples that a client trained on; if it never trained, those of the median device."""
    found = max(reply.examples, trained.get(reply.device, 0))
    return found or (median_low(trained.values()) if trained else 0)


def _within(value: tuple[float, float], limit: float) -> tuple[float, float]:
    """Return the (sum, count) with the count reduced to `limit` and the same value."""
    total, count = value
    limit = min(limit, MAX_COUNT) if limit > 0 else MAX_COUNT
    return (total * (limit / count), limit) if limit < count else value


def too_few(clients: int, replies: int) -> bool:
    """Return True if so few of the devices that replied evaluated that one client could decide alone."""
    return clients < FEWEST and 2 * clients < replies


@dataclass(frozen=True)
class Robust:
    """The metrics by which `best` and `target` are decided.

    `means`: the metrics that differ from the pooled ones. `clipped`: `update_id` -> metrics whose value or weight was
    clipped. `widths`: metric -> w, if it is larger than ever before.
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
    """Clip each client's values to the width that the module describes; `widths` are the largest of earlier versions.

    `weighed` are the same replies with the counts of `bounded`. A client whose weight is smaller there is reported as
    clipped.
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
    """Return m, this version's own w, and the median weight of (value, weight) pairs."""
    usual = median_low(weight for _, weight in values)
    middle, left = 0.0, sum(min(weight, usual) for _, weight in values) / 2
    for value, weight in sorted(values):
        middle, left = value, left - min(weight, usual)
        if left <= 0:
            break
    distances = sorted((abs(value - middle) for value, _ in values), reverse=True)
    return middle, max(CLIP_FACTOR * distances[_left_out(values)], MIN_CLIP_SHARE * abs(middle)), usual


def _left_out(values: Sequence[object]) -> int:
    """Return how many of the farthest clients are left out."""
    return 2 if len(values) >= MIN_CLIENTS_FOR_TWO else 1


def _of(all_metrics: Iterable[Metrics], name: str) -> list[tuple[float, float]]:
    """Return the (sum, count) pairs of one metric."""
    return [metrics[name] for metrics in all_metrics if name in metrics and metrics[name][1] > 0]


def better(metric: str, new: float, old: float | None) -> bool:
    """Return True if a value is better than the best so far: lower for a loss, otherwise higher; NaN never is."""
    if math.isnan(new):
        return False
    if old is None:
        return True
    return new < old if metric == "loss" else new > old
