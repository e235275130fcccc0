"""Measure what a round costs beside training: ours and Flower's own, with nobody training, on one machine in one run.

    python -m benchmarks.round_overhead [--preset small|full] --json

A no-op round sends four floats to three devices and waits for three answers. Ours is the complete path: signed
requests, journal, spool with fsync, database commit, fold, step and a model file a round. The stock side sends and
receives, and stores nothing; on neither side does a device make anything durable. The big rounds move a model of
100 MB to and from each of the three; ours averages it. The sides take turns, so that a machine that gets slower gets
slower for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.noop_client import Shape
from benchmarks.ours import Made, Ours
from benchmarks.processes import Processes
from benchmarks.stock import Stock

CLIENTS = 3
SMALL = Shape(1, 2, 2)
LARGE = Shape(25, 1000, 1000)  # 25 M float32: 100 MB


@dataclass(frozen=True)
class Preset:
    """Blocks of rounds; the first of a run warms up and counts like the others: figures are medians."""

    noop_blocks: int
    noop_stock: int
    noop_ours: int
    big_blocks: int
    big_stock: int
    big_ours: int
    large: Shape = LARGE


PRESETS = {
    "tiny": Preset(1, 0, 4, 1, 0, 3, Shape(2, 100, 100)),  # ours alone, in seconds: for the tests
    "small": Preset(2, 3, 60, 1, 3, 4),
    "full": Preset(4, 6, 200, 3, 4, 6),
}


@dataclass
class Measured:
    """Rounds of both sides, as they came."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    made: dict[str, list[Made]] = field(default_factory=lambda: {"noop": [], "big": []})

    def add(self, side: str, kind: str, seconds: list[float]) -> None:
        before = len(self.seconds(side, kind))
        for number, each in enumerate(seconds, before + 1):
            self.rows.append({"side": side, "kind": kind, "round": number, "seconds": round(each, 6)})
        note(f"{kind:5} {side:6} {len(seconds)} rounds, median {median(seconds):.4f} s")

    def seconds(self, side: str, kind: str) -> list[float]:
        return [row["seconds"] for row in self.rows if (row["side"], row["kind"]) == (side, kind)]


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Start both sides, let them take turns, and add up."""
    found = Measured()
    with Processes(folder) as processes:
        ours = Ours(folder, processes, CLIENTS, {"noop": SMALL, "big": preset.large})
        stock = Stock(folder, processes, CLIENTS) if preset.noop_stock or preset.big_stock else None

        def turn(kind: str, shape: Shape, stock_rounds: int, ours_rounds: int, each_s: float) -> None:
            if stock is not None:
                found.add("stock", kind, stock.rounds(stock_rounds, shape.floats, 60 + each_s * stock_rounds))
            made = ours.rounds(kind, ours_rounds, 60 + each_s * ours_rounds)
            found.made[kind].append(made)
            found.add("ours", kind, made.seconds)

        for _ in range(preset.noop_blocks):
            turn("noop", SMALL, preset.noop_stock, preset.noop_ours, 15)
        for _ in range(preset.big_blocks):
            turn("big", preset.large, preset.big_stock, preset.big_ours, 60)
        figures = _figures(found, preset)
        figures["big_peak_models"] = (ours.peak_bytes() - ours.idle_bytes) / (4 * preset.large.floats)
        figures["idle_mb"] = ours.idle_bytes / 1e6
        if stock is not None:
            figures["big_stock_superlink_mb"] = stock.peak_bytes() / 1e6
        ours.close()
    return found.rows, figures


def _figures(found: Measured, preset: Preset) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind, side, name in (
        ("noop", "ours", "noop_ours"), ("noop", "stock", "noop_stock"),
        ("big", "ours", "big_round"), ("big", "stock", "big_stock"),
    ):  # fmt: skip
        if seconds := found.seconds(side, kind):
            spread: dict[str, Callable[[list[float]], float]] = {"": median, "_least": min, "_most": max}
            figures |= {f"{name}{word}_s": of(seconds) for word, of in spread.items()}
    if "noop_stock_s" in figures:
        figures["noop_ratio"] = figures["noop_stock_s"] / figures["noop_ours_s"]
    noop = found.made["noop"]
    answers = CLIENTS * preset.noop_ours * len(noop)
    figures["requests_per_client_round"] = sum(made.requests for made in noop) / len(noop)
    figures["server_cpu_ms_per_client_round"] = 1000 * sum(made.cpu_s for made in noop) / answers
    return figures


if __name__ == "__main__":
    run_in_folder("round_overhead", __doc__, PRESETS, measure)
