"""Curves as an SVG file: a metric over the bytes that were sent, one line a setting, its spread as a band."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 520
LEFT, TOP, RIGHT, BOTTOM = 70, 20, 20, 50
LINE = 18  # of the legend
FONT = 'font-family="sans-serif" font-size="13"'
# Okabe and Ito (2008): told apart with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
TICKS = 6


@dataclass(frozen=True)
class Curve:
    """Points (bytes, mean, spread to either side), bytes rising from above 0."""

    label: str
    points: Sequence[tuple[float, float, float]]


def svg(curves: Sequence[Curve], across: str, upwards: str, target: float | None = None) -> str:
    """The whole file; bytes stand on a logarithmic axis. Curves without points are in the legend only."""
    points = [point for curve in curves for point in curve.points if point[0] > 0]
    marks = [] if target is None else [target]
    low, high = _reach([v for _, mean, sd in points for v in (mean - sd, mean + sd)] + marks)
    first = math.floor(math.log10(min((x for x, _, _ in points), default=1)))
    last = max(first + 1, math.ceil(math.log10(max((x for x, _, _ in points), default=10))))
    legend = LINE * len(curves) + 10

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + legend}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT + legend}" fill="white"/>',
    ]
    for power in range(first, last + 1):
        parts += [
            _line(x(10.0**power), TOP, x(10.0**power), HEIGHT - BOTTOM),
            _text(x(10.0**power), HEIGHT - 30, _bytes(power), "middle"),
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
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = (high - low) * 0.05 or 0.5
    return low - room, high + room


def _bytes(power: int) -> str:
    unit = ("B", "kB", "MB", "GB", "TB")[min(4, max(0, power // 3))]
    return f"{10 ** (power - 3 * min(4, max(0, power // 3))):g} {unit}"


def _joined(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in points)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd", dashes: str = "none") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-dasharray="{dashes}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
