"""Tables: no wider than a terminal, whole for a pipe."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from thinwire.cli import console
from thinwire.core.formatting import NOTHING, duration

TEXT = "as long as a sentence is that somebody wrote about it"


@pytest.fixture
def lines(monkeypatch, capsys):
    """The lines of a table on a terminal with so many columns; None is a pipe."""

    def shown(header, rows, columns, right=()):
        monkeypatch.setattr(console, "terminal_columns", lambda: columns)
        capsys.readouterr()
        console.table(header, rows, right)
        return capsys.readouterr().out.splitlines()

    return shown


def in_terminal(columns: int, *words: object) -> list[str]:
    """What a command prints in a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "thinwire.cli", *map(str, words)]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    printed = b""
    with subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL, env=env) as process:
        os.close(its)
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # so Linux says that nobody writes there any more
                break
            if not part:
                break
            printed += part
    os.close(ours)
    assert process.returncode == 0
    return printed.decode().splitlines()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_is_no_wider_than_the_terminal(thinwire, columns):
    shown = in_terminal(columns, "codecs", "list")
    assert max(map(len, shown)) <= columns
    names = [row["name"] for row in thinwire("codecs", "list", "--json").document]
    if columns == 80:
        assert [line.split()[1] for line in shown if line.startswith("NAME")] == names
    else:
        assert [line.split()[0] for line in shown[1:] if not line.startswith(" ")] == names


def test_a_pipe_gets_whole_rows(thinwire):
    rows = thinwire("codecs", "list", "--json").document
    assert len(thinwire("codecs", "list").out.splitlines()) == 1 + len(rows)


def test_a_table_that_fits_is_left_as_it_is(lines):
    rows = [("a", "1", TEXT), ("b", "22", "-")]
    wide = lines(("name", "count", "what"), rows, 70, right=("count",))
    assert wide == lines(("name", "count", "what"), rows, None, right=("count",))
    assert wide == ["NAME  COUNT  WHAT", f"a         1  {TEXT}", "b        22  -"]


def test_long_texts_are_wrapped_inside_their_columns(lines):
    rows = [("a", TEXT, "1"), ("b", None, "22"), ("c", TEXT, "3")]
    assert lines(("name", "what", "count"), rows, 41, right=("count",)) == [
        "NAME  WHAT                          COUNT",
        "a     as long as a sentence is          1", "      that somebody wrote about it",
        "b     -                                22",
        "c     as long as a sentence is          3", "      that somebody wrote about it",
    ]  # fmt: skip


def test_no_text_is_cut_where_several_columns_are_wrapped(thinwire):
    words = [thinwire("plan", "keys").out.split(), " ".join(shown := in_terminal(80, "plan", "keys")).split()]
    assert sorted(words[0]) == sorted(words[1])
    assert max(map(len, shown)) <= 80


def test_a_table_that_cannot_be_wrapped_is_shown_row_by_row(lines):
    header, cells = ("round", "one", "two", "what"), ("1", "1" * 9, "2" * 9, TEXT)
    assert lines(header, [cells, ("2", "", "3", "")], 30) == [
        "ROUND  1", "ONE    111111111", "TWO    222222222", "WHAT   as long as a sentence",
        "       is that somebody wrote", "       about it", "", "ROUND  2", "TWO    3",
    ]  # fmt: skip


def test_a_column_that_holds_nothing_goes_first(lines):
    assert lines(("name", "seen", "late"), [("a" * 9, "-", "1"), ("b", "-", "2")], 20) == [
        "NAME       LATE", "aaaaaaaaa  1", "b          2",
    ]  # fmt: skip


def test_a_word_that_is_longer_than_the_terminal_stays_whole(lines):
    digest = "0" * 64
    for columns in (40, 70):
        assert f"DIGEST  {digest}" in lines(("name", "digest", "size"), [("a", digest, "1")], columns)


def test_a_long_table_is_printed_without_being_wrapped(lines):
    rows = [(str(i), TEXT) for i in range(console.MAX_WRAPPED + 1)]
    assert len(lines(("n", "what"), rows, 40)) == 1 + len(rows)


def test_marks_of_rich_in_a_cell_are_shown_as_they_are(lines):
    shown = lines(("key", "what"), [("[run] a", "[bold]red[/bold] :smile: " + TEXT)], 40)
    assert "[bold]red[/bold] :smile:" in " ".join(" ".join(shown).split())


def test_a_measure_that_is_no_number_is_null_in_json_and_unknown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    console.document({"rtt_s": [math.inf, -math.inf, math.nan, 1.5], "at": Path("here")})
    assert json.loads(capsys.readouterr().out) == {"rtt_s": [None, None, None, 1.5], "at": "here"}
    assert [duration(value) for value in (math.inf, -math.inf, math.nan)] == ["unknown"] * 3
    assert duration(None) == NOTHING
