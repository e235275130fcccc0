"""`thinwire runs compare`: a table and a plot of runs, by settings, with mean and spread over seeds.

The plot is an SVG file: the metric over the sent bytes, one line for each setting, its spread as a band.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json
from thinwire.core import formatting

if TYPE_CHECKING:
    from thinwire.reports.comparison import Link, Row, Spread


TO = "target of a metric: shows bytes and seconds to it"
MBPS = "Mb/s of a link added to simulated runs; 0: none"


def compare(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="runs to compare; or --group")] = None,
    group: Annotated[str | None, typer.Option("--group", help="compare the runs of sim --sweep --name GROUP")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="METRIC=VALUE", help=TO)] = None,
    mbps: Annotated[float, typer.Option("--mbps", min=0.0, help=MBPS)] = 0.0,
    rtt_ms: Annotated[float, typer.Option("--rtt-ms", min=0.0, help="round trip of that link, in ms")] = 0.0,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="also write the table to this file")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="plot the metric over bytes")] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Compare runs: bytes and seconds, also to a target; a group's runs with mean and spread over seeds.

    Each named run has a row, with the bytes that `runs show` prints; those that were stopped or failed come apart. Runs
    of a group that differ in nothing but the seed are one row. Bytes are payload of all clients together. Seconds are
    those of clients that work in parallel: of simulated ones without a link, unless --mbps and --rtt-ms add one.
    """
    from thinwire.reports.comparison import Link, figures

    metric, target = _target(to)
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} is no SVG file: --plot writes SVG, so its name ends in .svg")
    if bool(ids) == bool(group):
        raise typer.BadParameter("name either runs (thinwire runs compare ID ID) or one --group")
    link = Link(mbps, rtt_ms)
    rows, apart, metric, document = (
        _of_group(str(group), metric, target, link, home)
        if group
        else _of_runs(ids or [], metric, target, link, home, plot is not None)
    )
    if csv is not None:
        _write_csv(csv, [figures(row) for row in (*rows, *apart)])
    if plot is not None:
        _write_plot(plot, [*rows, *apart], metric, target)
    if json:
        console.document({"group": group, **document})
        return
    if target is not None:
        way, over = "at most" if metric == "loss" else "at least", "; mean and standard deviation over seeds"
        console.note(f"reached, and what follows it: to {metric} {way} {target:g}{over if group else ''}")
    if rows:
        _show(rows, metric, target)
    if apart:
        console.note("stopped or failed: what they sent and took is of a part of their plan")
        _show(apart, metric, target)


Compared: TypeAlias = "tuple[list[Row], list[Row], str, dict[str, Any]]"  # rows, rows apart, metric, document


def _of_group(name: str, metric: str, target: float | None, link: Link, home: Path | None) -> Compared:
    """Compare the simulated runs of a group by their settings."""
    from thinwire.cli.local_state import aggregator_home, require_home
    from thinwire.reports.comparison import compare as compared
    from thinwire.reports.comparison import figures, judged_by
    from thinwire.reports.sweep_results import TrialStore

    require_home(home)
    cells = list(TrialStore.named(aggregator_home(home).sweeps, name).found().values())
    known = {metric for cell in cells for metric in cell.metrics}
    _require_measured(metric, known | {name for cell in cells for each in cell.rounds for name in each.metrics})
    metric = metric or judged_by(cells[0].made.plan, known)
    rows = compared(cells, metric, target, link)
    return rows, [], metric, {"metric": metric, "target": target, "rows": [figures(row) for row in rows]}


def _of_runs(
    ids: list[str], metric: str, target: float | None, link: Link, home: Path | None, with_rounds: bool
) -> Compared:
    """Compare stored runs, a row each."""
    from thinwire.cli.local_state import end_abandoned, open_store
    from thinwire.reports.comparison import compare_runs

    end_abandoned(home)
    with open_store(home) as store:
        found = compare_runs(store, ids, metric, target, link, with_rounds)
    _require_measured(metric, set(found.metrics))
    return found.rows, found.apart, found.metric, found.document()


def _target(to: str | None) -> tuple[str, float | None]:
    """Parse `--to METRIC=VALUE` into (metric, value); ("", None) without it."""
    if to is None:
        return "", None
    metric, _, value = to.partition("=")
    with contextlib.suppress(ValueError):
        if math.isfinite(target := float(value)):
            return metric.strip(), target
    raise typer.BadParameter(f"{to!r} is no target: --to metric=value, as in --to accuracy=0.9")


def _require_measured(metric: str, known: set[str]) -> None:
    """Raise a usage error for a metric that no run has; otherwise the table would show it as never reached."""
    if metric and known and metric not in known:
        raise typer.BadParameter(f"no run has a metric {metric!r}: there is {', '.join(sorted(known))}")


def _show(rows: Sequence[Row], metric: str, target: float | None) -> None:
    """Print the table of the compared settings; for stored runs, which have ids, their settings come last."""
    keys = list(rows[0].settings)
    is_stored = "run" in keys
    header: tuple[str, ...] = ("status" if is_stored else "runs", metric, "payload up", "times less", "payload down")
    header += ("time in rounds",)
    if target is not None:
        header += ("reached", "rounds to", "up to", "down to", "seconds to")
    cells = []
    first, last = (["run"], [key for key in keys if key != "run"]) if is_stored else (keys, [])
    for row in rows:
        shown = [
            row.cells[0].status if is_stored else _runs(row),
            _pair(row.value, ".4f"), _size(row.payload_up),
            f"{row.ratio_up:.1f}" if row.ratio_up else formatting.NOTHING,
            _size(row.payload_down), _seconds(row.seconds),
        ]  # fmt: skip
        if target is not None:
            shown += [f"{row.reached}/{row.runs}"]
            shown += [_pair(row.rounds_to, ".1f"), _size(row.up_to), _size(row.down_to), _seconds(row.seconds_to)]
            shown[-4:] = shown[-4:] if row.reached else ["never"] * 4
        settings = {key: _brief(key, value) for key, value in row.settings.items()}
        cells.append([*map(settings.__getitem__, first), *shown, *map(settings.__getitem__, last)])
    console.table((*first, *header, *last), cells, right=header)


def _runs(row: Row) -> str:
    """Format the number of runs of a row, with those that are not done.

    >>> from types import SimpleNamespace
    >>> _runs(SimpleNamespace(runs=3, failed=1, stopped=1))
    '3 (1 failed, 1 stopped)'
    """
    counted = ((row.failed, "failed"), (row.stopped, "stopped"))
    said = ", ".join(f"{count} {status}" for count, status in counted if count)
    return f"{row.runs} ({said})" if said else f"{row.runs}"


def _brief(key: str, value: str) -> str:
    """Return the value of a setting, with digests shortened to 16 letters.

    >>> _brief("plan_digest", "0123456789abcdef0123"), _brief("seed", "0123456789abcdef0123")
    ('0123456789abcdef', '0123456789abcdef0123')
    """
    return value[:16] if key.endswith("digest") else value


def _pair(spread: Spread | None, form: str) -> str:
    """Format a mean and its standard deviation."""
    if spread is None:
        return formatting.NOTHING
    return f"{spread.mean:{form}}" + (f" ± {spread.sd:{form}}" if spread.sd is not None else "")


def _size(spread: Spread | None) -> str:
    """Format a mean number of bytes."""
    return formatting.size(spread.mean) if spread else formatting.NOTHING


def _seconds(spread: Spread | None) -> str:
    """Format a mean duration."""
    return formatting.duration(spread.mean) if spread else formatting.NOTHING


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows to a CSV file with a header."""
    from thinwire.core.statedir import disk_error

    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise disk_error(error, path) from error


def _write_plot(path: Path, rows: Sequence[Row], metric: str, target: float | None) -> None:
    """Write the plot of the rows to an SVG file."""
    from thinwire.core.statedir import disk_error
    from thinwire.reports.comparison import curve

    curves = [Curve(row.label, [(sent, s.mean, s.sd or 0.0) for sent, s in curve(row, metric)]) for row in rows]
    try:
        path.write_text(svg(curves, "payload up, all clients together", metric, target))
    except OSError as error:
        raise disk_error(error, path) from error


WIDTH, HEIGHT = 860, 520
LEFT, TOP, RIGHT, BOTTOM = 70, 20, 20, 50
LINE = 18  # height of a line of the legend
FONT = 'font-family="sans-serif" font-size="13"'
# Okabe and Ito (2008): distinguishable with every kind of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
TICKS = 6


@dataclass(frozen=True)
class Curve:
    """The line of one setting: points (bytes, mean, spread to either side), with bytes above 0 and increasing."""

    label: str
    points: Sequence[tuple[float, float, float]]


def svg(curves: Sequence[Curve], across: str, upwards: str, target: float | None = None) -> str:
    """Return the SVG file of the curves, with bytes on a logarithmic axis and `target` as a dashed line.

    A curve without points appears in the legend only.
    """
    points = [point for curve in curves for point in curve.points if point[0] > 0]
    marks = [] if target is None else [target]
    low, high = _reach([v for _, mean, sd in points for v in (mean - sd, mean + sd)] + marks)
    first = math.floor(math.log10(min((x for x, _, _ in points), default=1)))
    last = max(first + 1, math.ceil(math.log10(max((x for x, _, _ in points), default=10))))
    legend = LINE * len(curves) + 10

    def x(value: float) -> float:
        """Return the horizontal position of a number of bytes."""
        return LEFT + (math.log10(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        """Return the vertical position of a value."""
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + legend}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT + legend}" fill="white"/>',
    ]
    for power in range(first, last + 1):
        parts += [
            _line(x(10.0**power), TOP, x(10.0**power), HEIGHT - BOTTOM),
            _text(x(10.0**power), HEIGHT - 30, formatting.size(10.0**power), "middle"),
        ]
    for tick in range(TICKS):
        value = low + (high - low) * tick / (TICKS - 1)
        parts += [_line(LEFT, y(value), WIDTH - RIGHT, y(value)), _text(LEFT - 8, y(value) + 4, f"{value:.3g}", "end")]
    if target is not None:
        parts.append(_line(LEFT, y(target), WIDTH - RIGHT, y(target), "#444", "5 4"))
    parts += [_text(WIDTH / 2, HEIGHT - 10, across, "middle"), _text(LEFT, 14, upwards, "start")]
    for number, curve in enumerate(curves):
        colour, at = COLOURS[number % len(COLOURS)], HEIGHT + LINE * (number + 0.5)
        there = [(x(sent), mean, sd) for sent, mean, sd in curve.points if sent > 0]
        upper, lower = [(px, y(m + s)) for px, m, s in there], [(px, y(m - s)) for px, m, s in there]
        middle = _joined((px, y(m)) for px, m, _ in there)
        parts += [
            f'<polygon points="{_joined([*upper, *reversed(lower)])}" fill="{colour}" opacity="0.15"/>',
            f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<rect x="{LEFT}" y="{at - 9:.1f}" width="14" height="4" fill="{colour}"/>',
            _text(LEFT + 22, at - 3, curve.label, "start"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _reach(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the value axis, with a margin around the values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = (high - low) * 0.05 or 0.5
    return low - room, high + room


def _joined(points: Iterable[tuple[float, float]]) -> str:
    """Format points for an SVG attribute."""
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in points)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd", dashes: str = "none") -> str:
    """Return an SVG line."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    """Return an SVG text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
