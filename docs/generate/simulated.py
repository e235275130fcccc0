"""The tables of docs/evidence/simulation.md, from docs/evidence/simulation.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.simulation import FLOWER, OURS, PRESETS, THEIRS, Case
from docs.generate.evidence import Row, measured, paragraph, read
from docs.generate.names import count
from docs.generate.table import table

QUIET = 1.0  # of two cores; the mean of a minute still has what ended before it
BUSY = "**These figures decide nothing**: they are there until the command has run on a machine that does nothing else."
GOALS = {"sim_overhead_ratio": "10", "sim_ratio": "1.5"}
RATIO_OF = {"few": "sim_overhead_ratio", "many": "sim_overhead_ratio_thousand", "mlp": "sim_ratio"}
MEANS = {
    "sim_overhead_ratio": "Flower's round over ours, when {few} get 10 000 parameters and give them back",
    "sim_overhead_ratio_thousand": "the same with {many}",
    "sim_ratio": "Flower's round over ours, when {mlp} train the digits MLP for 50 steps",
    "client_rounds_per_s": "answers a second without work, {many} a round",
    "peak_mb": "the most that all processes of such a run held together (PSS)",
    "around_s": "of such a run: imports, start, first round and end",
}


def simulation_part() -> str:
    document = read("simulation")
    rows: Sequence[Row] = document["rows"]
    there = [row for row in rows if "round_s" in row]
    shown = [measured(document, _how(document["figures"]), f"Flower's side is `{FLOWER}`")]
    if document["figures"]["load_before"] >= QUIET:
        shown.append(BUSY)
    shown.append(_figures(document))
    shown.append(_rounds(there, document["figures"]))
    shown += [paragraph(f"Flower's side is not there: {row['skipped']}") for row in rows if "skipped" in row]
    return "\n\n".join(shown)


def _how(figures: Mapping[str, float]) -> str:
    load = figures["load_before"]
    if load < QUIET:
        return "with nothing else running"
    return f"beside other work (the load before it was {load:.1f})"


def _figures(document: Mapping[str, Any]) -> str:
    figures, preset = document["figures"], PRESETS[document["preset"]]
    of = {name: _clients(case) for name, case in preset.cases}
    lines = []
    for name, meaning in MEANS.items():
        theirs = figures.get(f"flower_{name}")
        lines.append((
            f"`{name}`", _short(figures.get(name)), "" if theirs is None else _short(theirs), GOALS.get(name, ""),
            meaning.format(**of),
        ))  # fmt: skip
    return table(("figure", "measured", "Flower's", "goal", "what it is"), lines)


def _clients(case: Case) -> str:
    return f"{case.selected} of {case.clients} clients"


def _short(value: float | None) -> str:
    return "not there" if value is None else f"{value:.3g}"


def _rounds(rows: Sequence[Row], figures: Mapping[str, float]) -> str:
    columns = sorted({(row["side"], row["workers"]) for row in rows}, key=lambda one: (one[0] != OURS, one[1]))
    found = {(row["case"], row["side"], row["workers"]): row for row in rows}
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        about = next(row for row in rows if row["case"] == case)
        work = "50 steps of the MLP" if about["work"] == "mlp" else "no work"
        cells = [_ms(found.get((case, *column))) for column in columns]
        lines.append(
            (f"{about['selected']} of {about['clients']}, {work}", *cells, _short(figures.get(RATIO_OF[case])))
        )
    header = [_who(side, workers) for side, workers in columns]
    return table(("case", *header, "ratio"), lines)


def _who(side: str, workers: int) -> str:
    name, noun = {OURS: ("ours", "process"), THEIRS: ("Flower", "actor")}[side]
    many = "" if workers == 1 else "es" if noun.endswith("s") else "s"
    return f"{name}, {workers} {noun}{many}"


def _ms(row: Row | None) -> str:
    if row is None:
        return ""
    ms = 1000 * row["round_s"]
    return f"{count(round(ms))} ms" if ms >= 100 else f"{ms:.3g} ms"


PARTS: dict[str, Callable[[], str]] = {"simulation": simulation_part}
