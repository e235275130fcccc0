"""What algorithms against drift came to, for "Devices whose data differ", from docs/evidence/drift.json alone."""

from __future__ import annotations

from docs.generate.evidence import measured, read
from docs.generate.table import table

HEAD = ("`[uplink] codec`", "algorithm", "accuracy", "points over FedAvg", "loss", "bytes up")


def drift_part() -> str:
    document = read("drift")
    figures, rows = document["figures"], document["rows"]
    lines, before = list[tuple[str, ...]](), ""
    for codec, algorithm in dict.fromkeys((row["uplink"], row["algorithm"]) for row in rows):
        name = f"{algorithm} {codec}"
        error = f" ± {figures[f'gain_error {name}']:.1f}" if f"gain_error {name}" in figures else ""
        gain = f"{figures[f'gain {name}']:+.1f}{error}" if f"gain {name}" in figures else ""
        lines.append((
            f"`{codec}`" * (codec != before), _typed(algorithm), f"{figures[f'accuracy {name}']:.3f}", gain,
            f"{figures[f'loss {name}']:.3f}", f"{figures[f'payload_up {name}'] / 1e3:,.1f} kB",
        ))  # fmt: skip
        before = codec
    seeds = len({row["seed"] for row in rows})
    every = "every single run is in [drift.json](../evidence/drift.json)"
    return "\n\n".join((
        measured(document, f"in a simulation that no clock decides, {seeds} seeds", every),
        "Means over the last quarter of the rounds and the seeds; ± is the standard error of the mean gain of a seed.",
        table(HEAD, lines),
    ))  # fmt: skip


def _typed(algorithm: str) -> str:
    """An algorithm with its settings, as a plan has them.

    >>> _typed("feddyn, alpha = 0.01")
    '`feddyn`, `alpha = 0.01`'
    """
    return ", ".join(f"`{word}`" for word in algorithm.split(", "))
