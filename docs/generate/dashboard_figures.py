"""Tables of what the dashboard and several runs at once take, from page, dashboard-load and several-runs.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from docs.generate.evidence import measured, read
from docs.generate.table import table

Goals = Mapping[str, tuple[float, str]]
HEADER = ("figure", "value", "goal", "met", "what it is")
BESIDE = "with nothing else at work on the machine"

PAGE: Goals = {
    "cold_first_curve_ms": (1000, "navigation to the first drawn curve, a new dashboard process, empty cache"),
    "first_load_kb": (150, "bytes of that load on the network"),
    "frame_p95_ms": (33, "time between two frames while four replies a second arrive"),
    "live_core_share": (0.15, "processor of the dashboard meanwhile, in cores"),
    "dashboard_rss_mb": (150, "peak memory of the dashboard's process (MB)"),
    "js_heap_mb": (100, "its JavaScript objects in the browser (MB)"),
    "query_p95_ms": (50, "a read over HTTP: whole, changes only, a page of rounds and of clients, an early round"),
    "runs_show_why_s": (1, "`thinwire runs show --why`, the whole command"),
}
LOAD: Goals = {
    "request_p95_ms": (100, "a read over HTTP meanwhile, the largest of the pairs"),
    "event_delay_p95_ms": (1000, "from an event's own time until a reader has it, the largest of the pairs"),
    "training_slowdown_percent": (
        5,
        "CPU seconds of aggregator and clients with readers, beyond those without",
    ),
    "lost_readers": (0, "event streams that ended"),
}
LEAST = ("speedup",)  # figures whose goal is a lower bound
RUNS: Goals = {
    "speedup": (1.5, "seconds of four runs one after the other, divided by those of the same four together"),
    "fairness": (
        1.2,
        "device-seconds by priority of the run that had most, divided by those of the run that had least",
    ),
}


def dashboard_part() -> str:
    """Return the tables of a long run, of many readers, and of several runs."""
    page, load, runs = read("page"), read("dashboard-load"), read("several-runs")
    return "\n\n".join((
        "## A long run and a wide one",
        measured(page, BESIDE),
        _goals(page["figures"], PAGE),
        "## Many readers",
        measured(load, BESIDE),
        _goals(load["figures"], LOAD),
        "## Several runs on the same devices",
        measured(runs, "on a virtual clock"),
        _goals(runs["figures"], RUNS),
    ))  # fmt: skip


def _goals(figures: Mapping[str, float], goals: Goals) -> str:
    return table(HEADER, [
        (f"`{name}`", f"{figures[name]:.3g}", f"{'at least ' * (name in LEAST)}{goal:g}",
         _met(name, figures[name], goal), meaning)
        for name, (goal, meaning) in goals.items()
    ])  # fmt: skip


def _met(name: str, value: float, goal: float) -> str:
    return "yes" if (value >= goal if name in LEAST else value <= goal) else "no"


PARTS: dict[str, Callable[[], str]] = {"dashboard": dashboard_part}
