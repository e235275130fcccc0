"""`benchmarks.house` runs, and counts what its docstring says; files of the package keep within its limits."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from benchmarks.house import (
    COUNTED,
    LARGE_LINES,
    docstrings,
    files_called,
    in_most_periods,
    python_files,
    sizes,
    undocumented,
)
from tests.support.benchmark_document import document_of
from thinwire.core import Key

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("house")
    figures, rows = made["figures"], made["rows"]
    assert {
        "python_files", "files_under_60", "files_over_400", "lines", "closure_encode", "files_per_encode",
        "files_per_update", "files_per_assignment", "undocumented_public", "banned_words", "riddles",
    } <= set(figures)  # fmt: skip
    files = {what: {row["file"] for row in rows if row["what"] == f"file of one {what}"} for what in WAYS}
    for what, counted in COUNTED.items():
        assert sum(name.split("/")[1] in counted for name in files[what]) == figures[f"files_per_{what}"]
    assert all((ROOT / name).is_file() for found in files.values() for name in found)
    for what, parts in WAYS.items():
        assert parts <= {name.split("/")[1] for name in files[what]}, f"a step of one {what} was not noted"
    encode = {row["file"] for row in rows if row["what"] == "file of one encode"}
    assert len(encode) == figures["files_per_encode"]
    assert {"thinwire/compression/feedback.py", "thinwire/compression/frame.py"} <= encode
    assert "thinwire/compression/spec.py" not in encode
    undocumented_rows = [row for row in rows if row["what"] == "without a docstring"]
    assert len(undocumented_rows) == figures["undocumented_public"]


WAYS = {"update": {"server", "store", "aggregation"}, "assignment": {"client", "aggregation"}}


def test_only_files_whose_functions_are_called_are_files_of_a_call() -> None:
    key = Key(1)
    assert files_called(lambda: json.dumps(key.to_bytes().hex())) == ["thinwire/core/prng.py"]
    assert files_called(lambda: None) == []


def test_a_file_that_is_called_from_time_to_time_is_not_counted() -> None:
    starts = [float(second) for second in range(8)]
    always = "".join(f"{second}.5 always.py\n" for second in range(8))
    at_first = "0.5 first.py\n1.5 first.py\n2.5 first.py\n"
    assert in_most_periods(f"{always}{at_first}4.5 seldom.py\n7.5 after.py\n", starts) == ["always.py"]


def test_a_method_has_the_docstring_that_it_inherits() -> None:
    trees = {
        "a.py": ast.parse('"""A module."""\nclass Base:\n    """Law."""\n    def said(self):\n        """Say."""'),
        "b.py": ast.parse(
            "class Own(a.Base[int]):\n    def said(self): ...\n    def silent(self): ...\ndef _own(): ..."
        ),
        "c.py": ast.parse(""),
    }
    assert list(undocumented(trees)) == ["b.py:", "b.py:Own", "b.py:Own.silent"]


def test_private_docstrings_are_read_too() -> None:
    assert list(docstrings(ast.parse('def _own():\n    """Send."""'))) == ["Send."]


def test_files_of_one_codec_may_be_short(tmp_path: Path) -> None:
    for name, lines in (("a.py", 59), ("b.py", 60), ("__init__.py", 1), ("codecs/int8.py", 3), ("c.py", 401)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n" * lines)
    assert sizes(tmp_path) == {"python_files": 5, "files_under_60": 1, "files_over_400": 1, "lines": 524}


def test_no_file_of_the_package_is_too_long_or_too_short_to_be_read() -> None:
    figures = sizes(ROOT / "thinwire")
    assert (figures["files_over_400"], figures["files_under_60"]) == (0, 0)


def test_no_file_of_tests_is_too_long_to_be_read() -> None:
    lines = {str(path): len(path.read_text().splitlines()) for path in python_files(ROOT / "tests")}
    assert [path for path, count in lines.items() if count > LARGE_LINES] == []
