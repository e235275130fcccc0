"""The output of all commands: JSON, lines and tables on stdout, notes on stderr.

A table is whole in a pipe or a file. On a terminal that is too narrow for it, its texts are wrapped. Where even that
does not fit, each row becomes a block with one cell a line: no word is broken, because it may be there to be copied.
"""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from thinwire.core.formatting import NOTHING, duration, plain, with_home

GAP = "  "
TEXT = 16  # characters: a wider column may be wrapped, to no less than this
MAX_WRAPPED = 200  # rows: wrapping takes 60 times as long as `padded`

Cells = Sequence[str]


def terminal_columns() -> int | None:
    """Return the width of the terminal of stdout; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(header: Cells, rows: Sequence[Sequence[Any]], right: Container[str] = ()) -> None:
    """Print a table; columns named in `right` are aligned to the right.

    Cells may hold text of devices and strangers, so control characters are removed.
    """
    shown = [[NOTHING if cell is None or cell == "" else plain(str(cell)) for cell in row] for row in rows]
    columns, whole = terminal_columns(), not rows or len(rows) > MAX_WRAPPED
    if columns is None or whole or _width(_widths(header, shown)) <= columns:
        lines = padded(header, shown, right)
    else:
        lines = _fitted(*_without_empty_columns(header, shown), right, columns)
    for text in lines:
        line(text)


def padded(header: Cells, rows: Sequence[Cells], right: Container[str] = ()) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as their widest cell.

    >>> list(padded(["name", "bits"], [["fp16", "16"], ["sign", "1"]], ["bits"]))
    ['NAME  BITS', 'fp16    16', 'sign     1']
    """
    titles, form = [_title(title) for title in header], _form(header, right, _widths(header, rows))
    for row in (titles, *rows):
        yield form.format(*row).rstrip()


def _form(header: Cells, right: Container[str], widths: Sequence[int]) -> str:
    """Return the format of a line with columns of these widths."""
    sides = (">" if title in right else "<" for title in header)
    return GAP.join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))


def _title(title: str) -> str:
    """Return the title of a column in capitals; the name of a plan stays as it is."""
    return title if title.endswith(".toml") else title.upper()


def _widths(header: Cells, rows: Sequence[Cells]) -> list[int]:
    """Return the width of each column."""
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


def _width(widths: Sequence[int]) -> int:
    """Return the width of a table with columns of these widths."""
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _without_empty_columns(header: Cells, rows: Sequence[Cells]) -> tuple[Cells, Sequence[Cells]]:
    """Return the table without columns in which no row has a value."""
    full = [i for i in range(len(header)) if any(row[i] != NOTHING for row in rows)]
    return [header[i] for i in full], [[row[i] for i in full] for row in rows]


def _fitted(header: Cells, rows: Sequence[Cells], right: Container[str], columns: int) -> Iterator[str]:
    """Return the lines of a table of at most `columns` characters, but for longer words.

    Columns after the first may be wrapped to `TEXT` characters, and no word is broken.
    """
    words = [max(len(word) for row in (header, *rows) for word in row[i].split() or [""]) for i in range(len(header))]
    widths = _widths(header, rows)
    least = [widths[0], *(min(width, max(TEXT, word)) for width, word in zip(widths[1:], words[1:], strict=True))]
    if _width(widths) <= columns:
        return padded(header, rows, right)
    return (
        _wrapped_table(header, rows, right, columns, least)
        if _width(least) <= columns
        else _blocks(header, rows, columns)
    )


def _wrapped_table(
    header: Cells, rows: Sequence[Cells], right: Container[str], columns: int, least: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of a table of `columns` characters whose texts are wrapped inside their columns."""
    widths = _widths(header, rows)
    while _width(widths) > columns:
        widest = max((i for i, width in enumerate(widths) if width > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    form = _form(header, right, widths)
    for row in ([_title(title) for title in header], *rows):
        cells = (
            textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(row, widths, strict=True)
        )
        for texts in itertools.zip_longest(*cells, fillvalue=""):
            yield form.format(*texts).rstrip()


def _blocks(header: Cells, rows: Sequence[Cells], columns: int) -> Iterator[str]:
    """Yield each row as a block with one cell a line, without empty cells, and an empty line between blocks."""
    begin = max(map(len, header))
    for i, row in enumerate(rows):
        if i:
            yield ""
        cells = ((title, cell) for title, cell in zip(header, row, strict=True) if cell != NOTHING)
        for title, cell in cells:
            yield from wrapped(cell, columns, f"{_title(title):<{begin}}{GAP}")


def wrapped(text: str, columns: int, begin: str) -> list[str]:
    """Wrap a text behind `begin` to lines of `columns` characters, indented to its first word; no word is broken.

    >>> wrapped("of two devices", 12, "note ")
    ['note of two', '     devices']
    """
    return textwrap.wrap(
        text, max(columns, 2 * len(begin)), initial_indent=begin, subsequent_indent=" " * len(begin),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def document(data: Any) -> None:
    """Print one JSON document on stdout."""
    try:
        text = json.dumps(data, indent=2, default=str, allow_nan=False)
    except ValueError:  # JSON has no NaN: metrics stored before such values were refused become null
        read = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
        text = json.dumps(read, indent=2)
    print(text)


_words: list[str] = []  # of this process's command line


def typed(words: Sequence[str]) -> None:
    """Remember the command line of this process, for `as_typed`."""
    _words[:] = words


def as_typed(text: str) -> str:
    """Return text in which each command for this end names the `--home` that the person has typed."""
    joined = [word.removeprefix("--home=") for word in _words if word.startswith("--home=")]
    given = [*joined, *(home for word, home in itertools.pairwise(_words) if word == "--home")]
    option = f" --home {shlex.quote(given[-1])}" if given else ""
    return with_home(text, option, "client" if _words[:1] == ["client"] else "aggregator")


def line(text: str = "") -> None:
    """Print one line of data on stdout and flush it: the reader may be a pipe."""
    print(as_typed(text), flush=True)


def sentence(text: str, begin: str = "") -> None:
    """Print a sentence on stdout behind `begin`, wrapped to the terminal's width; a pipe gets it in one line."""
    columns, text = terminal_columns(), as_typed(text)
    for each in [begin + text] if columns is None else wrapped(text, columns, begin):
        line(each)


def note(text: str) -> None:
    """Print a remark for the person on stderr."""
    print(as_typed(text), file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Return True if stdout and stderr are terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def ago(wall: float | None) -> str:
    """Format the time since a wall-clock moment (seconds since 1970), as in `3 s ago`."""
    return NOTHING if not wall else f"{duration(max(0.0, time.time() - wall))} ago"


def moment(wall: float | None) -> str:
    """Format a wall-clock moment (seconds since 1970) as local time, to the second."""
    return "" if wall is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
