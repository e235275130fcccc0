"""Each reason that the program makes has a sentence, and the sentence uses its numbers and no others."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from string import Formatter

import thinwire
from thinwire.core.formatting import Reason
from thinwire.reports.reason_text import SENTENCES, sentence


@cache
def made() -> list[tuple[ast.expr, ast.expr]]:
    """Code and numbers of each `Reason(...)` in the program."""
    return [
        (call.args[0], call.args[1])
        for path in Path(thinwire.__file__).parent.rglob("*.py")
        if "Reason(" in (source := path.read_text())
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Reason"
    ]


def test_each_reason_is_written_out_so_that_its_code_and_numbers_can_be_read() -> None:
    for code, numbers in made():
        assert isinstance(code, ast.Constant), ast.unparse(code)
        assert isinstance(numbers, ast.Dict) and all(isinstance(key, ast.Constant) for key in numbers.keys), code.value


def test_the_sentences_are_those_of_the_reasons_that_the_program_makes() -> None:
    assert {ast.literal_eval(code) for code, _ in made()} == SENTENCES.keys()


def test_a_sentence_has_exactly_the_numbers_of_its_reason() -> None:
    for code, numbers in made():
        assert isinstance(numbers, ast.Dict)
        names = {ast.literal_eval(key) for key in numbers.keys if key is not None}
        fields = {field for _, field, _, _ in Formatter().parse(SENTENCES[ast.literal_eval(code)]) if field is not None}
        assert fields == names, ast.unparse(code)


def test_a_code_of_a_later_version_stands_for_itself() -> None:
    assert sentence([Reason("planned", {}), Reason("of-a-later-version", {"seconds": 2.0})]) == (
        "set by the plan; of-a-later-version"
    )
