"""The clients' measurements of one model version as one event."""

from __future__ import annotations

from thinwire.core.events import Evaluated
from thinwire.core.types import ReplyHead
from thinwire.server.measured import better, pooled, spread
from thinwire.server.running import Running


def evaluation(running: Running, version: int, heads: list[ReplyHead], now: float) -> Evaluated | None:
    """Pool what devices measured of one version; None when nobody measured anything."""
    measured = [head.metrics for head in heads if any(name.startswith("eval/") for name in head.metrics)]
    metrics = pooled(measured, "eval/")
    if not metrics:
        return None
    metric = running.plan.run.metric
    best = running.past.best.metrics.get(metric) if running.past.best else None
    examples = int(max(n for found in measured for name, (_, n) in found.items() if name.startswith("eval/")))
    total = sum(int(found.get("eval/loss", (0.0, 0.0))[1]) for found in measured) or examples
    return Evaluated(
        now, running.past.made_by.get(version, 0), version, metrics, spread(measured, "eval/"), total, len(measured),
        best=metric in metrics and better(metric, metrics[metric], best),
    )  # fmt: skip
