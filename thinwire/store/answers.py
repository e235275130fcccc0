"""The head of an answer as columns of its update: every field may be missing, none is trusted to be small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ANSWER: Mapping[str, Any] = {
    "pulled_at": None, "began_at": None, "arrived_at": None, "download_s": None, "queue_s": None, "evaluate_s": None,
    "train_s": None, "encode_s": None, "examples": 0, "steps": 0, "norm": None, "residual_norm": None,
    "residual_ratio": None, "state_lost": "",
    "requests": 0, "metrics": {}, "payload_up": 0, "wire_up": None, "wire_down": None,
}  # fmt: skip


def columns(head: Mapping[str, Any]) -> dict[str, Any]:
    """All columns that an answer fills; `metrics` become sum over count."""
    transfer, timings = head.get("transfer") or {}, head.get("timings") or {}
    own = {name: head[name] for name in ("examples", "steps", "norm", "residual_norm") if name in head}
    times = {name: timings[name] for name in ANSWER.keys() & timings.keys() if name.endswith("_s")}
    moments = {name: transfer[name] or None for name in ("pulled_at", "began_at", "arrived_at") if name in transfer}
    return {
        **ANSWER, **own, **times, **moments,
        "residual_ratio": residual_ratio(head),
        "state_lost": str(head.get("lost") or ""),
        "requests": transfer.get("requests", 0),
        "metrics": means(head.get("metrics") or {}),
        "payload_up": sum(part["length"] for part in head.get("parts", ())),
        "wire_up": transfer.get("received_bytes"),
        "wire_down": transfer.get("sent_bytes"),
    }  # fmt: skip


def residual_ratio(head: Mapping[str, Any]) -> float | None:
    """How large what was not sent is beside the change: the residual is of the change over `a`, `norm` of the change.

    >>> residual_ratio({"norm": 10.0, "a": 5.0, "residual_norm": 3.0})
    1.5
    """
    norm, a, residual = (head.get(name) or 0.0 for name in ("norm", "a", "residual_norm"))
    if not (norm > 0 and a > 0 and residual >= 0):
        return None
    ratio = residual / norm * a
    return ratio if math.isfinite(ratio) else None


def means(metrics: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Each metric's sum over its count; what counted nothing is left out.

    >>> means({"eval/loss": (3.0, 2.0), "eval/accuracy": (0.0, 0.0)})
    {'eval/loss': 1.5}
    """
    return {name: total / count for name, (total, count) in metrics.items() if count}
