"""The glossary's bold words only become fewer, and its table of hashed strings has every one of them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping

import pytest

from benchmarks.words import GLOSSARY, HASHED, ROOT, banned, bold_words, code_texts, count

PAGE = GLOSSARY.read_text()
MOST = {
    "docs": 0,
    "help": 0,
    "messages": 0,
    "data": 0,
    "dashboard": 0,
    "docstrings": 0,
    "identifiers": 0,
}


@pytest.fixture(scope="module")
def found() -> Mapping[str, Counter[str]]:
    return banned()


@pytest.mark.parametrize("area", MOST)
def test_banned_words_become_fewer(area: str, found: Mapping[str, Counter[str]]) -> None:
    more = f"{found[area].total()} in {area}, at most {MOST[area]}: {dict(found[area].most_common())}"
    assert found[area].total() <= MOST[area], more


def test_every_area_has_a_bound(found: Mapping[str, Counter[str]]) -> None:
    assert set(found) == set(MOST)


def test_every_bold_word_of_the_table_is_searched() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(bold_words(PAGE)) == sum(row.count("**") // 2 for row in rows) > 30


def test_a_word_with_a_note_counts_only_beside_its_noun() -> None:
    words = bold_words("| a | b | **head** (of a reply), **door**, **ask_id** |")
    assert count(["The head of a page. The head of the reply.", "ReplyHead"], words) == {"head": 2}
    assert count(["indoor doors, DOOR_BYTES and ask ids", "no\nask\nid"], words) == {"door": 2, "ask_id": 2}


def test_names_messages_and_docstrings_are_told_apart() -> None:
    code = 'class Asked:\n    """Doc."""\n    ask_id: str\n    def send(self, to): raise E(f"no {to}", kind="door")'
    assert set(code_texts(ast.parse(code))) == {
        ("docstrings", "Doc."), ("identifiers", "Asked"), ("identifiers", "send"), ("identifiers", "to"),
        ("identifiers", "self"), ("data", "ask_id"), ("messages", "no "), ("data", "door"),
    }  # fmt: skip


def called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_labels_that_a_hash_reads_are_in_the_table_and_are_not_searched() -> None:
    assert list(code_texts(ast.parse('derive(key, "spare", of("spare"))'))) == []
    labels = set[str]()
    for path in (ROOT / "thinwire").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and called(call.func) in HASHED:
                given = [each.value for each in call.args if isinstance(each, ast.Constant)]
                labels |= {each for each in given if isinstance(each, str)}
    table = PAGE.partition("## What a hash reads")[2].partition("\n## ")[0]
    assert labels - set(re.findall(r'`"(\w+)"`', table)) == set()
    assert len(labels) > 10
