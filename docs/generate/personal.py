"""What personal layers came to, for "Personal layers where labels differ", from docs/evidence/personal.json alone."""

from __future__ import annotations

from benchmarks.personal import FEDAVG
from docs.generate.evidence import measured, paragraph, read
from docs.generate.table import table

GOAL = 0.05  # of the worst client's gain
HEAD = ("model", "method", "mean of the clients", "worst client", "worst client, less FedAvg's")


def personal_part() -> str:
    document = read("personal")
    figures, lines = document["figures"], list[tuple[str, ...]]()
    models, methods = (list(dict.fromkeys(row[name] for row in document["rows"])) for name in ("model", "method"))
    for model in models:
        for method in methods:
            worst = figures[f"worst {model} {method}"]
            gain = f"{worst - figures[f'worst {model} {FEDAVG}']:+.3f}" if method != FEDAVG else ""
            mean = f"{figures[f'mean {model} {method}']:.3f}"
            lines.append((f"`{model}`" * (method == FEDAVG), method, mean, f"{worst:.3f}", gain))
    seeds = len({row["seed"] for row in document["rows"]})
    every = "every client of every run is in [personal.json](personal.json)"
    return "\n\n".join((
        measured(document, f"in a simulation that no clock decides, {seeds} seeds", every),
        table(HEAD, lines),
        paragraph(" ".join(_sentence(model, figures[f"worst_client_gain {model}"]) for model in models)),
    ))  # fmt: skip


def _sentence(model: str, gain: float) -> str:
    """Return one sentence on the goal of a model.

    >>> _sentence("cnn", 0.01)
    'With `cnn` the best method gains 0.010 on the worst client, which misses the goal of 0.05.'
    """
    reached = "reaches" if gain >= GOAL else "misses"
    what = f"gains {gain:.3f}" if gain >= 0 else f"loses {-gain:.3f}"
    return f"With `{model}` the best method {what} on the worst client, which {reached} the goal of {GOAL:g}."
