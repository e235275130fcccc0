"""What a codec below one bit could still gain, from docs/evidence/update-structure.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docs.generate.evidence import measured, read
from docs.generate.table import table

GAINS = ("predicted_gain", "layer_gain", "factored_gain", "guessed_gain")


def structure_part() -> str:
    """Return the gains of each model by quarters of its rounds, and the distance of eden to the bound."""
    document = read("update-structure")
    updates = [row for row in document["rows"] if row["what"] == "updates"]
    bounds = [row for row in document["rows"] if row["what"] == "bound"]
    header = ("model", "rounds", "cosine with the last change", *(f"`{name}`" for name in GAINS))
    limits = ("b", "omega", "bits over the least for this omega")
    return "\n\n".join((
        measured(document, "simulated"),
        table(header, [_line(name, updates) for name in dict.fromkeys(row["model"] for row in updates)]),
        table(limits, [(f"{row['b']:g}", f"{row['omega']:.2f}", f"{row['bound_ratio']:.2f}") for row in bounds]),
    ))  # fmt: skip


def _line(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the means of the quarters of one model, from the first to the last."""
    own = [row for row in rows if row["model"] == name]
    return (
        f"`{name}`", str(sum(row["rounds"] for row in own)), _quarters(own, "cosine"),
        *(_quarters(own, gain) for gain in GAINS),
    )  # fmt: skip


def _quarters(rows: Sequence[Mapping[str, Any]], figure: str) -> str:
    return ", ".join(f"{row[figure]:.2f}" for row in rows)
