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
from thinwire.cli.console import lines_of
from thinwire.core.formatting import duration

TEXT = "as long as a sentence is that somebody wrote about it"


def lines(header, rows, columns, right=()):
    return list(lines_of(header, rows, right, columns))


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
    assert [line.split()[0] for line in shown[1:] if not line.startswith(" ")] == names


def test_a_pipe_gets_whole_rows(thinwire):
    rows = thinwire("codecs", "list", "--json").document
    assert len(thinwire("codecs", "list").out.splitlines()) == 1 + len(rows)


def test_a_table_that_fits_is_left_as_it_is():
    rows = [("a", "1", TEXT), ("b", "22", "-")]
    wide = lines(("name", "count", "what"), rows, 70, right=("count",))
    assert wide == lines(("name", "count", "what"), rows, None, right=("count",))
    assert wide == ["NAME  COUNT  WHAT", f"a         1  {TEXT}", "b        22  -"]


def test_long_texts_stand_below_their_rows():
    assert lines(("name", "what", "count"), [("a", TEXT, "1"), ("b", "-", "2"), ("c", TEXT, "3")], 60) == [
        "NAME  COUNT", "    WHAT", "a     1", f"    {TEXT}", "b     2", "c     3", f"    {TEXT}",
    ]  # fmt: skip


def test_two_texts_below_a_row_are_told_apart():
    rows = [("a", "four cores and 7.5 GiB of memory", "it ended well, the last time"), ("b", "-", TEXT)]
    assert lines(("name", "has", "last"), rows, 36) == [
        "NAME", "a", "    HAS four cores and 7.5 GiB of", "    memory  LAST it ended well, the", "    last time",
        "b", "    LAST as long as a sentence is", "    that somebody wrote about it",
    ]  # fmt: skip


def test_a_few_long_cells_move_without_their_column():
    rows = [("[run] a", TEXT, TEXT), *((f"[run] {i}", "1", TEXT) for i in range(9))]
    shown = lines(("key", "value", "meaning"), rows, 40)
    assert shown[:4] == ["KEY      VALUE", "    MEANING", "[run] a  below", f"    VALUE {TEXT[:29]}"]
    assert shown[-3:] == ["[run] 8  1", f"    {TEXT[:29]}", f"    {TEXT[30:]}"]


def test_what_is_too_wide_even_then_goes_on_below():
    header, cells = ("round", "one", "two", "three", "four"), ("1", "1" * 9, "2" * 9, "3" * 9, "4" * 9)
    assert lines(header, [cells], 30) == [
        "ROUND  ONE        TWO", "1      111111111  222222222", "",
        "ROUND  THREE      FOUR", "1      333333333  444444444",
    ]  # fmt: skip


def test_rows_that_their_first_column_does_not_tell_apart_are_not_cut_in_two():
    rows = [("int8", "0.1", "1" * 9, "2" * 9), ("int8", "0.5", "3" * 9, "4" * 9)]
    assert lines(("codec", "lr", "up", "down"), rows, 24) == [
        "CODEC  LR   UP", "    DOWN", "int8   0.1  111111111", "    222222222", "int8   0.5  333333333",
        "    444444444",
    ]  # fmt: skip


def test_a_column_that_holds_nothing_goes_first():
    assert lines(("name", "seen", "late"), [("a" * 9, "-", "1"), ("b", "-", "2")], 20) == [
        "NAME       LATE", "aaaaaaaaa  1", "b          2",
    ]  # fmt: skip


def test_a_word_that_is_longer_than_the_terminal_stays_whole():
    digest = "0" * 64
    assert f"    {digest}" in lines(("name", "digest", "size"), [("a", digest, "1")], 40)


def test_a_measure_that_is_no_number_is_null_in_json_and_unknown_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    console.document({"rtt_s": [math.inf, -math.inf, math.nan, 1.5], "at": Path("here")})
    assert json.loads(capsys.readouterr().out) == {"rtt_s": [None, None, None, 1.5], "at": "here"}
    assert [duration(value) for value in (math.inf, -math.inf, math.nan)] == ["unknown"] * 3
    assert console.seconds(math.inf) == console.NOTHING
