"""What robust reductions came to beside hostile clients, from docs/evidence/robust.json alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.robust import IID, NAMED
from docs.generate.evidence import measured, read
from docs.generate.table import table

GOALS = {  # figure -> its goal, its meaning
    "worst_gap_30": ("at most 0.03", f"accuracy that `{NAMED}` loses in the worst attack and task, iid"),
    "backdoor_success": ("", f"share of stamped images that the model of `{NAMED}` takes for the target, iid"),
    "seconds_ratio_flower": ("at least 3", "Flower's seconds over ours, the least of four functions, 20 clients"),
    "peak_models": ("at most 4", "most memory of a round above its model, in models of float32"),
    "flower_apart": ("at most 1e-5", "largest difference to Flower's functions on the same vectors"),
}


def robust_part() -> str:
    """Return the figures, the accuracy of each reduction under each attack, and what a reduction costs."""
    document = read("robust")
    of = defaultdict[str, list[Mapping[str, Any]]](list)
    for row in document["rows"]:
        of[row["what"]].append(row)
    figures = [
        (f"`{name}`", f"{document['figures'][name]:.3g}", goal, meaning) for name, (goal, meaning) in GOALS.items()
    ]
    parts = [
        measured(
            document, "with other work on the same two cores", "every single run is in [robust.json](robust.json)"
        ),
        table(("figure", "measured", "goal", "what it is"), figures),
    ]
    for task, split in dict.fromkeys((row["task"], row["split"]) for row in of["accuracy"]):
        rows = [row for row in of["accuracy"] if (row["task"], row["split"]) == (task, split)]
        spread = "iid" if split == IID else f"`{split}`"
        parts += [f"## Accuracy of `{task}`, {spread}", _accuracies(rows)]
    parts += ["## What a reduction costs", _seconds(of["seconds"]), _memory(of["memory"])]
    return "\n\n".join(parts)


def _accuracies(rows: list[Mapping[str, Any]]) -> str:
    """Return the mean over the seeds of each reduction by attack; behind a bar the success of the backdoor."""
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    cells = defaultdict[tuple[str, str], list[Mapping[str, Any]]](list)
    for row in rows:
        cells[row["reduce"], row["attack"]].append(row)
    lines = []
    for spec in dict.fromkeys(row["reduce"] for row in rows):
        line = [f"`{spec}`" if spec != "honest" else "the honest alone"]
        for attack in attacks:
            found = cells[spec, attack]
            told = f"{fmean(row['accuracy'] for row in found):.3f}" if found else ""
            if attack == "backdoor" and found:
                told += f" ({fmean(row['backdoor'] for row in found):.0%})"
            line.append(told)
        lines.append(tuple(line))
    return table(("`reduce`", *attacks), lines)


def _seconds(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        (f"`{row['reduce']}`", f"{row['ours_s']:.1f}", f"{row['flower_s']:.1f}", f"{row['ratio']:.1f}") for row in rows
    ]
    head = f"{rows[0]['params'] / 1e6:.0f} M parameters, {rows[0]['clients']} clients"
    return table((head, "seconds", "Flower's", "Flower's over ours"), lines)


def _memory(rows: list[Mapping[str, Any]]) -> str:
    lines = [
        (f"`{row['reduce']}`", f"`{row['codec']}`", str(row["clients"]), f"{row['peak_models']:.2f}") for row in rows
    ]
    return table(("`reduce`", "codec", "clients", "models in memory"), lines)
