"""The output of all commands: JSON, lines and tables on stdout, notes on stderr, and numbers with units.

A table is whole in a pipe or a file, and no wider than the terminal for a person. If it is too wide, these steps follow
until it fits:

- Columns without any content are left out.
- Long texts move to a line of their own below their row, the widest column first.
- The remaining columns continue in a second table below the first, whose rows begin with the first column again. If the
  first column does not tell the rows apart, those columns move below their rows as well.
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
BELOW = "below"  # the cell of a text that moved below its row
BETWEEN, INDENT = "  ", "    "
LONG = 16  # characters: a wider cell counts as text, which reads as well below its row
FEW = 0.1  # if at most this share of a column's cells is long, only these cells move

Cells = Sequence[str]


def terminal_columns() -> int | None:
    """Return the width of the terminal of stdout; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def lines_of(header: Cells, rows: Sequence[Cells], right: Container[str], columns: int | None) -> Iterator[str]:
    """Yield the lines of a table of `rows` under `header`.

    Columns named in `right` are aligned to the right. `columns` is the width of the terminal; None means unlimited. A
    word that is longer than the terminal stays in one piece, because it may be there to be copied.

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
    """Describe a column of a table. Cells longer than `most` move below their rows; without `stays` all cells do."""

    title: str
    cells: Cells
    right: bool
    most: float = math.inf
    stays: bool = True

    @cached_property
    def width(self) -> int:
        """Return the width of the column in characters, title included."""
        return max(len(self.title), *(len(self.shown(i)) for i in range(len(self.cells))), 0)

    @property
    def empty(self) -> bool:
        """Return True if no row has a value in this column."""
        return all(cell == EMPTY_CELL for cell in self.cells)

    def given_way(self) -> Column:
        """Return the column with its long cells moved below their rows: only these if they are few, else all."""
        few = sum(len(cell) > LONG for cell in self.cells) <= FEW * len(self.cells)
        return replace(self, most=LONG, stays=few and self.most > LONG)

    def shown(self, i: int) -> str:
        """Return the cell of row `i` in the table itself."""
        return self.cells[i] if len(self.cells[i]) <= self.most else BELOW

    def below(self, i: int, titled: bool) -> str:
        """Return the text of row `i` that moves below it, after the title if `titled`; "" if nothing moves."""
        there = self.cells[i] != EMPTY_CELL and (not self.stays or len(self.cells[i]) > self.most)
        return (f"{self.title} " if titled else "") + self.cells[i] if there else ""

    def placed(self, text: str) -> str:
        """Return a text padded to the column's width."""
        return text.rjust(self.width) if self.right else text.ljust(self.width)


def _fitted(found: Sequence[Column], columns: int) -> list[Column]:
    """Return the columns that fit into a width, with empty ones left out and long ones moved below."""
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
    """Distribute the columns that stay over tables of at most `columns` characters.

    Each table begins with the first column and has at least one more.
    """
    first, *others = (column for column in found if column.stays)
    tables = [[first]]
    for column in others:
        if columns is not None and len(tables[-1]) > 1 and _width([*tables[-1], column]) > columns:
            tables.append([first])
        tables[-1].append(column)
    return tables


def _width(found: Sequence[Column]) -> int:
    """Return the width of the columns that stay, in characters."""
    staying = [column.width for column in found if column.stays]
    return sum(staying) + len(BETWEEN) * (len(staying) - 1)


def _line(cells: Iterator[str]) -> str:
    """Join the cells of one row."""
    return BETWEEN.join(cells).rstrip()


def wrapped(text: str, columns: int, begin: str) -> list[str]:
    """Wrap a text behind `begin` to lines of `columns` characters, indented to its first word; no word is broken.

    >>> wrapped("of two devices", 12, "note ")
    ['note of two', '     devices']
    """
    return textwrap.wrap(
        text, max(columns, 2 * len(begin)), initial_indent=begin, subsequent_indent=" " * len(begin),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


NOTHING = EMPTY_CELL


def document(data: Any) -> None:
    """Print one JSON document on stdout."""
    try:
        text = json.dumps(data, indent=2, default=str, allow_nan=False)
    except ValueError:  # JSON has no NaN: metrics stored before such values were refused become null
        read = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
        text = json.dumps(read, indent=2)
    print(text)


def line(text: str = "") -> None:
    """Print one line of data on stdout and flush it: the reader may be a pipe."""
    print(text, flush=True)


def sentence(text: str, begin: str = "") -> None:
    """Print a sentence on stdout behind `begin`, wrapped to the terminal's width; a pipe gets it in one line."""
    columns = terminal_columns()
    for each in [begin + text] if columns is None else wrapped(text, columns, begin):
        line(each)


def note(text: str) -> None:
    """Print a remark for the person on stderr."""
    print(text, file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Return True if stdout and stderr are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Print a table, with two spaces between columns and those named in `right` aligned to the right.

    Cells may hold text of devices and strangers, so control characters are removed.
    """
    from thinwire.core.formatting import plain

    shown = [[NOTHING if cell is None or cell == "" else plain(str(cell)) for cell in row] for row in rows]
    for text in lines_of(header, shown, right, terminal_columns()):
        line(text)


def size(count: float | None) -> str:
    """Format a number of bytes in decimal units with three digits.

    >>> size(9610 * 4), size(950), size(None)
    ('38.4 kB', '950 B', '-')
    """
    from thinwire.core.formatting import size as in_units

    return NOTHING if count is None else in_units(count)


def grouped(digits: str) -> str:
    """Format a fingerprint in groups, so that two people can compare it aloud."""
    from thinwire.core.formatting import grouped as in_eights

    return in_eights(digits)


def seconds(count: float | None) -> str:
    """Format a duration given in seconds.

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
    """Format the time since a wall-clock moment, as in `3 s ago`; both are seconds since 1970."""
    return NOTHING if not wall else f"{seconds(max(0.0, (now or time.time()) - wall))} ago"


def moment(wall: float | None) -> str:
    """Format a wall-clock moment (seconds since 1970) as local time, to the second."""
    return "" if wall is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))


def figure(value: float | None) -> str:
    """Format a metric with four digits after the point."""
    return NOTHING if value is None else f"{value:.4f}"
