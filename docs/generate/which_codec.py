"""The tables of docs/evidence/codec-choice.md, from docs/evidence/accuracy-bytes.json alone."""

from __future__ import annotations

from benchmarks.accuracy_bytes.changed import CHANGED, PROTOCOL
from benchmarks.accuracy_bytes.committed import finished, read, reasons
from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.trials import FP32
from docs.generate.evidence import paragraph
from docs.generate.names import code, count, key, or_never, size
from docs.generate.shortfalls import Part, default_elsewhere, default_here, slower
from docs.generate.table import table


def which_codec() -> str:
    """What each chain is worth on a link of 10 Mb/s, model by model, and which one fresh seeds have decided for."""
    document, shown = read(), []
    for name in FULL:
        part = finished(document, name)
        if part is None:
            shown.append(f"**{name}**: not measured yet ({reasons(document)[key(name)]}).")
            continue
        about = f"**{name}**, {count(part['params'])} parameters, {part['rounds']['rounds']} rounds. {_decided(part)}"
        rules = f"Its rules are those of the {PROTOCOL[name]} protocol: {CHANGED[name]}."
        told = " ".join(filter(None, (default_here(part), default_elsewhere(part), slower(part))))
        shown += [about, _on_a_link(part), *(paragraph(one) for one in (told, rules) if one)]
    return "\n\n".join(shown)


def _decided(part: Part) -> str:
    conclusion, best = part["conclusion"], part["round_trip"]["best"]
    if conclusion["chain"] is None:
        return "No chain stayed within half a point of fp32 on fresh seeds."
    (row,) = (row for row in part["b"] if row["chain"] == conclusion["chain"])
    said = (
        f"**Take {code(conclusion['chain'])}**: {row['ratio']:.1f} times fewer bytes\n"
        f"up, and on {row['difference']['seeds']} fresh seeds (B), run for it alone, it lost at most {lost(row)} points"
    )
    if best is None:
        return f"{said}."
    return f"{said}; with {code(best['down'], down=True)} down too, {best['ratio']:.0f} times fewer both ways."


def _on_a_link(part: Part) -> str:
    of_a = {row["chain"]: row for row in part["a"]}
    rows = []
    for chain, one in part["to_target"].items():
        row = of_a[chain]
        rows.append((
            code(chain), f"{row['ratio']:.1f}", "" if chain == FP32.name else lost(row), size(row["bytes_up"]),
            or_never(one["seconds"]["10 Mb/s, 20 ms"], ",.1f"), or_never(one["seconds"]["1 Mb/s, 20 ms"], ",.1f"),
        ))  # fmt: skip
    target = next(iter(part["to_target"].values()))["target"]
    header = ("chain", "times fewer bytes up", "points lost at most, seeds A", "an update")
    return table((*header, f"s to {target:g} % at 10 Mb/s", "at 1 Mb/s"), rows)


def lost(row: Part) -> str:
    """Points of accuracy that a chain loses to fp32 at most, with a confidence of 95 %."""
    return f"{max(0.0, -row['difference']['bound']):.2f}"
