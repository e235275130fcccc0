"""docs/evidence/accuracy-bytes.md and its plots, from docs/evidence/accuracy-bytes.json alone: no figure is typed
by hand, so none can drift from what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.accuracy_bytes.committed import figures, finished, read, reasons
from benchmarks.accuracy_bytes.links import LINKS
from benchmarks.accuracy_bytes.links import name as link_name
from benchmarks.accuracy_bytes.models import FULL
from benchmarks.accuracy_bytes.selection import FALLBACK
from benchmarks.accuracy_bytes.trials import FP32
from docs.generate.accuracy_text import PAGE
from docs.generate.evidence import paragraph
from docs.generate.names import code, count, key, name_of, or_never, signed
from docs.generate.shortfalls import edge
from docs.generate.table import table
from thinwire.cli.runs.compare import Curve, svg
from thinwire.core.formatting import counted

Part = Mapping[str, Any]
GOALS = {"digits": "250", "cnn": "250", "code_lm": "100"}
STOPS = 6  # rounds at which the gap is told
TOLD_LINKS = tuple(link_name(link) for link in LINKS)


def accuracy_page() -> str:
    """docs/evidence/accuracy-bytes.md."""
    document = read()
    text = PAGE.format(fallback=FALLBACK.name, figures=_figures(document), differing=_differing())
    for name in FULL:
        part = finished(document, name)
        text += f"\n## {name}\n\n"
        text += _model(name, part) if part else f"Not there: {reasons(document)[key(name)]}.\n"
    return text


def plots() -> dict[str, str]:
    """SVG files by name: accuracy over the bytes sent, one for each model that has finished."""
    document = read()
    found = {}
    for name in FULL:
        if (part := finished(document, name)) is not None:
            curves = [
                Curve(name_of(chain), [(point["bytes_up"], point["accuracy"], 0.0) for point in points])
                for chain, points in part["curves"].items()
            ]
            found[f"accuracy-bytes-{name}.svg"] = svg(curves, "payload up, all clients together", "accuracy, %")
    return found


def _differing() -> str:
    """What the protocol has for each model, finished or not; candidates are those of the committed run."""
    lines, document = [], read()
    for name, model in FULL.items():
        seeds, part = model.seeds, finished(document, name)
        counts = (seeds.rounds, seeds.rates, seeds.early, seeds.a, seeds.b)
        swept = model.factors and (not part or part["factors"])
        sweeps = f"{seeds.sweep} seeds" if swept else "none"
        cohorts = part["seeds"].get("cohorts", 0) if part else seeds.cohorts
        sweeps += f", {cohorts} of cohorts" if swept and cohorts else ""
        candidates = len(part["first_of_a"] if part else model.candidates)
        more = candidates, f"{100 * model.tuned_after:.0f} %", sweeps, len(model.ways_down)
        lines.append((name, f"`{model.work.split}`", *map(str, (*counts, *more))))
    seeds_of = "R: seeds", "rates: seeds", "first of A", "all A", "B"
    return table(("model", "split", *seeds_of, "candidates", "rates after", "sweeps", "downlink codecs"), lines)


def _figures(document: Part) -> str:
    lines = []
    for (figure, value), name in zip(figures(document).items(), FULL, strict=True):
        part = finished(document, name)
        if part is None:
            lines.append((f"`{figure}`", "not there", GOALS[name], reasons(document)[figure], ""))
            continue
        conclusion, made = part["conclusion"], f"`{part['command']}` at {part['commit'][:12]}, {part['at']}"
        of = f"{code(conclusion['chain'])}: {conclusion['why']}" if conclusion["chain"] else conclusion["why"]
        lines.append((f"`{figure}`", f"{value:.1f}", GOALS[name], of, made))
    return table(("figure", "measured", "goal", "of", "made by"), lines)


def _model(name: str, part: Part) -> str:
    seeds, rounds, work = part["seeds"], part["rounds"], f"{part['steps']} steps of {part['batch']}"
    grid = ", ".join(f"{rate:g}" for rate in part["grid"])
    gain = f"fp32 gains {rounds['gain']:.2f} points over the next quarter"
    return f"""\
{count(part["params"])} parameters, {work} a round. R = {rounds["rounds"]} ({gain}). Learning rates from {grid}.
{_at_an_edge(part)}
Seeds B ({seeds["b"]}), which decide:

{table(HEAD, _rows(part["b"], part["rates"]))}

Seeds A ({seeds["a"]}), on which it was selected:

{table(HEAD, _rows(part["a"], part["rates"]))}

All candidates on the first {seeds["early"]} of seeds A:

{_first(part)}

![accuracy over bytes](accuracy-bytes-{name}.svg)

{_gap(part)}
{_to_target(part)}
{_factors(part)}
{_round_trip(part)}"""


def _at_an_edge(part: Part) -> str:
    told = edge(part)
    return f"\n{paragraph(told)}\n" if told else ""


HEAD = ("chain", "rate", "accuracy, %", "to fp32, points", "bound", "bytes up", "bits a parameter", "ratio")


def _rows(rows: Iterable[Part], rates: Mapping[str, float]) -> list[tuple[str, ...]]:
    return [
        (
            code(row["chain"]), f"{rates[row['chain']]:g}", f"{row['accuracy']:.2f} ± {row['accuracy_sd']:.2f}",
            *_difference(row), f"{row['bytes_up']:,.0f}", f"{row['bits_per_param']:.3f}", f"{row['ratio']:.1f}",
        )
        for row in rows
    ]  # fmt: skip


def _difference(row: Part) -> tuple[str, str]:
    if row["chain"] == FP32.name:
        return "", ""
    return _bounded(row["difference"])


def _bounded(found: Part) -> tuple[str, str]:
    return signed(found["mean"]), signed(found["bound"])


def _first(part: Part) -> str:
    rows = [
        (code(one["chain"]), f"{one['rate']:g}", *_bounded(one["paired"]), f"{one['ratio']:.1f}")
        for one in sorted(part["first_of_a"], key=lambda one: -one["ratio"])
    ]
    return table(("chain", "rate", "to fp32, points", "bound", "ratio"), rows)


def _gap(part: Part) -> str:
    """The gap over R: how far behind fp32 each chain is on the way."""
    curves = {chain: points for chain, points in part["curves"].items() if chain != FP32.name}
    points: list[dict[str, Any]] = next(iter(curves.values()), [])
    at = sorted({points[len(points) * share // STOPS - 1]["round"] for share in range(1, STOPS + 1)} if points else ())
    rows = []
    for chain, found in curves.items():
        gaps = {point["round"]: point["gap"] for point in found}
        rows.append((code(chain), *(signed(gaps.get(number)) for number in at)))
    said = "The gap to fp32 on the way, points (mean over seeds A) after so many rounds:"
    return f"{said}\n\n{table(('chain', *map(str, at)), rows)}\n"


def _to_target(part: Part) -> str:
    found = part["to_target"]
    target = next(iter(found.values()))["target"]
    rows = []
    for chain, one in found.items():
        sent = one["payload_up"]
        seconds = [or_never(one["seconds"][link], ",.1f") for link in TOLD_LINKS]
        reached = f"{one['reached']} of {one['seeds']}", or_never(one["rounds"], ".0f")
        rows.append((code(chain), *reached, or_never(sent and sent / 1e6, ",.3f"), *seconds))
    return f"""\
To {target:g} % for the first time: medians over seeds A, MB of all clients together, seconds on such a link both ways
(the model comes down in fp32):

{table(("chain", "reached", "rounds", "MB up", *TOLD_LINKS), rows)}
"""


def _factors(part: Part) -> str:
    if not part["factors"]:
        return ""
    rows = []
    for one in part["factors"]:
        clients = one.get("clients", part["clients"])
        where = one["split"], f"{round(clients * one['participation'])} of {clients}", code(one["chain"])
        rows.append((*where, f"{one['fp32']:.2f}", *_bounded(one["difference"]), f"{one['ratio']:.1f}"))
    header = ("split", "clients of a round", "chain", "fp32, %", "to fp32, points", "bound", "ratio")
    seeds, cohorts = part["seeds"]["sweep"], part["seeds"].get("cohorts")
    wide = f", {cohorts} with 100 clients" if cohorts else ""
    said = f"One thing changed at a time ({seeds} seeds{wide}, the rates of the centre):"
    return f"{said}\n\n{table(header, rows)}\n"


def _round_trip(part: Part) -> str:
    trip, chosen = part["round_trip"], part["selection"]["chain"]
    if not trip["rows"]:
        return f"Round trip: not measured ({trip['why']}).\n"
    rows = [(code(one["down"], down=True), *_bounded(one["difference"]), f"{one['ratio']:.1f}") for one in trip["rows"]]
    best = f"`{trip['best']['down']}` with {trip['best']['ratio']:.1f}" if trip["best"] else trip["why"]
    on = f"on {counted(trip['rows'][0]['difference']['seeds'], 'seed')} A"
    lead = "The fewest bytes of those that are non-inferior, or with fewer than 5 seeds lose under half a point"
    said = f"Both ways, {code(chosen)} up, against fp32 both ways, {on}. {lead}: {best}."
    return f"{said}\n\n{table(('down', 'to fp32, points', 'bound', 'round-trip ratio'), rows)}\n"
