"""What a person sees: data on stdout, progress on stderr and only where a terminal is."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from thinwire.cli import table as tables

NOTHING = tables.NOTHING


def document(data: Any) -> None:
    """One JSON document on stdout."""
    try:
        text = json.dumps(data, indent=2, default=str, allow_nan=False)
    except ValueError:  # a measure that is no number, stored before such were refused: JSON has none, and null says so
        read = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
        text = json.dumps(read, indent=2)
    print(text)


def line(text: str = "") -> None:
    """One line of data on stdout, flushed: a service's reader may be a pipe."""
    print(text, flush=True)


def sentence(text: str, begin: str = "") -> None:
    """Words on stdout behind `begin`: whole for a pipe; where a terminal is narrower, they go on below themselves."""
    columns = tables.terminal_columns()
    for each in [begin + text] if columns is None else tables.wrapped(text, columns, begin):
        line(each)


def note(text: str) -> None:
    """A remark to whoever watches, on stderr."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether a person sits before it."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Columns with two blanks between them, those named in `right` set to the right; no wider than a terminal is.

    Cells may be words of devices and strangers: they are shown plain.
    """
    from thinwire.core.texts import plain

    shown = [[NOTHING if cell is None or cell == "" else plain(str(cell)) for cell in row] for row in rows]
    for text in tables.lines_of(header, shown, right, tables.terminal_columns()):
        line(text)


def size(count: float | None) -> str:
    """Bytes in decimal units, three figures.

    >>> size(9610 * 4), size(950), size(None)
    ('38.4 kB', '950 B', '-')
    """
    from thinwire.core.texts import size as in_units

    return NOTHING if count is None else in_units(count)


def grouped(digits: str) -> str:
    """A fingerprint as two people read it to each other."""
    from thinwire.core.texts import grouped as in_eights

    return in_eights(digits)


def seconds(count: float | None) -> str:
    """A duration as people say it.

    >>> seconds(0.0042), seconds(0.42), seconds(75), seconds(7300)
    ('4.2 ms', '0.42 s', '1 min 15 s', '2 h 1 min')
    """
    if count is None or not math.isfinite(count):
        return NOTHING
    if count < 0.1:
        return f"{count * 1000:.2g} ms"
    if count < 60:
        return f"{count:.2f} s" if count < 10 else f"{count:.0f} s"
    minutes, rest = divmod(round(count), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ago(wall: float | None, now: float | None = None) -> str:
    """How long ago a moment was."""
    return NOTHING if not wall else f"{seconds(max(0.0, (now or time.time()) - wall))} ago"


def moment(wall: float | None) -> str:
    """Local time, to the second."""
    return "" if wall is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def figure(value: float | None) -> str:
    """A metric, four figures after the point."""
    return NOTHING if value is None else f"{value:.4f}"
