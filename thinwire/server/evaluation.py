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
        best=metric in metrics and better(metric, metrics[metric], best), **_bytes(running, heads),
    )  # fmt: skip


def _bytes(running: Running, heads: list[ReplyHead]) -> dict[str, int]:
    """What answers that only measure took; those that also train are counted as updates."""
    alone = [head for head in heads if not head.parts]
    wires = [head.transfer for head in alone if head.transfer and head.transfer.sent_bytes is not None]
    found = {"payload_bytes": sum(running.measuring.get(head.ask_id, 0) for head in alone)} if alone else {}
    if wires:
        found["sent_bytes"] = sum(wire.sent_bytes or 0 for wire in wires)
        found["received_bytes"] = sum(wire.received_bytes or 0 for wire in wires)
    return found
