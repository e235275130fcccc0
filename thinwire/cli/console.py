"""A table as lines: whole for a pipe, and no wider than the terminal where a person reads it.

Where it is too wide, columns that hold nothing are left away, and long texts go onto a line of their own below their
row, the widest column first. What is too wide even then goes on in a second table below the first, its rows begun by
the first column again; or below its row too, where the first column does not tell the rows apart.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

EMPTY_CELL = "-"
BELOW = "below"  # stands in the place of a text that does
BETWEEN, INDENT = "  ", "    "
LONG = 16  # a wider cell is text, and is read as well below its row
FEW = 0.1  # where no more of a column's cells are long, the others stay

Cells = Sequence[str]


def terminal_columns() -> int | None:
    """How wide the terminal is that stdout goes to; None where it goes to a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def lines_of(header: Cells, rows: Sequence[Cells], right: Container[str], columns: int | None) -> Iterator[str]:
    """`rows` under `header` in `columns` columns (None: as many as it takes); those named in `right` set to the right.

    A word that is longer than the terminal stays in one piece: it may be there to be copied.

    >>> rows = [["fp16", "16", "float16, to nearest, ties to even"]]
    >>> for line in lines_of(["name", "bits", "what"], rows, ["bits"], 32):
    ...     print(line)
    NAME  BITS
        WHAT
    fp16    16
        float16, to nearest, ties to
        even
    """
    found = [Column(title.upper(), [row[i] for row in rows], title in right) for i, title in enumerate(header)]
    if columns is not None:
        found = _fitted(found, columns)
    moved = [column for column in found if not column.stays]
    for number, table in enumerate(_tables(found, columns)):
        if number:
            yield ""
        yield _line(column.placed(column.title) for column in table)
        if number == 0 and len(moved) == 1:
            yield INDENT + moved[0].title
        for i in range(len(rows)):
            yield _line(column.placed(column.shown(i)) for column in table)
            if number == 0 and columns is not None:
                texts = (column.below(i, titled=column.stays or len(moved) > 1) for column in found)
                yield from wrapped(BETWEEN.join(filter(None, texts)), columns, INDENT)


@dataclass(frozen=True)
class Column:
    """One column; cells that are longer than `most` stand below their rows, and without `stays` all of them do."""

    title: str
    cells: Cells
    right: bool
    most: float = math.inf
    stays: bool = True

    @cached_property
    def width(self) -> int:
        return max(len(self.title), *(len(self.shown(i)) for i in range(len(self.cells))), 0)

    @property
    def empty(self) -> bool:
        return all(cell == EMPTY_CELL for cell in self.cells)

    def given_way(self) -> Column:
        """What is long goes below its row: a few cells, or the whole column."""
        few = sum(len(cell) > LONG for cell in self.cells) <= FEW * len(self.cells)
        return replace(self, most=LONG, stays=few and self.most > LONG)

    def shown(self, i: int) -> str:
        return self.cells[i] if len(self.cells[i]) <= self.most else BELOW

    def below(self, i: int, titled: bool) -> str:
        there = self.cells[i] != EMPTY_CELL and (not self.stays or len(self.cells[i]) > self.most)
        return (f"{self.title} " if titled else "") + self.cells[i] if there else ""

    def placed(self, text: str) -> str:
        return text.rjust(self.width) if self.right else text.ljust(self.width)


def _fitted(found: Sequence[Column], columns: int) -> list[Column]:
    """Those that are left, after what is too wide gave way."""
    left = list(found)
    if _width(left) > columns:
        left = [left[0], *(column for column in left[1:] if not column.empty)]
    while _width(left) > columns:
        long = [(column.width, i) for i, column in enumerate(left) if i and column.stays and column.width > LONG]
        if not long:
            break
        _, widest = max(long)
        left[widest] = left[widest].given_way()
    if len(set(left[0].cells)) == len(left[0].cells):
        return left
    for i in range(len(left) - 1, 0, -1):
        if _width(left) > columns:
            left[i] = replace(left[i], stays=False)
    return left


def _tables(found: Sequence[Column], columns: int | None) -> list[list[Column]]:
    """The columns that stay, cut into tables of `columns`; each begins with the first, and has one more at least."""
    first, *others = (column for column in found if column.stays)
    tables = [[first]]
    for column in others:
        if columns is not None and len(tables[-1]) > 1 and _width([*tables[-1], column]) > columns:
            tables.append([first])
        tables[-1].append(column)
    return tables


def _width(found: Sequence[Column]) -> int:
    staying = [column.width for column in found if column.stays]
    return sum(staying) + len(BETWEEN) * (len(staying) - 1)


def _line(cells: Iterator[str]) -> str:
    return BETWEEN.join(cells).rstrip()


def wrapped(text: str, columns: int, begin: str) -> list[str]:
    """A text behind `begin`, as lines of so many columns that all go on below its first word; no word is broken.

    >>> wrapped("of two devices", 12, "note ")
    ['note of two', '     devices']
    """
    return textwrap.wrap(
        text, max(columns, 2 * len(begin)), initial_indent=begin, subsequent_indent=" " * len(begin),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# What a person sees: data on stdout, progress on stderr and only where a terminal is.


NOTHING = EMPTY_CELL


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
    columns = terminal_columns()
    for each in [begin + text] if columns is None else wrapped(text, columns, begin):
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
    from thinwire.core.formatting import plain

    shown = [[NOTHING if cell is None or cell == "" else plain(str(cell)) for cell in row] for row in rows]
    for text in lines_of(header, shown, right, terminal_columns()):
        line(text)


def size(count: float | None) -> str:
    """Bytes in decimal units, three figures.

    >>> size(9610 * 4), size(950), size(None)
    ('38.4 kB', '950 B', '-')
    """
    from thinwire.core.formatting import size as in_units

    return NOTHING if count is None else in_units(count)


def grouped(digits: str) -> str:
    """A fingerprint as two people read it to each other."""
    from thinwire.core.formatting import grouped as in_eights

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
